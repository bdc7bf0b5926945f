# SPDX-License-Identifier: Apache-2.0
"""Finds backends and has each examined in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercel.workbench.smoke.processes import CRASH, HANG, RIGHT, ask

# Other notes in a backend's row.
WRONG, ERROR, SKIPPED = "wrong", "error", "skipped"


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
    """The outcome of one backend; `share` is the part that was right, from 0 to 1."""

    target: Target
    status: str
    share: float | None = None
    ms: float | None = None
    ref_ms: float | None = None
    reason: str | None = None
    cases: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""  # what its process printed
    failure: dict[str, str] = field(default_factory=dict)  # of a file that does not load

    @property
    def speedup(self) -> float | None:
        return self.ref_ms / self.ms if self.ms and self.ref_ms else None


def builtin(op: str | None) -> list[Target]:
    from tiercel.core.dispatch import registry
    from tiercel.ops import _register  # noqa: F401
    from tiercel.plugins.contracts import CONTRACTS

    return [
        Target(name, b.name, b.language, b.description)
        for name in CONTRACTS
        if op in (None, name)
        for b in sorted(registry[name].backends.values(), key=lambda b: b.name)
    ]


def discover(source: dict[str, str], op: str | None, timeout: float) -> list[Target | Result]:
    """The backends of a file or an entry point, listed by a process of its own."""
    reports, end = ask({"source": source}, timeout)
    for report in reports:
        if report["step"] == "list":
            return [
                Target(p["op"], p["name"], p["language"], p["description"], source)
                for p in report["plugins"]
                if op in (None, p["op"])
            ]
    unknown = Target(op or "-", "-", "", "", source)
    for report in reports:
        result = _unexamined(unknown, report, end.output)
        if result is not None:
            return [result]
    return [Result(unknown, end.status, reason=end.text("loading it"), output=end.output)]


def _unexamined(target: Target, report: dict[str, Any], output: str) -> Result | None:
    """The result of one that was not tried, if that is what a report says."""
    if report["step"] == "skipped":
        return Result(target, SKIPPED, reason=report["reason"], output=output)
    if report["step"] == "failed":
        failure = {name: report[name] for name in ("frames", "traceback")}
        return Result(target, ERROR, reason=report["reason"], output=output, failure=failure)
    return None


def examine(target: Target, device: str, timeout: float) -> Result:
    request = {"source": target.source, "op": target.op, "backend": target.name, "device": device}
    reports, end = ask(request, timeout)
    result = Result(target, RIGHT, output=end.output)
    at = "starting"
    for report in reports:
        if report["step"] == "begin":
            at = report["case"]
        elif report["step"] == "case":
            result.cases.append({name: report[name] for name in _CASE if name in report})
        elif report["step"] == "time":
            result.ms, result.ref_ms = report["ms"], report["ref_ms"]
        else:
            untried = _unexamined(target, report, end.output)
            if untried is not None:
                return untried
    if end.status != RIGHT:
        case = {"case": at, "status": end.status, "share": 0.0, "reason": end.text(at)}
        result.cases.append(case)
    _judge(result)
    return result


_CASE = ("case", "status", "share", "reason", "values", "frames", "traceback")


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
