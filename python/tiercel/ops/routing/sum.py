# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing: adding up the outputs of each token's experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Gradient, Native, Op
from tiercel.core.spec import Call
from tiercel.ops.routing import reference as ref
from tiercel.ops.routing import spec

__all__ = ["moe_sum"]


def _save(ctx: Any, call: Call, results: Any) -> None:
    ctx.k, ctx.dtype = call.x.shape[1], call.x.dtype
    ctx.save_for_backward(call.x if call.weights is not None else None, call.weights)


def _gradients(ctx: Any, grad: Tensor | None) -> dict[str, Tensor | None]:
    if grad is None:
        return {}
    x, weights = ctx.saved_tensors
    if weights is None:
        return {"x": grad[:, None, :].expand(-1, ctx.k, -1)}
    wide = grad.float()
    found: dict[str, Tensor | None] = {}
    if ctx.wants["x"]:
        found["x"] = (wide[:, None, :] * weights[:, :, None]).to(ctx.dtype)
    if ctx.wants["weights"]:
        found["weights"] = torch.einsum("tkh,th->tk", x.float(), wide)
    return found


_SUM = Op(
    spec.MOE_SUM,
    sm90=Native(
        _C.moe_sum,
        _C.moe_sum_plan,
        ("x", "weights", "out"),
        "a vector of the output a thread, all experts' loads at once",
        load=_C.moe_sum_load,
        sample=lambda call: {
            "x": call.x[:0],
            "weights": None if call.weights is None else call.weights[:0],
        },
    ),
    reference=lambda call: ref.moe_sum(call.x, call.weights),
    method="torch.sum in float32",
    gradient=Gradient(_save, _gradients),
)


@_SUM.export
def moe_sum(
    x: Tensor,
    weights: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Adds up the outputs of each token's experts, optionally weighted.

    The last step of a mixture of experts: ``out[t] = sum over j of weights[t, j] * x[t, j]``. Sums
    are float32, in the order of j, and rounded once.

    Differentiable in ``x`` and ``weights``. Works under torch.compile and torch.export, and in CUDA
    graphs; it never synchronises.

    Args:
        x: ``[T, k, H]``, float32, bfloat16 or float16, any strides; fastest where rows of H are
            contiguous and begin at multiples of 16 bytes.
        weights: ``[T, k]`` float32, contiguous, or None for a plain sum.
        out: ``[T, H]`` to write to, contiguous, of the dtype and on the device of ``x``. Then no
            gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[T, H]``, the dtype of ``x``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> hidden = tiercel.moe_sum(expert_outputs, weights)
    """
    if out is None:
        result: Tensor = _SUM.pick()(x, weights, backend)
        return result
    return _SUM.into()(out, x, weights, backend)  # type: ignore[no-any-return]
