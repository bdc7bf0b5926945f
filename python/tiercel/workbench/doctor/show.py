# SPDX-License-Identifier: Apache-2.0
"""Findings as text: a line each, the mending command below what is not green."""

import os
import sys
from collections.abc import Iterable

from tiercel.workbench.doctor import GREEN, RED, YELLOW, Check

_COLOURS = {GREEN: "\033[32m", YELLOW: "\033[33m", RED: "\033[31m"}


def coloured() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def as_text(checks: Iterable[Check], colours: bool = False) -> str:
    lines = []
    for check in checks:
        level = f"{check.level:<6}"
        if colours:
            level = f"{_COLOURS[check.level]}{level}\033[0m"
        lines.append(f"  {level}  {check.name + ':':<24}{check.text}")
        if check.mend and check.level != GREEN:
            lines.append(f"{'':<34}mend: {check.mend}")
    return "\n".join(lines)


def conclusion(checks: Iterable[Check]) -> str:
    levels = [check.level for check in checks]
    counts = [f"{levels.count(level)} {level}" for level in (GREEN, YELLOW, RED)]
    return ", ".join(counts)
