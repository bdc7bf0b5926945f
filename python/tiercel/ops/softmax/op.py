# SPDX-License-Identifier: Apache-2.0
"""softmax and its logarithm, with scale and mask in the same kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Gradient, Lookup, Native, Op
from tiercel.core.spec import Call, Spec
from tiercel.ops._rows import rows
from tiercel.ops.softmax import reference as ref
from tiercel.ops.softmax import spec
from tiercel.ops.softmax.contract import along_last

__all__ = ["log_softmax", "softmax_online"]

_DESCRIPTION = "a row in registers of lanes, a block or a cluster; one read, one write"
_METHOD = "torch.softmax in float32"


class _Softmax:
    """The operators of softmax or of its logarithm."""

    def __init__(self, declared: Spec, log: bool) -> None:
        self._log = log
        self._name = declared.name
        reference = getattr(ref, declared.name)
        self.forward = Op(
            declared,
            sm90=Native(
                _C.softmax,
                _C.softmax_plan,
                # The last dimension alone needs no Python.
                ("x", "mask", "out", "scale", Lookup("dim", {-1: log})),
                _DESCRIPTION,
                load=_C.softmax_load,
                contiguous=("x",),
                rearranged=("mask",),
                launch=self._launch,
            ),
            reference=lambda call: reference(call.x, call.dim, scale=call.scale, mask=call.mask),
            method=_METHOD,
            gradient=Gradient(self._save, self._gradients),
            plugin=along_last,
        )
        self._backward = Op(
            spec.BACKWARD[declared.name],
            sm90=Native(
                _C.softmax_backward,
                self._plan_backward,
                (),
                _DESCRIPTION,
                launch=self._launch_backward,
                direct=False,
            ),
            reference=lambda call: self._formula(**call.__dict__),
            method=_METHOD,
            out=False,
        )

    def _mask(self, call: Call, shape: torch.Size) -> Tensor | None:
        if call.dim not in (-1, len(shape) - 1):
            raise NotImplementedError(
                f"{self._name}: the kernels work along the last dimension, got dim {call.dim} of "
                f"{len(shape)}"
            )
        return None if call.mask is None else call.mask.expand(shape)

    def _launch(self, native: Callable[..., Any], call: Call) -> Any:
        mask = self._mask(call, call.x.shape)
        return native(rows(call.x), mask, call.out, call.scale, self._log)

    def _launch_backward(self, native: Callable[..., Any], call: Call) -> Any:
        mask = self._mask(call, call.y.shape)
        tensors = (rows(call.grad), rows(call.y), mask, call.x_grad)
        return native(*tensors, call.scale, self._log)

    def _plan_backward(self, grad: Tensor, y: Tensor, mask: Any, *rest: Any) -> dict[str, Any]:
        """The kernels of the backward take the rows that those of the forward take."""
        return dict(_C.softmax_plan(y, mask, *rest))

    def _save(self, ctx: Any, call: Call, result: Tensor) -> None:
        ctx.dim, ctx.scale, ctx.backend = call.dim, call.scale, call.backend
        ctx.save_for_backward(result, call.mask)

    def _gradients(self, ctx: Any, grad: Tensor | None) -> dict[str, Tensor | None]:
        if grad is None:
            return {}
        y, mask = ctx.saved_tensors
        keep = mask if mask is not None and mask.dtype == torch.bool else None
        if torch.is_grad_enabled():  # of a gradient: PyTorch can differentiate its own formulas
            x_grad = self._formula(grad, y, ctx.dim, ctx.scale, keep)
        else:
            x_grad = self._backward(grad, y, ctx.dim, ctx.scale, keep, ctx.backend)
        if mask is None or not mask.requires_grad:
            return {"x": x_grad}
        added = self._formula(grad, y, ctx.dim, None, None)
        return {"x": x_grad, "mask": added.sum_to_size(mask.shape).to(mask.dtype)}

    def _formula(
        self, grad: Tensor, y: Tensor, dim: int, scale: float | None, mask: Tensor | None
    ) -> Tensor:
        wide_y, wide_grad = (t if t.dtype == torch.float64 else t.float() for t in (y, grad))
        if self._log:
            result = wide_grad - wide_y.exp() * wide_grad.sum(dim, keepdim=True)
        else:
            result = wide_y * (wide_grad - (wide_grad * wide_y).sum(dim, keepdim=True))
        if scale is not None:
            result = result * scale
        return (result if mask is None else result.masked_fill(~mask, 0.0)).to(y.dtype)

    def __call__(
        self,
        x: Tensor,
        dim: int,
        scale: float | None,
        mask: Tensor | None,
        out: Tensor | None,
        backend: str | None,
    ) -> Any:
        if out is None:
            return self.forward.pick()(x, dim, scale, mask, backend)
        return self.forward.into()(out, x, dim, scale, mask, backend)


_SOFTMAX = _Softmax(spec.SOFTMAX_ONLINE, log=False)
_LOG_SOFTMAX = _Softmax(spec.LOG_SOFTMAX, log=True)


@_SOFTMAX.forward.export
def softmax_online(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``softmax(scale * x + mask)``, each row read once.

    Maximum and sum are computed in one pass, as in Milakov and Gimelshein, 2018, arXiv:1805.02867,
    and the row stays in registers until it is written. Arithmetic is float32; the result is rounded
    once. NaN and infinities are treated as by :func:`torch.softmax`: a row that holds NaN or +inf,
    or nothing but -inf (all masked), is NaN.

    Differentiable in ``x`` and in a floating ``mask``; a score that a bool mask removes has
    gradient 0. Works under torch.compile and torch.export, and in CUDA graphs; it never
    synchronises.

    Args:
        x: ``[..., N]``; float32, bfloat16 or float16. Rows may be strided; without a single row
            stride, or with a non-contiguous last dimension, a copy is made.
        dim: The dimension that sums to 1. The precompiled kernels take the last one, others run on
            ref.
        scale: Factor of ``x``; 0 runs on ref.
        mask: Broadcasts to the shape of ``x``, on its device. bool: where it is False the score is
            -inf. float32 or the dtype of ``x``: added to the scaled scores.
        out: To write to: contiguous, of the shape, dtype and device of ``x``, perhaps ``x`` itself.
            Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        TypeError: A dtype or type is not one of the above.
        ValueError: A shape, stride, dimension or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights = tiercel.softmax_online(scores, scale=head_dim**-0.5, mask=causal)
    """
    return _SOFTMAX(x, dim, scale, mask, out, backend)  # type: ignore[no-any-return]


@_LOG_SOFTMAX.forward.export
def log_softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``log(softmax(scale * x + mask))``, each row read once.

    Arguments, gradients and special values are those of :func:`tiercel.softmax_online`. A score
    that the mask removes gives -inf.

    Args:
        x: ``[..., N]``; float32, bfloat16 or float16.
        dim: The dimension whose exponentials sum to 1.
        scale: Factor of ``x``.
        mask: Broadcasts to the shape of ``x``; bool, float32 or the dtype of ``x``.
        out: To write to: contiguous, of the shape, dtype and device of ``x``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        TypeError: A dtype or type is not one of the above.
        ValueError: A shape, stride, dimension or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> loss = -tiercel.log_softmax(logits).gather(-1, labels[:, None]).mean()
    """
    return _LOG_SOFTMAX(x, dim, scale, mask, out, backend)  # type: ignore[no-any-return]
