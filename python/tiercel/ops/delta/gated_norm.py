# SPDX-License-Identifier: Apache-2.0
"""The norm of linear attention's output, times its gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Gradient, Native, Op
from tiercel.core.spec import Call
from tiercel.ops._rows import rows
from tiercel.ops.delta import reference as ref
from tiercel.ops.delta import spec

__all__ = ["gated_rms_norm"]


def _launch(native: Callable[..., Any], call: Call) -> Any:
    return native(rows(call.x), rows(call.gate), call.weight, call.out, call.eps)


def _save(ctx: Any, call: Call, out: Tensor) -> None:
    ctx.eps = call.eps
    ctx.save_for_backward(call.x, call.gate, call.weight)


def _gradients(ctx: Any, grad: Tensor | None) -> dict[str, Tensor | None]:
    """In plain PyTorch, which can differentiate it once more."""
    if grad is None:
        return {}
    x, gate, weight = ctx.saved_tensors
    wide, wide_gate, wide_grad, wide_weight = (t.float() for t in (x, gate, grad, weight))
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
    normed, part = wide * factor, torch.sigmoid(wide_gate)
    opened = wide_gate * part
    given = wide_grad * wide_weight * opened
    of_x = factor * (given - normed * (given * normed).mean(-1, keepdim=True))
    of_gate = wide_grad * wide_weight * normed * part * (1 + wide_gate * (1 - part))
    of_weight = (wide_grad * normed * opened).reshape(-1, x.shape[-1]).sum(0)
    return {
        "x": of_x.to(x.dtype),
        "gate": of_gate.to(gate.dtype),
        "weight": of_weight.to(weight.dtype),
    }


_NORM = Op(
    spec.GATED_RMS_NORM,
    sm90=Native(
        _C.gated_rms_norm,
        _C.gated_rms_norm_plan,
        ("x", "gate", "weight", "out", "eps"),
        "some lanes of a warp have a row, in registers",
        load=_C.gated_rms_norm_load,
        contiguous=("x", "gate"),
        launch=_launch,
    ),
    reference=lambda call: ref.gated_rms_norm(call.x, call.gate, call.weight, call.eps),
    method="torch, in float64",
    gradient=Gradient(_save, _gradients),
)


@_NORM.export
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """RMS norm over the last dimension, times SiLU of a gate: the output norm of gated DeltaNet.

    ``out = x / sqrt(mean(x**2) + eps) * weight * gate * sigmoid(gate)``, in float32, rounded once.

    Differentiable in ``x``, ``gate`` and ``weight``, except with ``out``; the backward runs in
    plain PyTorch. Works under torch.compile and torch.export, and in CUDA graphs; it never
    synchronises.

    Args:
        x: ``[..., N]``, bfloat16 or float16. The precompiled kernels take N that is a multiple of 8
            up to 1024, and rows aligned to 16 bytes; fastest with a single row stride.
        gate: Of the shape and dtype of ``x``.
        weight: ``[N]``, contiguous, of the dtype of ``x`` or float32.
        eps: Added to the mean of the squares; not negative.
        out: What to write to, contiguous, of the shape, dtype and device of ``x``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> hidden = tiercel.gated_rms_norm(core, z, norm.weight)
    """
    if out is None:
        return _NORM.pick()(x, gate, weight, eps, backend)  # type: ignore[no-any-return]
    return _NORM.into()(out, x, gate, weight, eps, backend)  # type: ignore[no-any-return]
