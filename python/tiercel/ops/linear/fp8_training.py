# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose three products, forward and backward, are of float8 operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Gradient, Native, Op, Python
from tiercel.core.spec import Call, Spec
from tiercel.ops._autocast import under_autocast
from tiercel.ops._gradient import grad_dtype
from tiercel.ops.linear import reference as ref
from tiercel.ops.linear.contract import FP8_LINEAR_TRAINING as TRAINING_CONTRACT
from tiercel.ops.linear.fp8 import fp8_linear
from tiercel.ops.linear.spec import (
    FP8_LINEAR_TRAINING,
    FP8_LINEAR_TRAINING_KEEPING,
    FP8_LINEAR_WEIGHT_GRAD,
    FP8_LINEAR_WEIGHT_GRAD_ADD,
)
from tiercel.ops.quant.op import fp8_quantize
from tiercel.ops.quant.turned import fp8_quantize_transpose

__all__ = ["fp8_linear_training", "fp8_linear_weight_grad"]

# ---------------------------------------------------------------------- the gradient of the weight

_DESCRIPTION = "TMA and wgmma; scales of rows and columns after each 128 tokens"
_METHOD = "float32 products of the float8 values"


def _launch(native: Callable[..., Any], call: Call) -> Any:
    if native is _C.fp8_linear_weight_grad and call.grad.shape[1] == 0:  # no tokens
        return call.out.zero_()
    return _WEIGHT_GRAD.launch(native, call)


_WEIGHT_GRAD = Op(
    FP8_LINEAR_WEIGHT_GRAD,
    sm90=Native(
        _C.fp8_linear_weight_grad,
        _C.fp8_linear_weight_grad_plan,
        ("grad", "x", "grad_scale", "x_scale", "out", False),
        _DESCRIPTION,
        "cute",
        load=_C.fp8_linear_weight_grad_load,
        launch=_launch,
        direct=False,
    ),
    reference=lambda call: ref.fp8_linear_weight_grad(
        call.grad, call.x, call.grad_scale, call.x_scale, dtype=call.dtype
    ),
    method=_METHOD,
)

_WEIGHT_GRAD_ADD = Op(
    FP8_LINEAR_WEIGHT_GRAD_ADD,
    sm90=Native(
        _C.fp8_linear_weight_grad,
        _C.fp8_linear_weight_grad_plan,
        ("grad", "x", "grad_scale", "x_scale", "total", True),
        _DESCRIPTION,
        "cute",
    ),
    reference=lambda call: ref.fp8_linear_weight_grad(
        call.grad, call.x, call.grad_scale, call.x_scale, total=call.total
    ),
    method=_METHOD,
)


@_WEIGHT_GRAD.export
def fp8_linear_weight_grad(
    grad: Tensor,
    x: Tensor,
    grad_scale: Tensor,
    x_scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    total: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The gradient of a linear layer's weight in float8: ``grad @ x.T``, both given transposed.

    The sum is over tokens. Both operands are contiguous along tokens and have a scale per 128 of
    them: :func:`tiercel.fp8_quantize_transpose` makes them. As in :func:`tiercel.fp8_linear` the
    tensor cores sum the products of 128 tokens, which are then scaled and added in float32.

    With ``total`` the products are added to it in place, so that gradients of several micro-batches
    accumulate in float32. There is no derivative. Works under torch.compile and in CUDA graphs; it
    never synchronises.

    Args:
        grad: ``[N, P]``, float8_e4m3fn: the gradient of the layer's result, transposed. The
            precompiled kernels take P and a row stride that are multiples of 16; ref takes others.
        x: ``[K, P]``, float8_e4m3fn, on the device of ``grad``: the layer's input, transposed. The
            kernels take K that is a multiple of 8.
        grad_scale: ``[ceil(P / 128), N]``, float32, with any strides: factor of each 128 elements
            of a row of ``grad``.
        x_scale: ``[ceil(P / 128), K]``, the same for ``x``.
        dtype: Of the result, ``torch.bfloat16`` or ``torch.float32``.
        total: ``[N, K]`` float32, contiguous, to which the products are added; or None. ``dtype``
            is then ignored.
        out: ``[N, K]`` to write to, contiguous, bfloat16 or float32; ``dtype`` is then ignored.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[N, K]``: ``total``, or a tensor of ``dtype``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, both ``total`` and ``out`` are given, or
            there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> _, _, grad_t, grad_scale = tiercel.fp8_quantize_transpose(grad)
        >>> _, _, x_t, x_scale = tiercel.fp8_quantize_transpose(x)
        >>> tiercel.fp8_linear_weight_grad(grad_t, x_t, grad_scale, x_scale, total=weight.grad)
    """
    given = (grad, x, grad_scale, x_scale)
    if total is not None:
        if out is not None:
            raise ValueError("fp8_linear_weight_grad: `total` is the result, and `out` another one")
        _WEIGHT_GRAD_ADD.pick()(*given, total, backend)
        return total
    if out is not None:
        return _WEIGHT_GRAD.into()(out, *given, dtype, backend)  # type: ignore[no-any-return]
    result: Tensor = _WEIGHT_GRAD.pick()(*given, dtype, backend)
    return result


# --------------------------------------------------------------------------------------- the layer


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _rows(x: Tensor, backend: str) -> Tensor:
    """A matrix that the backend takes."""
    x = _matrix(x)
    if backend != "sm90":
        return x
    fits = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _product(backend: str, call: Call, x8: Tensor, scale: Tensor) -> Tensor:
    w8, w_scale = fp8_quantize(_rows(call.weight, backend), "128x128", backend=backend)
    bias = call.bias
    if backend == "sm90" and bias is not None and bias.data_ptr() % 16 != 0:
        bias = bias.clone()
    out = fp8_linear(x8, w8, scale, w_scale, bias, backend=backend)
    return out.view(*call.x.shape[:-1], call.weight.shape[0])


def _forward(backend: str, call: Call) -> Tensor:
    return _product(backend, call, *fp8_quantize(_rows(call.x, backend), "1x128", backend=backend))


def _forward_keeping(backend: str, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    x8, scale, *turned = fp8_quantize_transpose(_rows(call.x, backend), backend=backend)
    return _product(backend, call, x8, scale), *turned


def _plan(call: Call) -> dict[str, Any]:
    for size, name in zip(call.weight.shape, "NK", strict=True):
        if size == 0 or size % 16:
            raise NotImplementedError(
                f"fp8_linear_training: {name} must be a multiple of 16, got {size}"
            )
    return {"kernel": "fp8_quantize_transpose, fp8_linear, fp8_linear_weight_grad"}


def _save(ctx: Any, call: Call, results: Any) -> None:
    kept = (call.x if ctx.wants["weight"] else None), None, None
    if isinstance(results, tuple):
        kept = None, *results[1:]
        ctx.mark_non_differentiable(*results[1:])
    ctx.backend, ctx.shape = call.backend, call.x.shape
    ctx.dtype = torch.float32 if call.weight.dtype == torch.float32 else grad_dtype(call.weight)
    # Backwards of other micro-batches write to it before this one does.
    ctx.total = call.weight_grad
    ctx.save_for_backward(call.weight, *kept)


def _gradients(ctx: Any, grad: Tensor | None, *_: Any) -> dict[str, Tensor | None]:
    if grad is None:
        return {}
    weight, x, x_t, x_t_scale = ctx.saved_tensors
    wants = {"bias": False, **ctx.wants}
    backend = ctx.backend if ctx.backend in ("sm90", "ref") else None
    rows = _matrix(grad).contiguous()
    found: dict[str, Tensor | None] = {}
    grad8, grad_scale, grad_t, grad_t_scale = fp8_quantize_transpose(rows, backend=backend)
    if wants["x"]:
        _, _, weight_t, weight_t_scale = fp8_quantize_transpose(
            weight.contiguous(), "128x128", backend=backend
        )
        of_x = fp8_linear(
            *(grad8, weight_t[:, : weight.shape[0]], grad_scale, weight_t_scale), backend=backend
        )
        found["x"] = of_x.view(ctx.shape)
    if wants["weight"]:
        if x is not None:
            _, _, x_t, x_t_scale = fp8_quantize_transpose(_matrix(x).contiguous(), backend=backend)
        of_weight = fp8_linear_weight_grad(
            *(grad_t, x_t, grad_t_scale, x_t_scale),
            dtype=ctx.dtype or torch.bfloat16,
            total=ctx.total,
            backend=backend,
        )
        found["weight"] = of_weight if ctx.total is None else None
    if wants["bias"]:
        found["bias"] = torch.ops.tiercel.reduce(rows, 0, "sum", False, None, backend)
    return found


def _operator(
    declared: Spec, forward: Callable[[str, Call], Any], plugin: Callable[..., Any] | None = None
) -> Op:
    def run(call: Call) -> Any:
        _plan(call)
        return forward("sm90", call)

    def reference(call: Call) -> Any:
        with torch.autocast(call.x.device.type, enabled=False):  # the products are float32
            return forward("ref", call)

    return Op(
        declared,
        sm90=Python(
            run,
            _plan,
            "operands quantised by 1x128 and 128x128 values, the input's transpose on the way",
            "cute",
        ),
        reference=reference,
        method=_METHOD,
        gradient=Gradient(_save, _gradients),
        out=False,
        plugin=plugin,
    )


_TRAINING = _operator(FP8_LINEAR_TRAINING, _forward)
_TRAINING_KEEPING = _operator(
    FP8_LINEAR_TRAINING_KEEPING,
    _forward_keeping,
    # A backend knows nothing of the transpose.
    plugin=lambda backend, call: (
        *TRAINING_CONTRACT.run(backend, call),
        *fp8_quantize_transpose(_matrix(call.x), backend="ref")[2:],
    ),
)


@_TRAINING.export
def fp8_linear_training(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_grad: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A linear layer for training with float8 products: ``x @ weight.T + bias``.

    The recipe of DeepSeek-V3 (arXiv:2412.19437): activations and gradients are quantised to e4m3
    with a scale per 1x128 values, the weight with one per 128x128, and the layer's three products
    have float8 operands and float32 sums. The weight itself stays bfloat16 or float32, and is
    quantised at each call. The backward keeps the quantised input, half the size of ``x``, and the
    weight.

    Differentiable once, in ``x``, ``weight`` and ``bias``. The gradient of a float32 weight is
    float32; so is that of a bfloat16 leaf with ``weight.grad_dtype = torch.float32``, where PyTorch
    has that, outside of compiled graphs. Works under torch.compile, torch.autocast (which does not
    cast the weight) and activation checkpointing, and in CUDA graphs; it never synchronises.

    Args:
        x: ``[..., K]``, bfloat16.
        weight: ``[N, K]``, bfloat16 or float32, on the device of ``x``. The precompiled kernels
            take N and K that are multiples of 16; ref takes others.
        bias: ``[N]``, bfloat16, or None.
        weight_grad: ``[N, K]`` float32, contiguous, such as ``weight.grad``, to which the kernel of
            the weight's gradient adds. Autograd then has no gradient for the weight, its hooks do
            not run, and every backward through the layer adds, also one for other inputs
            (``torch.autograd.grad``). In compiled graphs a backward has to run before the next
            forward. None: autograd returns the gradient as usual.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[..., N]``, bfloat16.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take these sizes.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; a second
            derivative is asked for.

    Example:
        >>> y = tiercel.fp8_linear_training(x, layer.weight, weight_grad=layer.weight.grad)
        >>> y.sum().backward()
    """
    x, bias = under_autocast(x, bias)
    if torch.is_grad_enabled() and getattr(weight, "requires_grad", False):
        out, _, _ = _TRAINING_KEEPING(x, weight, bias, weight_grad, backend)
    else:
        out = _TRAINING(x, weight, bias, weight_grad, backend)
    return out  # type: ignore[no-any-return]
