# SPDX-License-Identifier: Apache-2.0
"""Numbers on the command line, with their ranges: argparse types that say what was expected."""

import argparse
import math
from collections.abc import Callable


def whole(least: int, most: int = 1 << 40) -> Callable[[str], int]:
    """A whole number from `least` on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # no number, or one of thousands of digits
            expected = f"must be a whole number of at least {least}"
            raise argparse.ArgumentTypeError(f"{expected}, got {_shown(text)}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text[:40]}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {text[:40]}")
        return value

    return read


def number(*, least: "float | None" = None) -> Callable[[str], float]:
    """A finite number from `least` on, or a positive one."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        fits = value > 0 if least is None else value >= least
        if not math.isfinite(value) or not fits:
            bound = "positive" if least is None else f"a number of at least {least:g}"
            raise argparse.ArgumentTypeError(f"must be {bound}, got {_shown(text)}")
        return value

    return read


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
