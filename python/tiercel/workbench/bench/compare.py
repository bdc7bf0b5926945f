# SPDX-License-Identifier: Apache-2.0
"""``--compare``: this run against the results of an earlier one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tiercel.workbench.bench import table
from tiercel.workbench.bench.records import Record

_FIELDS = ("op", "case", "dtype", "impl", "timing")


@dataclass(frozen=True)
class Change:
    key: tuple[str, ...]
    old_ms: float
    new_ms: float

    @property
    def factor(self) -> float:
        """Above 1: slower than before."""
        return self.new_ms / self.old_ms


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    regressions: list[Change]
    lost: list[tuple[str, ...]]  # measured before, tried now, and failed


def compare(old: Iterable[Record], new: Iterable[Record], threshold: float) -> Comparison:
    """The cases that both runs measured. Ours slower by more than `threshold` is a regression.

    The peers' changes say how much of ours is the machine's; they never count as regressions.
    """
    new = list(new)
    before, now = _newest(old), _newest(new)
    failed = {_key(r)[:-1] for r in new if r["status"] != "ok"}
    changes = [
        Change(key, before[key]["ms_median"], now[key]["ms_median"])
        for key in now
        if key in before and before[key]["ms_median"]
    ]
    ours = [change for change in changes if _is_ours(change.key)]
    # A failed record has no timing: look without it.
    lost = [k for k in before if _is_ours(k) and k not in now and k[:-1] in failed]
    slow = [change for change in ours if change.factor > 1 + threshold]
    return Comparison(changes, slow, lost)


def as_text(comparison: Comparison, threshold: float) -> str:
    rows = []
    for change in comparison.changes:
        op, case, dtype, impl, timing = change.key
        mark = "REGRESSION" if change in comparison.regressions else ""
        times = (table.microseconds(change.old_ms), table.microseconds(change.new_ms))
        rows.append((op, case, dtype, impl, timing, *times, f"{change.factor:.2f}x", mark))
    for op, case, dtype, impl, timing in comparison.lost:
        rows.append((op, case, dtype, impl, timing, "", "failed", "", "REGRESSION"))
    if not rows:
        return "nothing in common with the earlier results"
    head = ("op", "case", "dtype", "impl", "timing", "old µs", "new µs", "new/old", "")
    count = len(comparison.regressions) + len(comparison.lost)
    verdict = f"{count} regression{'s' * (count != 1)} beyond {threshold:.0%}"
    return f"{table.as_text(head, rows)}\n{verdict}"


def _key(record: Record) -> tuple[str, ...]:
    return tuple(record[field] for field in _FIELDS)


def _is_ours(key: tuple[str, ...]) -> bool:
    return key[3].startswith("tiercel")


def _newest(records: Iterable[Record]) -> dict[tuple[str, ...], Record]:
    good = [r for r in records if r["status"] == "ok" and r["family"] != "limits"]
    return {_key(record): record for record in sorted(good, key=lambda r: r["date"])}
