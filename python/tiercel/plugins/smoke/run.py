# SPDX-License-Identifier: Apache-2.0
"""Finds backends and has each examined in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What a backend's row says.
RIGHT, WRONG, ERROR, HANG, CRASH, SKIPPED = "right", "wrong", "error", "hang", "crash", "skipped"


@dataclass(frozen=True)
class Target:
    """A backend to examine."""

    op: str
    name: str
    language: str
    description: str
    source: dict[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        return self.source.get("path") or self.source.get("entry_point") or "tiercel"


@dataclass
class Result:
    """What became of one; `share` is how much was right, from 0 to 1."""

    target: Target
    status: str
    share: float | None = None
    ms: float | None = None
    ref_ms: float | None = None
    reason: str | None = None
    cases: list[dict[str, Any]] = field(default_factory=list)

    @property
    def speedup(self) -> float | None:
        return self.ref_ms / self.ms if self.ms and self.ref_ms else None


def builtin(op: str | None) -> list[Target]:
    import tiercel.ops  # noqa: F401
    from tiercel._op import registry
    from tiercel.plugins.contracts import CONTRACTS

    return [
        Target(name, b.name, b.language, b.description)
        for name in CONTRACTS
        if op in (None, name)
        for b in sorted(registry[name].backends.values(), key=lambda b: b.name)
    ]


def discover(source: dict[str, str], op: str | None, timeout: float) -> list[Target | Result]:
    """The backends of a file or an entry point, listed by a process of its own."""
    reports, end = _ask({"source": source}, timeout)
    for report in reports:
        if report["step"] == "list":
            return [
                Target(p["op"], p["name"], p["language"], p["description"], source)
                for p in report["plugins"]
                if op in (None, p["op"])
            ]
    unknown = Target(op or "-", "-", "", "", source)
    failed = [report["reason"] for report in reports if report["step"] == "failed"]
    if failed:
        return [Result(unknown, ERROR, reason=failed[0])]
    return [Result(unknown, end.status, reason=end.text("loading it"))]


def examine(target: Target, device: str, timeout: float) -> Result:
    request = {"source": target.source, "op": target.op, "backend": target.name, "device": device}
    reports, end = _ask(request, timeout)
    result = Result(target, RIGHT)
    at = "starting"
    for report in reports:
        if report["step"] == "begin":
            at = report["case"]
        elif report["step"] == "case":
            result.cases.append({name: report[name] for name in _CASE if name in report})
        elif report["step"] == "time":
            result.ms, result.ref_ms = report["ms"], report["ref_ms"]
        elif report["step"] == "skipped":
            return Result(target, SKIPPED, reason=report["reason"])
        elif report["step"] == "failed":
            return Result(target, ERROR, reason=report["reason"])
    if end.status != RIGHT:
        result.cases.append(dict(zip(_CASE, (at, end.status, 0.0, end.text(at)), strict=True)))
    _judge(result)
    return result


_CASE = ("case", "status", "share", "reason")


def _judge(result: Result) -> None:
    """From the cases to the row. One that says NotImplementedError is left out of the share."""
    tried = [case for case in result.cases if case["status"] != "unsupported"]
    if tried:
        result.share = sum(case["share"] for case in tried) / len(tried)
    bad = [case for case in tried if case["status"] != "right"]
    if not tried:
        result.status = ERROR
        result.reason = f"it takes none of the cases: {_first_reason(result.cases)}"
    elif bad:
        worst = [case["status"] for case in bad]
        result.status = next((s for s in (CRASH, HANG, ERROR) if s in worst), WRONG)
        first = next(case for case in bad if case["status"] == result.status)
        result.reason = first["reason"]
        if first["case"] not in first["reason"]:
            result.reason += f" ({first['case']})"
        if len(bad) > 1:
            result.reason += f", and {len(bad) - 1} more"
    elif len(tried) < len(result.cases):
        left = [case for case in result.cases if case["status"] == "unsupported"]
        result.reason = f"{len(left)} of {len(result.cases)} cases not supported: "
        result.reason += _first_reason(left)


def _first_reason(cases: Sequence[dict[str, Any]]) -> str:
    return str(cases[0]["reason"]) if cases else "it was not tried"


@dataclass
class _End:
    """How a worker ended."""

    status: str
    how: str
    output: str

    def text(self, at: str) -> str:
        last = self.output.strip().splitlines()[-1:] if self.status == CRASH else []
        return f"{self.how} at {at}" + "".join(f": {line.strip()[:200]}" for line in last)


# Without the current folder on the path, where a file of the user's could hide a module; with the
# folder that this package is in, however it got here.
_START = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; "
    "from tiercel.plugins.smoke.worker import main; sys.exit(main(*sys.argv[1:]))"
)
_PACKAGES = Path(__file__).parents[3]


def _ask(request: dict[str, Any], timeout: float) -> tuple[list[dict[str, Any]], _End]:
    with tempfile.TemporaryDirectory(prefix="tiercel-smoke-") as folder:
        asked, reports = Path(folder, "request.json"), Path(folder, "reports.jsonl")
        output = Path(folder, "output.txt")
        asked.write_text(json.dumps(request))
        with output.open("wb") as sink:
            command = [sys.executable, "-c", _START, str(_PACKAGES)]
            # A session of its own: what the worker starts ends with it.
            process = subprocess.Popen(
                [*command, str(asked), str(reports)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with _ending(process):
                try:
                    code: int | None = process.wait(timeout)
                except subprocess.TimeoutExpired:
                    code = None
        text = output.read_text(errors="replace")
        return _read(reports), _end(code, timeout, text)


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end(code: int | None, timeout: float, output: str) -> _End:
    if code is None:
        return _End(HANG, f"no end after {timeout:g} s", output)
    if code < 0:
        with contextlib.suppress(ValueError):
            return _End(CRASH, f"killed by {signal.Signals(-code).name}", "")
        return _End(CRASH, f"killed by signal {-code}", "")
    if code > 0:
        return _End(CRASH, f"ended with exit code {code}", output)
    return _End(RIGHT, "", output)


def _read(reports: Path) -> list[dict[str, Any]]:
    if not reports.exists():
        return []
    found = []
    for line in reports.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a last line cut short
            found.append(json.loads(line))
    return found


def run(
    targets: Sequence[Target | Result],
    device: str,
    timeout: float,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """One after another, so that they do not disturb each other's times."""
    results = []
    for number, target in enumerate(targets, 1):
        if isinstance(target, Target):
            tell(f"[{number}/{len(targets)}] {target.op} {target.name}")
            target = examine(target, device, timeout)
        results.append(target)
    return results
