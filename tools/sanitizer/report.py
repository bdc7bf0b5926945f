# SPDX-License-Identifier: Apache-2.0
"""Reads compute-sanitizer's log: its records, and whether the log is complete."""

import dataclasses
import re

_HEAD = re.compile(r"^={9} (?! )(.+)$")
_MORE = re.compile(r"^={9} {2,}(.+)$")
_TOTAL = re.compile(r"^(?:ERROR|RACECHECK|LEAK) SUMMARY: (.+)$")
_UNSEEN = re.compile(r"(\d+) (?:errors|hazards)\b.* (?:was|were) not printed")
_COUNTED = re.compile(r"^(\d+) (?:errors?|hazards?)\b")
# Messages of the whole run, not of a kernel. That tests failed is in pytest's own report.
_REMARKS = re.compile(
    r"COMPUTE-SANITIZER$|Target application returned an error|Saved host backtrace|"
    r"Host Frame|Process ID:|Command line"
)
_SITE = re.compile(r"\bat (.+?)\+0x[0-9a-f]+(?= in |\s|$)")
_OLD_SITE = re.compile(r"\bat 0x[0-9a-f]+ in (?:.+:\d+:)?(.+)$")
_FRAME = re.compile(r"Device Frame: ?(.+?)(?:\+0x[0-9a-f]+| \[0x[0-9a-f]+\])")


@dataclasses.dataclass(frozen=True)
class Record:
    """A finding: what it is without its place, the kernel, and the log's own lines."""

    message: str
    kernel: str | None
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """A whole log. `unseen` findings were counted and not printed; None: the log has no end."""

    records: tuple[Record, ...]
    unseen: int | None


def readable(name: str) -> str:
    """A kernel's name without "void", our namespace and its parameters."""
    name = name.strip().removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"\b_GLOBAL__N__\w+::|<unnamed>::", "", name).replace("tiercel::", "")
    name = re.sub(r"\((?:\w|::)+\)(?=-?\d)", "", name)  # the type of a template argument
    depth = 0
    for i, letter in enumerate(name):  # parameters: the first parenthesis outside of < >
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:i]
    return name


def _message(head: str, more: list[str]) -> str:
    head = re.sub(r"^(?:error|warning|info|fatal): ?", "", head, flags=re.IGNORECASE)
    head = re.sub(r" detected at __shared__ .*$", " detected", head)
    if "access at" in head:  # a race: the kinds of access on both sides
        others = {found[1] for line in more if (found := re.match(r"and (\w+ access) at ", line))}
        head = " and ".join([re.sub(r" at .*$", "", head), *sorted(others)])
    return head.rstrip(" .:")


def _record(head: str, more: list[str]) -> Record:
    frames = [found[1] for line in more if (found := _FRAME.search(line))]
    sites = [
        found[1]
        for line in (head, *more)
        if (found := _SITE.search(line) or _OLD_SITE.search(line)) and "Host Frame" not in line
    ]
    # An inlined or called function has the kernel as its last frame.
    kernel = frames[-1] if frames else sites[0] if sites else None
    return Record(_message(head, more), kernel, (head, *more))


def parse(text: str) -> Report:
    """The records of a log. A line at its margin that is not known is a record too."""
    records: list[Record] = []
    head, more = "", []
    unseen, ended = 0, False

    def end() -> None:
        nonlocal head
        if head:
            records.append(_record(head, more))
        head = ""
        more.clear()

    counted = 0
    for line in text.splitlines():
        if found := _MORE.match(line):
            if head:
                more.append(found[1])
        elif (found := _HEAD.match(line)) is None:
            end()
        else:
            end()
            said = found[1].rstrip()
            if total := _TOTAL.match(said):
                ended = True
                if cut := _UNSEEN.search(total[1]):
                    unseen = max(unseen, int(cut[1]))
                elif number := _COUNTED.match(total[1]):
                    counted = max(counted, int(number[1]))
            elif cut := _UNSEEN.search(said):
                unseen = max(unseen, int(cut[1]))
            elif not _REMARKS.match(said):
                head = said
    end()
    return Report(tuple(records), max(unseen, counted - len(records)) if ended else None)
