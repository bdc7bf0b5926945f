# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the last dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.eager import empty
from tiercel.core.op import Gradient, Native, Op, Python
from tiercel.core.spec import Call
from tiercel.ops.norm import reference as ref
from tiercel.ops.norm import spec

__all__ = ["layer_norm", "rms_norm"]

# Bytes of the longest row of which a cluster's shared memory holds three tensors and the weight.
_MAX_ROW_BYTES_WITH_RESIDUAL = 98304 * 4

_METHOD = "mean, square and rsqrt in float32"
_DESCRIPTION = "a row in registers, read once; statistics in float32"
_TAKES = ("x", "weight", "bias", "residual", "out", "residual_out", "eps")


def _rows(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.reshape(-1, tensor.shape[-1])


def _launch(native: Callable[..., Any], call: Call) -> Any:
    """Joins the batch dimensions where a tensor is not contiguous."""
    given = {name: getattr(call, name, None) for name in _TAKES}
    sources = [given[name] for name in ("x", "residual") if given[name] is not None]
    if call.x.dim() > 2 and not all(tensor.is_contiguous() for tensor in sources):
        for name in ("x", "residual", "out", "residual_out"):
            given[name] = _rows(given[name])
    return native(*given.values())


def _two_rows(call: Call) -> dict[str, Any]:
    return {
        name: _rows(getattr(call, name))[:2]  # type: ignore[index]
        for name in ("x", "residual")
        if getattr(call, name, None) is not None
    }


class _Norm:
    """The operators of a norm: without and with `residual`, and the gradients."""

    def __init__(self, declared: spec.Spec, layer: bool) -> None:
        name = declared.name
        self._layer = layer
        self._reference = getattr(ref, name)
        self._backward_kernel = getattr(_C, f"{name}_backward")
        self._backward_plan = getattr(_C, f"{name}_backward_plan")
        native = Native(
            getattr(_C, name),
            getattr(_C, f"{name}_plan"),
            _TAKES,
            _DESCRIPTION,
            load=_C.norm_load,
            contiguous=("x", "residual"),
            launch=_launch,
            sample=_two_rows,
        )

        def op(declared: spec.Spec) -> Op:
            return Op(
                declared,
                sm90=native,
                reference=self._forward,
                method=_METHOD,
                gradient=Gradient(self._save, self._gradients),
            )

        self.plain = op(declared.without("residual"))
        self.added = op(declared.having("residual", name=f"add_{name}"))
        self._backward = Op(
            spec.BACKWARD[name],
            sm90=Python(
                self._run_backward,
                lambda call: self.plain.plan(Call(**call.__dict__, bias=None)),
                _DESCRIPTION,
                sample=_two_rows,
            ),
            reference=lambda call: ref.norm_backward(layer, **call.__dict__),
            method=_METHOD,
            out=False,
            fake=_empty_gradients,
        )

    def _forward(self, call: Call) -> Any:
        residual = getattr(call, "residual", None)
        return self._reference(call.x, call.weight, call.bias, residual, eps=call.eps)

    def _save(self, ctx: Any, call: Call, results: Any) -> None:
        ctx.eps, ctx.backend = call.eps, call.backend
        ctx.bias_dtype = call.x.dtype if call.bias is None else call.bias.dtype
        normalised = results[1] if "residual" in call else call.x
        ctx.save_for_backward(normalised, call.weight)

    def _gradients(
        self, ctx: Any, grad: Tensor | None, grad_residual: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        if grad is None:
            return {"x": grad_residual, "residual": grad_residual}
        x, weight = ctx.saved_tensors
        arguments = (
            x,
            weight,
            grad,
            grad_residual,
            weight is not None and ctx.wants["weight"],
            ctx.wants["bias"],
            ctx.bias_dtype,
            ctx.eps,
        )
        if torch.is_grad_enabled():  # it will be differentiated itself
            found = ref.norm_backward(self._layer, *arguments)
        else:
            found = self._backward(*arguments, ctx.backend)
        grad_x, grad_weight, grad_bias = found
        return {
            "x": grad_x,
            "weight": grad_weight if arguments[4] else None,
            "bias": grad_bias if arguments[5] else None,
            "residual": grad_x,
        }

    def _run_backward(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        x, grad = call.x.reshape(-1, call.x.shape[-1]), call.grad.reshape(-1, call.x.shape[-1])
        weight, grad_residual, eps = call.weight, _rows(call.grad_residual), call.eps
        too_long = x.shape[1] * x.element_size() > _MAX_ROW_BYTES_WITH_RESIDUAL
        apart = grad_residual if too_long else None
        if too_long:
            grad_residual = None
        grad_x, columns = empty(x, tuple(x.shape), x.dtype), x.shape[1]
        grad_weight = grad_bias = workspace = None
        # An RMS norm seldom has a bias: no kernel keeps its sums.
        kernel_bias = call.bias_grad and self._layer
        if call.weight_grad or kernel_bias:
            plan = self._backward_plan(
                x, weight, grad, grad_residual, grad_x, None, None, None, eps
            )
            workspace = x.new_empty((2, plan["parts"], columns), dtype=torch.float32)
        if call.weight_grad:
            grad_weight = torch.empty_like(weight)
        if kernel_bias:
            grad_bias = x.new_empty(columns, dtype=call.bias_dtype)
        self._backward_kernel(
            x, weight, grad, grad_residual, grad_x, grad_weight, grad_bias, workspace, eps
        )
        if call.bias_grad and not self._layer:
            grad_bias = grad.sum(dim=0, dtype=torch.float32).to(call.bias_dtype)
        if apart is not None:
            grad_x.add_(apart)
        return (
            grad_x.view(call.x.shape),
            x.new_empty(0) if grad_weight is None else grad_weight,
            x.new_empty(0) if grad_bias is None else grad_bias,
        )

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        out: Any,
        backend: str | None,
    ) -> Any:
        if residual is None:
            if out is None:
                return self.plain.pick()(x, weight, bias, eps, backend)
            return self.plain.into()(out, x, weight, bias, eps, backend)
        if out is None:
            return self.added.pick()(x, residual, weight, bias, eps, backend)
        return self.added.into()(out, x, residual, weight, bias, eps, backend)


def _empty_gradients(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    x, columns, nothing = call.x, call.x.shape[-1], call.x.new_empty
    return (
        x.new_empty(x.shape),
        nothing(columns, dtype=call.weight.dtype) if call.weight_grad else nothing(0),
        nothing(columns, dtype=call.bias_dtype) if call.bias_grad else nothing(0),
    )


_RMS_NORM = _Norm(spec.RMS_NORM, layer=False)
_LAYER_NORM = _Norm(spec.LAYER_NORM, layer=True)


@_RMS_NORM.plain.export
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Any:
    """Divides each row by its root mean square: ``x / sqrt(mean(x**2) + eps) * weight + bias``.

    RMS norm is from Zhang and Sennrich, 2019 (arXiv:1910.07467). With ``residual`` the sum
    ``x + residual``, rounded to the dtype of ``x``, is normalised and also returned as the new
    residual, in one kernel.

    Statistics and arithmetic are float32, and the result is rounded once. Differentiable in all
    tensors; the gradients of ``weight`` and ``bias`` are sums in a fixed order. Works under
    torch.compile and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16, any strides. The precompiled kernels take N
            up to 131072, and are fastest where rows begin and end at multiples of 16 bytes.
        weight: ``[N]``, contiguous, of the dtype of ``x`` or float32, or None.
        bias: ``[N]``, the same.
        eps: Added to the mean of the squares; not negative.
        residual: The shape, dtype and device of ``x``, or None.
        out: To write to: of the shape, dtype and device of ``x``, contiguous; with ``residual`` a
            pair of such. They may be ``x`` and ``residual`` themselves. Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The normalised tensor, of the shape and dtype of ``x``; with ``residual`` the pair of it and
        ``x + residual``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, N is 0, ``eps`` is negative, or there is
            no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take such rows.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> hidden, stream = tiercel.rms_norm(attended, norm.weight, eps=1e-6, residual=stream)
    """
    return _RMS_NORM(x, weight, bias, residual, eps, out, backend)


@_LAYER_NORM.plain.export
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Any:
    """Normalises each row: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``.

    Layer norm is from Ba, Kiros and Hinton, 2016 (arXiv:1607.06450); the variance is the mean of
    the squared distances from the mean. A row is read once, without cancellation: squared distances
    are from the mean of a part of the row, and parts are merged by Chan's formula.

    With ``residual`` the sum ``x + residual`` is normalised and returned too, as for
    :func:`tiercel.rms_norm`, whose arguments and guarantees are the same.

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16, any strides. The precompiled kernels take N
            up to 131072, and are fastest where rows begin and end at multiples of 16 bytes.
        weight: ``[N]``, contiguous, of the dtype of ``x`` or float32, or None.
        bias: ``[N]``, the same.
        eps: Added to the variance; not negative.
        residual: The shape, dtype and device of ``x``, or None.
        out: To write to: of the shape, dtype and device of ``x``, contiguous; with ``residual`` a
            pair of such. They may be ``x`` and ``residual`` themselves. Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The normalised tensor, of the shape and dtype of ``x``; with ``residual`` the pair of it and
        ``x + residual``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, N is 0, ``eps`` is negative, or there is
            no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take such rows.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> hidden = tiercel.layer_norm(x, norm.weight, norm.bias)
    """
    return _LAYER_NORM(x, weight, bias, residual, eps, out, backend)
