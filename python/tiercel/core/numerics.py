# SPDX-License-Identifier: Apache-2.0
"""Promises about the numbers of an op's results, as data. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

# The version of the numbers: it changes when the kernels give other bits for the same arguments.
NUMERICS = 1


@dataclass(frozen=True)
class Numerics:
    """The numbers of an op's kernels (backend sm90) against those of float64.

    Args:
        error: The largest error before the result is rounded to its dtype, as a part of `of`; 0 if
            there is none.
        of: What `error` is a part of: ``result``; ``terms``, the sum of the magnitudes of what is
            added up; or ``argument``, the magnitude of the element that the result is made from.
        sums: What is added up, in what precision and order; empty if nothing is.
        deterministic: The same arguments give the same bits, in every run and on every device of a
            kind.
        batch_invariant: The bits of a row, token or sequence depend on it and its own length only,
            not on what else is in the call. In the mode of that name they always do.
        varies: What they depend on outside of the mode, or which results are meant.
    """

    error: float
    of: str = "result"
    sums: str = ""
    deterministic: bool = True
    batch_invariant: bool = True
    varies: str = ""

    def __post_init__(self) -> None:
        if self.of not in ("result", "terms", "argument"):
            raise ValueError(f"an error cannot be a part of {self.of!r}")
        if not self.batch_invariant and not self.varies:
            raise ValueError("say what the bits depend on")
