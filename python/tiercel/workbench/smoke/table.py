# SPDX-License-Identifier: Apache-2.0
"""The output of ``tiercel smoke``: tables and saved results."""

from __future__ import annotations

import datetime
import math
import platform
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercel.workbench.smoke.run import Result

_HEAD = ("op", "backend", "language", "correct", "time", "speed-up", "")
_LINES = 30  # of a failure, where --verbose does not ask for all


def as_text(results: Sequence[Result]) -> str:
    names = Counter((r.target.op, r.target.name) for r in results)
    rows: list[Sequence[str]] = [_HEAD]
    for result in results:
        target = result.target
        name = _name(result, names)
        note = f"{result.status}: {result.reason}" if result.reason else ""
        if result.status == "right":
            note = result.reason or ""
        rows.append(
            (
                target.op,
                name,
                target.language,
                percent(result.share),
                duration(result.ms),
                "" if result.speedup is None else f"{result.speedup:.2f}x",
                note,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD) - 1)]
    return "\n".join(_line(row, widths) for row in rows)


def _name(result: Result, names: Mapping[tuple[str, str], int]) -> str:
    target = result.target
    origin = Path(target.origin).name
    if target.name == "-":
        return origin
    several = names[target.op, target.name] > 1  # versions of one kernel
    return f"{target.name} ({origin})" if several else target.name


def details(results: Sequence[Result], verbose: bool) -> str:
    """Below the table: the frames or values of each failure, with `verbose` all that is known."""
    names = Counter((r.target.op, r.target.name) for r in results)
    return "\n\n".join(
        f"{result.target.op} {_name(result, names)}: {title}\n{textwrap.indent(text, '  ')}"
        for result in results
        for title, text in _details(result, verbose)
    )


def _details(result: Result, verbose: bool) -> Iterator[tuple[str, str]]:
    bad = [case for case in result.cases if case["status"] not in ("right", "unsupported")]
    if result.failure:
        yield "loading it", _failure(result.failure, verbose)
    for case in bad if verbose else _chosen(bad, result.status):
        if "frames" in case:
            yield case["case"], _failure(case, verbose)
        elif case.get("values"):
            yield f"{case['case']}: {case['reason']}", "\n".join(case["values"])
    if verbose and result.output.strip():
        yield "what its process printed", result.output.strip("\n")


def _chosen(bad: list[dict[str, Any]], status: str) -> list[dict[str, Any]]:
    """The case that the row in the table tells of."""
    return [case for case in bad if case["status"] == status][:1]


def _failure(found: Mapping[str, Any], verbose: bool) -> str:
    if verbose:
        return str(found["traceback"]).rstrip()
    lines = str(found["frames"]).rstrip().splitlines()
    more = len(lines) - _LINES
    return "\n".join(lines[:_LINES] + [f"... {more} more lines: --verbose"] * (more > 0))


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        text.rjust(width) if i >= 3 else text.ljust(width)
        for i, (text, width) in enumerate(zip(row[:-1], widths, strict=True))
    ]
    return "  ".join([*cells, row[-1]]).rstrip()


def percent(share: float | None) -> str:
    """Rounded down: 100.0 % is all of it."""
    return "" if share is None else f"{math.floor(share * 1000) / 10:.1f} %"


def duration(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms * 1e3:.1f} us" if ms < 1 else f"{ms:.2f} ms"


def records(results: Sequence[Result], device: str) -> list[dict[str, Any]]:
    """For ``--save``: one a backend."""
    import torch

    import tiercel

    common = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tiercel": tiercel.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(device),
    }
    return [
        common
        | {
            "op": r.target.op,
            "backend": r.target.name,
            "language": r.target.language,
            "description": r.target.description,
            "origin": r.target.origin,
            "status": r.status,
            "correct": r.share,
            "ms": r.ms,
            "ref_ms": r.ref_ms,
            "speedup": r.speedup,
            "reason": r.reason,
            "cases": r.cases,
        }
        for r in results
    ]
