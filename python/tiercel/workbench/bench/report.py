# SPDX-License-Identifier: Apache-2.0
"""``tiercel bench report``: benchmarks/README.md's overview and each family's page of tables
beside its records, from committed results alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiercel.workbench.bench import BenchError, limits, records, table
from tiercel.workbench.bench.cases import DTYPES
from tiercel.workbench.bench.records import Record
from tiercel.workbench.bench.stats import geometric_mean
from tiercel.workbench.models import page as models

BEGIN = "<!-- results: begin (written by `tiercel bench report`; do not edit) -->"
END = "<!-- results: end -->"
WRITTEN = (
    "Rendered by `tiercel bench report` from the records beside this page; do not edit.\n"
    "[How it is measured](../../README.md#how-it-is-measured).\n"
)
BAR = 0.98  # what a ratio of one is met at
OVERVIEW_HEAD = ("operator", "even or faster", "least", "geomean", "most")


def update(folder: Path, *, check: bool) -> bool:
    """Renders README.md, results/<gpu>/<family>.md and models/<gpu>.md, .svg; returns whether
    all were up to date."""
    readme = folder / "README.md"
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot read {readme}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BenchError(f"{readme} is no UTF-8 text: {error.reason}") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchError(f"{readme} lacks the lines {BEGIN!r} and {END!r}")
    overview, tables = render(records.read_tree(folder / "results"))
    pages = {readme: f"{before}{BEGIN}\n\n{overview}\n{END}{after}"}
    pages |= {folder / path: page for path, page in tables.items()}
    pages |= models.pages(folder / "models")
    try:
        stale = {path: page for path, page in pages.items() if _read(path) != page}
        if not check:
            for path, page in stale.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot read or write {error.filename}: {error.strerror}") from None
    return not stale


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


def render(found: Iterable[Record]) -> tuple[str, dict[str, str]]:
    """The overview of all GPUs, and the families' pages of tables by their paths."""
    found = sorted(found, key=records.dump)  # the files' order says nothing
    shown = records.latest(r for r in found if r["family"] != "limits")
    if not shown:
        return "No results are committed yet.\n", {}
    overviews, pages = [], {}
    for gpu in sorted({r["gpu"] for r in shown}):
        here = [r for r in shown if r["gpu"] == gpu]
        folder = f"results/{records.file_name(gpu, 'gpu')}"
        overviews += [f"## {gpu}\n", _overview(here, folder)]
        for family in sorted({r["family"] for r in here}):
            rows = [r for r in here if r["family"] == family]
            name = records.file_name(family, "family")
            pages[f"{folder}/{name}.md"] = _family(f"{family}, {gpu}", rows, found)
    return "\n".join(overviews), pages


def _overview(rows: list[Record], folder: str) -> str:
    """An operator's line: ours against the fastest exact peer of each case."""
    lines = []
    for op in sorted({r["op"] for r in rows}):
        mine = [r for r in rows if r["op"] == op]
        problems = table.by_problem(r for r in mine if r["timing"] != "host")
        best = [best["ratio"] for best in map(table.best_peer, problems.values()) if best]
        if best:
            met = f"{sum(ratio >= BAR for ratio in best)} of {len(best)}"
            family = mine[0]["family"]
            figures = [f"{f(best):.2f}" for f in (min, geometric_mean, max)]
            lines.append([f"[{op}]({folder}/{family}.md)", met, *figures])
    text = (
        "The fastest exact peer's time over ours, GPU time, over an operator's cases (above 1: "
        f"ours is faster; even means at least {BAR}):\n\n"
    )
    return text + table.markdown(OVERVIEW_HEAD, lines, numbers_from=1)


def _family(title: str, rows: list[Record], found: list[Record]) -> str:
    parts = [f"# {title}\n", WRITTEN, _summary(rows)]
    for op, host in sorted({(r["op"], r["timing"] == "host") for r in rows}):
        of = [r for r in rows if r["op"] == op and (r["timing"] == "host") == host]
        parts.append(_op(op, host, of))
    return "\n".join([*parts, _runs(rows, found)])


def _summary(rows: list[Record]) -> str:
    text = "Peer's time over ours (above 1: ours is faster), per operator, dtype and peer:\n\n"
    return text + table.markdown(table.SUMMARY_HEAD, table.summary_rows(rows), numbers_from=4)


def _op(op: str, host: bool, rows: list[Record]) -> str:
    problems = table.by_problem(rows)
    peers = sorted({name for group in problems.values() for name in group} - {"tiercel"})
    flops = all(group["tiercel"].get("tflops") is not None for group in problems.values())
    rate, unit = ("tflops", "TFLOP/s") if flops else ("gbps", "GB/s")
    head = ["case", "dtype", "tiercel"] + ([] if host else [unit, "of limit"])
    lines = []
    for problem in sorted(problems, key=_order):
        group = problems[problem]
        ours = group["tiercel"]
        line = [problem[1], DTYPES[problem[2]], table.microseconds(ours["ms_median"])]
        if not host:
            line += [f"{ours[rate]:.0f}", _percent(ours["limit_frac"])]
        lines.append(line + [_peer(group.get(name)) for name in peers])
    what = "host time of an eager call" if host else "GPU time"
    title = f"## {op}: {what}\n\n"
    note = "Medians in µs; for a peer, in brackets, its time over ours; `~`: it is not exact"
    if any(r["timing"] == "events" for r in rows):
        note += "; `†`: by events around a loop of calls, since no graph holds them"
    if any(r.get("other_run") for r in rows):
        note += "; `‡`: of another run than ours, which lacked it"
    parts = {(r["impl"], r["part"]) for r in rows if "part" in r}
    note += "".join(f"; of {impl} only {part}" for impl, part in sorted(parts))
    note += ".\n\n"
    return title + note + table.markdown([*head, *peers], lines, numbers_from=2)


def _peer(record: Record | None) -> str:
    if record is None:
        return ""
    ratio = f" ({record['ratio']:.2f})" if record.get("ratio") is not None else ""
    marks = ("" if record["exact"] else "~") + ("†" if record["timing"] == "events" else "")
    marks += "‡" if record.get("other_run") else ""
    return f"{marks}{table.microseconds(record['ms_median'])}{ratio}"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.0%}"


def _order(problem: table.Problem) -> tuple[Any, ...]:
    """dtype, then the case with its numbers as numbers."""
    words = [word for word in re.split(r"(\d+)", problem[1]) if word]
    numbered = [(0, int(word), "") if word.isdecimal() else (1, 0, word) for word in words]
    # The last part of a name (an option) varies slowest.
    return list(DTYPES).index(problem[2]), numbered[-1], numbered, problem


def _runs(shown: list[Record], found: list[Record]) -> str:
    lines = []
    for run in sorted({(r["date"], r["run"]) for r in shown}):
        rows = [r for r in found if r["run"] == run[1]]
        first = rows[0]
        peers = {f"{r['impl']} {r['version']}" for r in rows if r["family"] != "limits"}
        versions = ", ".join(sorted(p for p in peers if not p.startswith(("torch", "tiercel"))))
        measured = limits.as_text(limits.summary([r for r in rows if r["family"] == "limits"]))
        command = f"`{first.get('command', 'tiercel bench')}`"
        facts = [first["date"][:10], first["commit"][:12], first["driver"], first["torch"]]
        lines.append([*facts, versions, measured, command])
    head = ["date", "commit", "driver", "torch", "peers", "limits", "command"]
    return "## Runs\n\n" + table.markdown(head, lines, numbers_from=len(head))
