# SPDX-License-Identifier: Apache-2.0
"""Linear layers with an activation, gated ones, and the MLP of both."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.core.op import composite
from tiercel.ops.linear import spec
from tiercel.ops.linear.fp8 import fp8_linear, quantized_blocks
from tiercel.ops.linear.kernels import (
    GATED_LINEAR,
    GATED_LINEAR_FP8,
    LINEAR_ACT,
    LINEAR_ACT_PREACTIVATION,
)

__all__ = ["fused_mlp", "gated_linear", "linear_act"]


def _wants_gradient(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        getattr(x, "requires_grad", False)  # what is no tensor is told so later
        or getattr(weight, "requires_grad", False)
        or getattr(bias, "requires_grad", False)
    )


@LINEAR_ACT.export
def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "gelu",
    residual: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A linear layer with its activation in one kernel: ``act(x @ weight.T + bias)``.

    ``residual`` is added to the activation's result in the same kernel. Sums, bias, activation and
    residual are float32, and the result is rounded once.

    Differentiable in ``x``, ``weight``, ``bias`` and ``residual``. If a gradient is needed, the
    kernel also writes the rounded preactivation for the backward, except for ReLU, whose backward
    needs only the result, and without an activation. Works under torch.compile and torch.export,
    and in CUDA graphs; it never synchronises.

    Args:
        x: ``[..., K]``, bfloat16 or float16. The precompiled kernels take row strides that are
            multiples of 16 bytes, and K and N multiples of 8; ref takes others.
        weight: ``[N, K]``, the dtype and device of ``x``.
        bias: ``[N]``, or None.
        activation: ``"none"``, ``"relu"``, ``"silu"``, ``"gelu"`` (by the error function),
            ``"gelu_tanh"`` or ``"relu_squared"``; the last one is compiled on this machine, with
            ``TIERCEL_JIT=1``.
        residual: ``[..., N]``, the dtype and device of ``x``, or None.
        out: ``[..., N]`` to write to, contiguous, of the dtype and on the device of ``x``. Then no
            gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[..., N]``, the dtype of ``x``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such activation or
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> hidden = tiercel.linear_act(x, up.weight, up.bias, activation="gelu")
    """
    arguments = (x, weight, bias, activation, residual, backend)
    if out is not None:
        return LINEAR_ACT.into()(out, *arguments)  # type: ignore[no-any-return]
    # Backward needs no preactivation here; ReLU's starts from the result, but a residual hides it.
    derivable = activation == "none" or (activation == "relu" and residual is None)
    if derivable or not _wants_gradient(x, weight, bias):
        result: Tensor = LINEAR_ACT.pick()(*arguments)
        return result
    result, _ = LINEAR_ACT_PREACTIVATION(*arguments)
    return result


@GATED_LINEAR.export
def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A gated linear layer in one kernel: ``act(x @ gate.T) * (x @ up.T)``, as in SwiGLU.

    ``weight`` has the rows of ``gate``, then those of ``up``, in the order of
    :func:`tiercel.silu_and_mul` and :func:`tiercel.fused_moe`. Sums, biases, activation and product
    are float32, and the result is rounded once: neither half is stored in between.

    Differentiable in ``x``, ``weight`` and ``bias``. If a gradient is needed, the layer runs as two
    kernels, since the backward needs both halves: :func:`tiercel.linear_act` without an activation,
    then :func:`tiercel.silu_and_mul` or its like, with rounding in between. Works under
    torch.compile and torch.export, and in CUDA graphs; it never synchronises.

    With ``weight_scale``, ``weight`` is float8 with a scale per 128x128 block, and the result is
    bfloat16: see :func:`tiercel.fp8_linear` for the sums' accuracy. There is no gradient then.

    Args:
        x: ``[..., K]``, bfloat16 or float16; with ``x_scale`` float8_e4m3fn; with ``weight_scale``
            alone bfloat16 or float16, which ``fp8_quantize(x, "1x128")`` quantises first. The
            precompiled kernels take row strides that are multiples of 16 bytes, and K and N
            multiples of 8 (with scales K of 16 and N of 128); ref takes others.
        weight: ``[2N, K]``, the dtype and device of ``x``; with ``weight_scale`` float8_e4m3fn.
        bias: ``[2N]``, or None.
        activation: ``"silu"``, ``"gelu"`` (by the error function) or ``"gelu_tanh"``.
        x_scale: Factor of each 128 elements of a row of a float8 ``x``: float32,
            ``[..., ceil(K / 128)]`` with any strides.
        weight_scale: Factor of each 128x128 block of a float8 ``weight``: float32,
            ``[ceil(2N / 128), ceil(K / 128)]``.
        out: ``[..., N]`` to write to, contiguous, of the dtype and on the device of ``x``. Then no
            gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[..., N]``, the dtype of ``x``, or bfloat16 with scales.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, ``x_scale`` is given without
            ``weight_scale``, or there is no such activation or backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> hidden = tiercel.gated_linear(x, torch.cat([gate.weight, up.weight]))
    """
    if weight_scale is not None:
        x, x_scale = quantized_blocks("gated_linear", x, x_scale, backend)
        scaled = (x, weight, x_scale, weight_scale, bias, activation, backend)
        if out is None:
            return GATED_LINEAR_FP8.pick()(*scaled)  # type: ignore[no-any-return]
        return GATED_LINEAR_FP8.into()(out, *scaled)  # type: ignore[no-any-return]
    if x_scale is not None:
        raise ValueError("gated_linear: `weight_scale` must be given where `x_scale` is, got None")
    if out is not None:
        return GATED_LINEAR.into()(out, x, weight, bias, activation, backend)  # type: ignore[no-any-return]
    if not _wants_gradient(x, weight, bias):
        result: Tensor = GATED_LINEAR.pick()(x, weight, bias, activation, backend)
        return result
    spec.GATED_LINEAR.check_value("activation", activation)
    both = linear_act(x, weight, bias, activation="none", backend=backend)
    return _gate(both, activation, backend)


def _gate(both: Tensor, activation: str, backend: str | None) -> Tensor:
    from tiercel.ops.activation.op import gelu_and_mul, silu_and_mul

    if activation == "silu":
        return silu_and_mul(both, backend=backend)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return gelu_and_mul(both, approximate=approximate, backend=backend)


def _added(result: Tensor, residual: Tensor) -> Tensor:
    """The sum, of a residual that is like the result."""
    if not isinstance(residual, Tensor):
        raise TypeError(f"fused_mlp: `residual` must be a tensor, got {type(residual).__name__}")
    if residual.dtype != result.dtype:
        raise TypeError(
            f"fused_mlp: `residual` must have dtype {result.dtype}, got {residual.dtype}"
        )
    if residual.shape != result.shape:
        raise ValueError(
            f"fused_mlp: `residual` must have shape {list(result.shape)}, "
            f"got {list(residual.shape)}"
        )
    if residual.device != result.device:
        raise ValueError(f"fused_mlp: `residual` must be on {result.device}, got {residual.device}")
    return result + residual


@composite(spec.FUSED_MLP)
def fused_mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    gated: bool = True,
    residual: Tensor | None = None,
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A transformer's MLP in two kernels: ``down(act(up(x)))``, gated or not, plus a residual.

    The first is :func:`tiercel.gated_linear`, or :func:`tiercel.linear_act` with ``gated=False``;
    the second is :func:`tiercel.linear_act` without an activation, which adds the residual. It
    begins before the first has ended (programmatic dependent launch).

    With ``up_scale`` and ``down_scale`` the weights are float8 with a scale per 128x128 block.
    Then ``x`` and what is between the products are quantised per 1x128 values, by a launch each,
    and the products are those of :func:`tiercel.gated_linear` with scales and
    :func:`tiercel.fp8_linear`. A residual is added to the rounded result.

    Differentiable in all tensors, but not with scales. Works under torch.compile and torch.export,
    and in CUDA graphs.

    Args:
        x: ``[..., K]``, bfloat16 or float16; bfloat16 with scales.
        up_weight: ``[2H, K]``, the gate's rows first, or ``[H, K]`` with ``gated=False``.
        down_weight: ``[N, H]``.
        up_bias: ``[2H]`` or ``[H]``, or None.
        down_bias: ``[N]``, or None.
        activation: As the first of the two takes it.
        gated: Whether half of the first layer gates the other.
        residual: ``[..., N]`` to add, or None.
        up_scale: float32, one per 128x128 block of a float8 ``up_weight``:
            ``[ceil(2H / 128), ceil(K / 128)]``, or of ``H`` rows with ``gated=False``.
        down_scale: The same for ``down_weight``, ``[ceil(N / 128), ceil(H / 128)]``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[..., N]``, the dtype of ``x``.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: As the two layers do.

    Example:
        >>> x = tiercel.fused_mlp(normed, gate_up.weight, down.weight, residual=x)
    """
    if up_scale is not None or down_scale is not None:
        if up_scale is None or down_scale is None:
            missing, given = ("up", "down") if up_scale is None else ("down", "up")
            raise ValueError(
                f"fused_mlp: `{missing}_scale` must be given where `{given}_scale` is, got None"
            )
        if isinstance(x, Tensor) and x.dtype != torch.bfloat16:
            raise TypeError(f"fused_mlp: `x` must have dtype bfloat16 with scales, got {x.dtype}")
        if gated:
            hidden = gated_linear(
                *(x, up_weight, up_bias),
                activation=activation,
                weight_scale=up_scale,
                backend=backend,
            )
        else:
            hidden = fp8_linear(
                *(x, up_weight, None, up_scale, up_bias), activation=activation, backend=backend
            )
        result: Tensor = fp8_linear(
            hidden, down_weight, None, down_scale, down_bias, backend=backend
        )
        return result if residual is None else _added(result, residual)
    first = gated_linear if gated else linear_act
    hidden = first(x, up_weight, up_bias, activation=activation, backend=backend)
    return linear_act(
        hidden, down_weight, down_bias, activation="none", residual=residual, backend=backend
    )
