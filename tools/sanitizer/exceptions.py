# SPDX-License-Identifier: Apache-2.0
"""Reads exceptions.json: findings that are compute-sanitizer's fault and not ours.

A list of objects; all values are texts but the last two:

    tool          memcheck, racecheck, synccheck or initcheck
    kernel        a regular expression for the kernel's whole name, as `tiercel kernels` has it
    message       the same for the finding's first line, without its place
    reason        why nothing is wrong
    shown_by      the minimal case, or the argument, which shows that
    test          a regular expression that is found in the ids of tests which show the finding
    ends_kernel   true if the tool then ends the kernel, so that these tests fail under it
    leave_out     true if the tool is not to look at the kernel: it reports every thread of every
                  block, which takes minutes
"""

import dataclasses
import json
import pathlib
import re

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
PATH = pathlib.Path(__file__).with_name("exceptions.json")
BOOLS = {"ends_kernel", "leave_out"}


@dataclasses.dataclass(frozen=True)
class Rule:
    tool: str
    kernel: str
    message: str
    reason: str
    shown_by: str
    test: str
    ends_kernel: bool = False
    leave_out: bool = False

    def covers(self, tool: str, kernel: str | None, message: str) -> bool:
        return (
            tool == self.tool
            and re.fullmatch(self.kernel, kernel or "") is not None
            and re.fullmatch(self.message, message) is not None
        )

    def __str__(self) -> str:
        return f"{self.tool} of {self.kernel}: {self.message}"


def load(path: pathlib.Path = PATH) -> list[Rule]:
    """The rules of a file.

    Raises:
        ValueError: An entry lacks a key or its text, has another, or is of no such tool.
    """
    rules = []
    names = {field.name for field in dataclasses.fields(Rule)}
    for i, entry in enumerate(json.loads(path.read_text())):
        where = f"{path.name}, entry {i}"
        if missing := names - BOOLS - entry.keys():
            raise ValueError(f"{where}: {', '.join(sorted(missing))} is missing")
        if unknown := entry.keys() - names:
            raise ValueError(f"{where}: no exception has {', '.join(sorted(unknown))}")
        if entry["tool"] not in TOOLS:
            raise ValueError(f"{where}: `tool` is {entry['tool']!r}, not one of {', '.join(TOOLS)}")
        for name, value in entry.items():
            if name in BOOLS:
                if not isinstance(value, bool):
                    raise ValueError(f"{where}: `{name}` is {value!r}, not true or false")
            elif not isinstance(value, str) or not value.strip():
                raise ValueError(f"{where}: `{name}` is {value!r}, not a text")
        for name in ("kernel", "message", "test"):
            try:
                re.compile(entry[name])
            except re.error as error:
                raise ValueError(f"{where}: `{name}` is no regular expression: {error}") from None
        rules.append(Rule(**entry))
    return rules
