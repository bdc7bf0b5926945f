# SPDX-License-Identifier: Apache-2.0
"""A number added to every element."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiercel import _C
from tiercel.core.op import Gradient, Native, Op
from tiercel.ops.toy import reference as ref
from tiercel.ops.toy.spec import TOY_SHIFT

__all__ = ["toy_shift"]


def _gradients(ctx: Any, grad: Tensor | None) -> dict[str, Tensor | None]:
    return {"x": grad}


_TOY_SHIFT = Op(
    TOY_SHIFT,
    sm90=Native(
        _C.toy_shift,
        _C.toy_shift_plan,
        ("x", "out", "amount"),
        "an element a thread",
        load=_C.toy_shift_load,
    ),
    reference=lambda call: ref.toy_shift(call.x, call.amount),
    method="torch.add",
    gradient=Gradient(lambda ctx, call, result: None, _gradients),
)


@_TOY_SHIFT.export
def toy_shift(
    x: Tensor, amount: float = 1.0, *, out: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """Adds ``amount`` to every element.

    Args:
        x: ``[..., N]`` float32, contiguous.
        amount: What is added.
        out: ``[..., N]`` to write to.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.
    """
    if out is None:
        return _TOY_SHIFT.pick()(x, amount, backend)  # type: ignore[no-any-return]
    return _TOY_SHIFT.into(out, x, amount, backend)  # type: ignore[no-any-return]
