#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the table of docs/numerics.md with what the ops' declarations say, or writes it.

    ci/numerics_table.py [--write]

It needs Python 3 alone, and nothing built.
"""

from __future__ import annotations

import argparse
import math
import sys

import figures
import ops_table

from tiercel.core.numerics import NUMERICS, Numerics

SCRIPT = "ci/numerics_table.py"


def error(numerics: Numerics) -> str:
    if numerics.error == 0:
        return "none"
    power = math.log2(numerics.error)
    size = f"2^{power:.0f}" if power == int(power) else f"{numerics.error:.2g}"
    return f"{size} of the {numerics.of}"


def table() -> str:
    lines = [
        f"Version {NUMERICS} (`tiercel.NUMERICS`).",
        "",
        "| op | error | sums | deterministic | batch-invariant |",
        "|---|---|---|---|---|",
    ]
    pages = ops_table.links()
    for op, spec in ops_table.declared():
        numerics = spec.numerics
        if numerics is None:
            raise SystemExit(f"{SCRIPT}: {op} lacks `numerics` in its declaration")
        page = pages[op].removeprefix("docs/")
        deterministic = "yes" if numerics.deterministic else "no"
        invariant = (
            "yes" if numerics.batch_invariant else f"in the mode; otherwise no: {numerics.varies}"
        )
        sums = numerics.sums or "-"
        lines.append(
            f"| [`{op}`]({page}) | {error(numerics)} | {sums} | {deterministic} | {invariant} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table")
    page = ops_table.ROOT / "docs" / "numerics.md"
    write = parser.parse_args().write
    text = figures.page(page.read_text(), SCRIPT, table())
    if write:
        page.write_text(text)
    elif text != page.read_text():
        print(f"{SCRIPT}: docs/numerics.md is out of date: {SCRIPT} --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
