# SPDX-License-Identifier: Apache-2.0
"""What a run of ``tiercel smoke`` prints and saves."""

from __future__ import annotations

import datetime
import math
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiercel.plugins.smoke.run import Result

_HEAD = ("op", "backend", "language", "correct", "time", "speed-up", "")


def as_text(results: Sequence[Result]) -> str:
    names = Counter((r.target.op, r.target.name) for r in results)
    rows: list[Sequence[str]] = [_HEAD]
    for result in results:
        target = result.target
        name = target.name
        if name == "-" or names[target.op, name] > 1:  # versions of one kernel
            origin = Path(target.origin).name
            name = origin if name == "-" else f"{name} ({origin})"
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
