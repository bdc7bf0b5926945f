# SPDX-License-Identifier: Apache-2.0
"""The trials of a sweep so far, a JSON line each: an interrupted sweep goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiercel.workbench.tune import TuneError

Record = dict[str, Any]
_SCHEMA = 1


class Journal:
    """One worker's file in the sweep's folder; all workers' files are read at the start.

    A line is written at once and whole; what a kill left of one is dropped by the next reader.
    `starts` counts trials that were begun and have no result: one that took the process with it
    twice is not tried a third time.
    """

    def __init__(self, folder: Path, worker: str, facts: Mapping[str, str]) -> None:
        self.records: dict[str, Record] = {}
        self.starts: dict[str, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.glob("*.jsonl")):
                self._read(path, facts)
            path = folder / f"{worker}.jsonl"
            _drop_torn_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise TuneError(f"cannot keep a journal in {folder}: {error.strerror}") from None
        if self._file.tell() == 0:
            self._write({"kind": "head", "schema": _SCHEMA, **facts})
        self.starts = {trial: n for trial, n in self.starts.items() if trial not in self.records}

    def start(self, trial: str) -> None:
        self._write({"kind": "start", "trial": trial})

    def result(self, record: Record) -> None:
        self.records[record["trial"]] = record
        self._write({"kind": "result", **record})

    def close(self) -> None:
        self._file.close()

    def _write(self, data: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(data) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, path: Path, facts: Mapping[str, str]) -> None:
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")[:-1]  # the last is empty, or torn
        for number, line in enumerate(lines, 1):
            try:
                data = json.loads(line)
                kind = data.pop("kind")
            except (ValueError, KeyError, AttributeError):
                raise TuneError(f"{path}, line {number}: is no journal of tiercel tune") from None
            if kind == "head":
                _check_head(path, data, facts)
            elif kind == "start":
                self.starts[data["trial"]] = self.starts.get(data["trial"], 0) + 1
            elif kind == "result":
                self.records[data["trial"]] = data


def _check_head(path: Path, head: Mapping[str, Any], facts: Mapping[str, str]) -> None:
    for name, value in {"schema": _SCHEMA, **facts}.items():
        if head.get(name) != value:
            raise TuneError(
                f"{path.parent} holds a sweep with {name} {head.get(name)!r}, and here it is "
                f"{value!r}: remove the folder to begin anew, or name another --output"
            )


def _drop_torn_line(path: Path) -> None:
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
