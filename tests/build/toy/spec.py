# SPDX-License-Identifier: Apache-2.0
"""The declaration of toy_shift."""

from __future__ import annotations

from tiercel.core.spec import Float, Spec, Tensor

TOY_SHIFT = Spec(
    "toy_shift",
    Tensor("x", "... N", "float32"),
    Float("amount", 1.0),
    results=[Tensor("out", "... N", "x")],
    limits="none",
)
