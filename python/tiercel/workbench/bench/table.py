# SPDX-License-Identifier: Apache-2.0
"""The table that a run shows on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiercel.workbench.bench.cases import DTYPES
from tiercel.workbench.bench.records import Record, kind
from tiercel.workbench.bench.stats import geometric_mean


def microseconds(ms: float) -> str:
    us = ms * 1e3
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def result_line(record: Record) -> str:
    """One record of a case, for the lines under its name."""
    name = f"  {record['timing'] or '-':<6} {record['impl']:<14}"
    if record["status"] != "ok":
        return f"{name} {record['status']}: {record.get('reason', '')}"
    spread = f"{microseconds(record['ms_p10'])}-{microseconds(record['ms_p90'])}"
    words = [f"{name} {microseconds(record['ms_median']):>8} µs  {spread:>15}"]
    if record["gbps"] is not None:
        words.append(f"{record['gbps']:7.0f} GB/s")
    if record["tflops"] is not None:
        words.append(f"{record['tflops']:7.1f} TFLOP/s")
    if record["limit_frac"] is not None:
        words.append(f"{record['limit_frac']:4.0%} of limit")
    if "peak_mib" in record:
        words.append(f"peak {record['peak_mib']:.0f} MiB")
    if record["rel_err"] is not None:
        words.append(f"error {record['rel_err']:.0e}")
    if record["ratio"] is not None:
        words.append(f"{record['ratio']:.2f}x")
    if not record["exact"]:
        words.append(f"only {record['part']}" if "part" in record else "not exact")
    return "  ".join(words)


Problem = tuple[str, str, str, str]  # op, case, dtype, kind of time


def by_problem(records: Iterable[Record]) -> dict[Problem, dict[str, Record]]:
    """Good records by problem and implementation; only where ours is among them."""
    found: dict[Problem, dict[str, Record]] = {}
    for record in records:
        if record["status"] == "ok" and record["family"] != "limits":
            problem = (record["op"], record["case"], record["dtype"], kind(record))
            found.setdefault(problem, {})[record["impl"]] = record
    return {problem: rows for problem, rows in found.items() if "tiercel" in rows}


def best_peer(rows: dict[str, Record]) -> Record | None:
    """The fastest one that computes exactly what we do."""
    peers = [r for r in rows.values() if r["exact"] and r.get("ratio") is not None]
    peers = [r for r in peers if not r["impl"].startswith("tiercel")]
    return min(peers, key=lambda r: r["ms_median"], default=None)


def summary_rows(records: Iterable[Record]) -> list[tuple[str, ...]]:
    """(op, timing, dtype, against, cases, least, geometric mean, greatest) of peer/ours."""
    ratios: dict[tuple[str, str, str, str], list[float]] = {}
    for (op, _, dtype, timing), rows in by_problem(records).items():
        best = best_peer(rows)
        if best is not None and timing != "host":
            ratios.setdefault((op, timing, dtype, "fastest exact peer"), []).append(best["ratio"])
        for name, row in rows.items():
            if row.get("ratio") is not None and "part" not in row:
                ratios.setdefault((op, timing, dtype, name), []).append(row["ratio"])

    def place(key: tuple[str, str, str, str]) -> tuple[str, int, int, str]:
        return key[0], key[1] == "host", list(DTYPES).index(key[2]), key[3]

    lines = []
    for key in sorted(ratios, key=place):
        values = ratios[key]
        figures = (min(values), geometric_mean(values), max(values))
        lines.append((*key, str(len(values)), *(f"{value:.2f}" for value in figures)))
    return lines


SUMMARY_HEAD = ("op", "timing", "dtype", "against", "cases", "least", "geomean", "most")


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns; those that hold numbers only, to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, right, strict=True)
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in cells).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows)])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int) -> str:
    rule = ["---:" if i >= numbers_from else "---" for i in range(len(head))]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *cells))


def _is_number(text: str) -> bool:
    return text.replace(".", "").rstrip("x%").isdigit()
