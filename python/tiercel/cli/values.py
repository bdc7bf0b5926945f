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
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            upper = "" if value <= most else f" and at most {most}"
            expected = f"must be a whole number of at least {least}{upper}"
            raise argparse.ArgumentTypeError(f"{expected}, got {_shown(text)}")
        return value

    return read


def number(*, above: "float | None" = None, least: "float | None" = None) -> Callable[[str], float]:
    """A finite number, above or from a bound on."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        low = above is not None and not value > above
        if not math.isfinite(value) or low or (least is not None and not value >= least):
            bound = f"above {above:g}" if above is not None else f"of at least {least:g}"
            raise argparse.ArgumentTypeError(f"must be a number {bound}, got {_shown(text)}")
        return value

    return read


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
