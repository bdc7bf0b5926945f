# SPDX-License-Identifier: Apache-2.0
"""The facts that ``tiercel doctor`` collects and the checks on them."""

from collections.abc import Iterable
from dataclasses import dataclass

GREEN, YELLOW, RED = "green", "yellow", "red"


def status(levels: Iterable[str]) -> int:
    """The exit status of --check: 0 where all is green, 1 for yellow at worst, 2 for red."""
    return max(((GREEN, YELLOW, RED).index(level) for level in levels), default=0)


@dataclass(frozen=True)
class Check:
    """One finding: how things stand, and the command that mends it.

    ``red``: the kernels do not run here. ``yellow``: they do, and something is slow or missing.
    """

    name: str
    level: str
    text: str
    mend: str = ""
