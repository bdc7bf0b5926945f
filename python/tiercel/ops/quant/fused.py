# SPDX-License-Identifier: Apache-2.0
"""Norms and gated activations whose results are quantised to e4m3 in the same launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiercel import _C
from tiercel.core.op import Lookup, Native, Op
from tiercel.core.spec import Call
from tiercel.ops.quant import reference as ref
from tiercel.ops.quant import spec

__all__ = ["act_and_mul_quant", "layer_norm_quant", "rms_norm_quant"]

# Numbers of Fp8Granularity.
_NUMBER = {name: list(spec.TILES).index(name) for name in spec.FUSED_GRANULARITIES}
_BY_GRANULARITY = Lookup("granularity", _NUMBER)
_DESCRIPTION = "a row in a block's registers until it is quantised"
_METHOD = "torch, one step after the other"


def _norm_op(declared: spec.Spec, kernel: Any, plan: Any, reference: Any) -> Op:
    def of_plugin(backend: Any, call: Call) -> tuple[Tensor | None, ...]:
        """A plug-in knows nothing of `residual` and `normed`: calls with one run the reference."""
        values = declared.values(call)
        if call.residual is None and call.normed is None:
            made = backend(*values.values())
        else:
            made = reference(**values)
        return (*made, call.residual, call.normed)

    parameters = ("weight", "bias") if "bias" in declared.names else ("weight",)
    return Op(
        declared,
        sm90=Native(
            kernel,
            plan,
            ("x", "q", "scale", *parameters, _BY_GRANULARITY, "eps", "residual", "normed"),
            _DESCRIPTION,
            load=_C.fused_quant_load,
        ),
        reference=lambda call: reference(**declared.values(call)),
        method=_METHOD,
        plugin=of_plugin,
    )


_RMS_NORM_QUANT = _norm_op(
    spec.RMS_NORM_QUANT, _C.rms_norm_quant, _C.rms_norm_quant_plan, ref.rms_norm_quant
)
_LAYER_NORM_QUANT = _norm_op(
    spec.LAYER_NORM_QUANT, _C.layer_norm_quant, _C.layer_norm_quant_plan, ref.layer_norm_quant
)


@_RMS_NORM_QUANT.export
def rms_norm_quant(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    weight: Tensor | None = None,
    *,
    granularity: str = "row",
    eps: float = 1e-6,
    residual: Tensor | None = None,
    normed: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`tiercel.rms_norm` with a result quantised to e4m3 with scales, in one launch.

    ``q * scale`` is ``x / sqrt(mean(x**2) + eps) * weight``, quantised from float32 as by
    :func:`tiercel.fp8_quantize`. With ``residual`` the sum ``x + residual``, rounded to the dtype
    of ``x``, is normalised, and becomes the new residual.

    There is no derivative: it is for inference. Works under torch.compile and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, N]`` bfloat16 or float16. The precompiled kernels take N that is a multiple of 8 up
            to 16384, and row strides that are multiples of 16 bytes; ref takes others.
        q: ``[T, N]`` float8_e4m3fn, contiguous, written to.
        scale: float32, contiguous. ``[T, 1]`` with ``"row"`` and ``[T, ceil(N / 128)]`` with
            ``"1x128"``, written to; ``[1, 1]`` with ``"tensor"``, an input.
        weight: ``[N]``, contiguous, of the dtype of ``x`` or float32, or None.
        granularity: What shares a scale: ``"tensor"``, ``"row"`` or ``"1x128"``.
        eps: Added to the mean of the squares; not negative.
        residual: ``[T, N]`` of the dtype of ``x``, written to, or None.
        normed: ``[T, N]`` of the dtype of ``x``, contiguous, written to: the values before
            quantisation, rounded; or None.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``(q, scale)``, the arguments.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, ``eps`` is negative, or there is no such
            granularity or backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted.

    Example:
        >>> tiercel.rms_norm_quant(attended, q, scale, norm.weight, residual=stream)
    """
    _RMS_NORM_QUANT.pick()(x, q, scale, weight, granularity, eps, residual, normed, backend)
    return q, scale


@_LAYER_NORM_QUANT.export
def layer_norm_quant(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    granularity: str = "row",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    normed: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`tiercel.layer_norm` with a result quantised to e4m3 with scales, in one launch.

    ``q * scale`` is ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, quantised from float32
    as by :func:`tiercel.fp8_quantize`. With ``residual`` the sum ``x + residual``, rounded to the
    dtype of ``x``, is normalised, and becomes the new residual.

    There is no derivative: it is for inference. Works under torch.compile and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, N]`` bfloat16 or float16. The precompiled kernels take N that is a multiple of 8 up
            to 16384, and row strides that are multiples of 16 bytes; ref takes others.
        q: ``[T, N]`` float8_e4m3fn, contiguous, written to.
        scale: float32, contiguous. ``[T, 1]`` with ``"row"`` and ``[T, ceil(N / 128)]`` with
            ``"1x128"``, written to; ``[1, 1]`` with ``"tensor"``, an input.
        weight: ``[N]``, contiguous, of the dtype of ``x`` or float32, or None.
        bias: ``[N]``, the same.
        granularity: What shares a scale: ``"tensor"``, ``"row"`` or ``"1x128"``.
        eps: Added to the variance; not negative.
        residual: ``[T, N]`` of the dtype of ``x``, written to, or None.
        normed: ``[T, N]`` of the dtype of ``x``, contiguous, written to: the values before
            quantisation, rounded; or None.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``(q, scale)``, the arguments.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, ``eps`` is negative, or there is no such
            granularity or backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted.

    Example:
        >>> tiercel.layer_norm_quant(hidden, q, scale, norm.weight, norm.bias)
    """
    _LAYER_NORM_QUANT.pick()(x, q, scale, weight, bias, granularity, eps, residual, normed, backend)
    return q, scale


_ACT_AND_MUL_QUANT = Op(
    spec.ACT_AND_MUL_QUANT,
    sm90=Native(
        _C.act_and_mul_quant,
        _C.act_and_mul_quant_plan,
        (
            *("x", "q", "scale"),
            Lookup("activation", {name: i for i, name in enumerate(spec.ACTIVATIONS)}),
            _BY_GRANULARITY,
        ),
        _DESCRIPTION,
        load=_C.fused_quant_load,
    ),
    reference=lambda call: ref.act_and_mul_quant(**spec.ACT_AND_MUL_QUANT.values(call)),
    method=_METHOD,
)


@_ACT_AND_MUL_QUANT.export
def act_and_mul_quant(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    *,
    activation: str = "silu",
    granularity: str = "row",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`tiercel.silu_and_mul` and its like with a result quantised to e4m3 with scales, in one
    launch.

    ``q * scale`` is ``activation(gate) * factor``, quantised from float32 as by
    :func:`tiercel.fp8_quantize`.

    There is no derivative: it is for inference. Works under torch.compile and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, 2N]`` bfloat16 or float16, the gates in the first half and the factors in the
            second. The precompiled kernels take N that is a multiple of 8 up to 32768, and row
            strides that are multiples of 16 bytes; ref takes others.
        q: ``[T, N]`` float8_e4m3fn, contiguous, written to.
        scale: float32, contiguous. ``[T, 1]`` with ``"row"`` and ``[T, ceil(N / 128)]`` with
            ``"1x128"``, written to; ``[1, 1]`` with ``"tensor"``, an input.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``.
        granularity: What shares a scale: ``"tensor"``, ``"row"`` or ``"1x128"``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``(q, scale)``, the arguments.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such activation,
            granularity or backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted.

    Example:
        >>> tiercel.act_and_mul_quant(x @ gate_up.T, q, scale, granularity="1x128")
    """
    _ACT_AND_MUL_QUANT.pick()(x, q, scale, activation, granularity, backend)
    return q, scale
