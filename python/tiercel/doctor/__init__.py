# SPDX-License-Identifier: Apache-2.0
"""What ``tiercel doctor`` looks at and what it says, each part on its own."""

from dataclasses import dataclass

GREEN, YELLOW, RED = "green", "yellow", "red"


@dataclass(frozen=True)
class Check:
    """One finding: how things stand, and the command that mends it.

    ``red``: the kernels do not run here. ``yellow``: they do, and something is slow or missing.
    """

    name: str
    level: str
    text: str
    mend: str = ""
