#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares docs/numerics.md's costs of the batch-invariant mode with the records, or writes them.

    ci/invariant_table.py [--write]

The records are benchmarks/invariant/<gpu>.jsonl, which `tiercel bench --suite invariant
--backend sm90 invariant --peers none --out FILE` writes. It needs Python 3 alone.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys

import figures

SCRIPT = "ci/invariant_table.py"
ROOT = pathlib.Path(__file__).resolve().parents[1]
MODES = ("tiercel", "tiercel:invariant")


def microseconds(milliseconds: float) -> str:
    us = milliseconds * 1e3
    return f"{us:.2f}" if us < 100 else f"{us:.0f}"


def cases(records: list[dict]) -> dict[tuple[str, str, str], dict[str, float]]:
    """The times of both modes by operator, case and dtype, in the order of the records."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for record in records:
        if record["impl"] not in MODES or record["timing"] != "graph":
            continue
        if record["status"] != "ok":
            raise SystemExit(f"{SCRIPT}: {record['op']} {record['case']}: {record['status']}")
        key = (record["op"], record["case"], record["dtype"])
        found.setdefault(key, {})[record["impl"]] = record["ms_median"]
    return {key: times for key, times in found.items() if len(times) == len(MODES)}


def table(records: list[dict]) -> str:
    if len({(r["commit"], r["command"]) for r in records}) != 1:
        raise SystemExit(f"{SCRIPT}: a file must hold the records of one run")
    found = cases(records)
    first = records[0]
    ratios: dict[str, list[float]] = {}
    lines = []
    for (op, case, dtype), times in found.items():
        normal, mode = (times[name] for name in MODES)
        ratios.setdefault(op, []).append(mode / normal)
        shown = (microseconds(normal), microseconds(mode), f"{mode / normal:.2f}")
        lines.append(f"| {op} | {case} | {dtype} | {' | '.join(shown)} |")
    parts = [
        f"{first['gpu']}, driver {first['driver']}, torch {first['torch']}, commit "
        f"{first['commit'][:12]}: `{first['command']}`. Times of CUDA graphs; in the mode over "
        "normally, above 1: the mode is slower.",
        "",
        "| op | cases | least | geometric mean | most |",
        "|---|---:|---:|---:|---:|",
    ]
    for op, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        row = (str(len(values)), *(f"{x:.2f}" for x in (min(values), mean, max(values))))
        parts.append(f"| {op} | {' | '.join(row)} |")
    head = ("op", "case", "dtype", "normally, µs", "in the mode, µs", "over normally")
    parts += ["", f"| {' | '.join(head)} |", "|---|---|---|---:|---:|---:|", *lines]
    return "\n".join(parts) + "\n"


def text() -> str:
    parts = []
    for path in sorted((ROOT / "benchmarks" / "invariant").glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        parts.append(table(records))
    return "\n".join(parts) or "No records are committed yet.\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table")
    page = ROOT / "docs" / "numerics.md"
    write = parser.parse_args().write
    before = page.read_text()
    after = figures.page(before, SCRIPT, text())
    if write:
        page.write_text(after)
    elif after != before:
        print(f"{SCRIPT}: docs/numerics.md is out of date: {SCRIPT} --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
