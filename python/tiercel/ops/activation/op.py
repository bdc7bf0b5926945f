# SPDX-License-Identifier: Apache-2.0
"""Activations, plain and gated, with an optional float8 result."""

from __future__ import annotations

from torch import Tensor

from tiercel.ops.activation.forms import Activation

__all__ = ["gelu", "gelu_and_mul", "relu", "relu_and_mul", "silu", "silu_and_mul"]

# ActivationFunction in kernels/activation/activation.h, by `approximate` where there is that.
_SILU: dict[str | None, int] = {None: 0}
_GELU: dict[str | None, int] = {"none": 1, "tanh": 2}
_RELU: dict[str | None, int] = {None: 3}

_SILU_AND_MUL = Activation("silu_and_mul", _SILU)
_GELU_AND_MUL = Activation("gelu_and_mul", _GELU)
_RELU_AND_MUL = Activation("relu_and_mul", _RELU)
_PLAIN_SILU = Activation("silu", _SILU)
_PLAIN_GELU = Activation("gelu", _GELU)
_PLAIN_RELU = Activation("relu", _RELU)


@_SILU_AND_MUL.forward.export
def silu_and_mul(
    x: Tensor,
    up: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """SwiGLU's activation: ``silu(gate) * up``.

    silu(x) = x / (1 + exp(-x)); Shazeer, 2020, arXiv:2002.05202.
    Arithmetic is float32 and the result is rounded once.

    Differentiable in ``x`` and ``up``, by one kernel; works under torch.compile and torch.export,
    and in CUDA graphs; it never synchronises.

    Args:
        x: ``[..., 2N]``, the gate in the first half and the factor in the second; or, with ``up``,
            the gate alone, ``[..., N]``. float32, bfloat16 or float16. Rows may be strided; without
            a single row stride, or with a non-contiguous last dimension, a copy is made.
        up: The factor, of the shape and dtype of ``x``, or None.
        scale: One float32 on the device of ``x``, or None. With it the result is float8_e4m3fn: the
            product times ``1 / scale``, saturated at +-448; NaN stays NaN. No gradient flows.
        out: ``[..., N]`` to write to, contiguous, of the result's dtype, on the device of ``x``.
            Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[..., N]``, the dtype of ``x``, or float8_e4m3fn with ``scale``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted with ``scale`` or ``out``.

    Example:
        >>> hidden = tiercel.silu_and_mul(x @ gate_up.T)
    """
    if out is None:
        return _SILU_AND_MUL.forward.pick()(x, up, scale, backend)  # type: ignore[no-any-return]
    return _SILU_AND_MUL.forward.into()(out, x, up, scale, backend)  # type: ignore[no-any-return]


@_GELU_AND_MUL.forward.export
def gelu_and_mul(
    x: Tensor,
    up: Tensor | None = None,
    *,
    approximate: str = "none",
    scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """GEGLU's activation: ``gelu(gate) * up``.

    gelu(x) = x Phi(x), where Phi is the normal CDF; Hendrycks and Gimpel, 2016, arXiv:1606.08415,
    and Shazeer, 2020, arXiv:2002.05202. Arithmetic is float32 and the result is rounded once.

    Differentiable in ``x`` and ``up``, by one kernel; works under torch.compile and torch.export,
    and in CUDA graphs; it never synchronises.

    Args:
        x: ``[..., 2N]``, the gate in the first half and the factor in the second; or, with ``up``,
            the gate alone, ``[..., N]``. float32, bfloat16 or float16. Rows may be strided; without
            a single row stride, or with a non-contiguous last dimension, a copy is made.
        up: The factor, of the shape and dtype of ``x``, or None.
        approximate: ``"none"`` for the error function, ``"tanh"`` for the approximation by tanh.
        scale: One float32 on the device of ``x``, or None. With it the result is float8_e4m3fn: the
            product times ``1 / scale``, saturated at +-448; NaN stays NaN. No gradient flows.
        out: ``[..., N]`` to write to, contiguous, of the result's dtype, on the device of ``x``.
            Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[..., N]``, the dtype of ``x``, or float8_e4m3fn with ``scale``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such approximation or
            backend.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted with ``scale`` or ``out``.

    Example:
        >>> hidden = tiercel.gelu_and_mul(x @ gate_up.T)
    """
    if out is None:
        return _GELU_AND_MUL.forward.pick()(x, up, approximate, scale, backend)  # type: ignore[no-any-return]
    return _GELU_AND_MUL.forward.into()(out, x, up, approximate, scale, backend)  # type: ignore[no-any-return]


@_RELU_AND_MUL.forward.export
def relu_and_mul(
    x: Tensor,
    up: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """ReGLU's activation: ``relu(gate) * up``.

    Shazeer, 2020, arXiv:2002.05202.
    Arithmetic is float32 and the result is rounded once.

    Differentiable in ``x`` and ``up``, by one kernel; works under torch.compile and torch.export,
    and in CUDA graphs; it never synchronises.

    Args:
        x: ``[..., 2N]``, the gate in the first half and the factor in the second; or, with ``up``,
            the gate alone, ``[..., N]``. float32, bfloat16 or float16. Rows may be strided; without
            a single row stride, or with a non-contiguous last dimension, a copy is made.
        up: The factor, of the shape and dtype of ``x``, or None.
        scale: One float32 on the device of ``x``, or None. With it the result is float8_e4m3fn: the
            product times ``1 / scale``, saturated at +-448; NaN stays NaN. No gradient flows.
        out: ``[..., N]`` to write to, contiguous, of the result's dtype, on the device of ``x``.
            Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[..., N]``, the dtype of ``x``, or float8_e4m3fn with ``scale``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted with ``scale`` or ``out``.

    Example:
        >>> hidden = tiercel.relu_and_mul(x @ gate_up.T)
    """
    if out is None:
        return _RELU_AND_MUL.forward.pick()(x, up, scale, backend)  # type: ignore[no-any-return]
    return _RELU_AND_MUL.forward.into()(out, x, up, scale, backend)  # type: ignore[no-any-return]


@_PLAIN_SILU.forward.export
def silu(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``x / (1 + exp(-x))``, also called swish.

    Arithmetic is float32 and the result is rounded once. Differentiable; works under torch.compile
    and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        x: Any shape; float32, bfloat16 or float16. Rows may be strided, as for
            :func:`tiercel.silu_and_mul`.
        scale: As for :func:`tiercel.silu_and_mul`: makes the result float8_e4m3fn.
        out: To write to: contiguous, of the shape and on the device of ``x``, of the result's
            dtype. Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The shape and dtype of ``x``, or float8_e4m3fn with ``scale``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted with ``scale`` or ``out``.

    Example:
        >>> hidden = tiercel.silu(x)
    """
    if out is None:
        return _PLAIN_SILU.forward.pick()(x, scale, backend)  # type: ignore[no-any-return]
    return _PLAIN_SILU.forward.into()(out, x, scale, backend)  # type: ignore[no-any-return]


@_PLAIN_GELU.forward.export
def gelu(
    x: Tensor,
    *,
    approximate: str = "none",
    scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``x * Phi(x)``, where Phi is the normal CDF.

    Arithmetic is float32 and the result is rounded once. Differentiable; works under torch.compile
    and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        x: Any shape; float32, bfloat16 or float16. Rows may be strided, as for
            :func:`tiercel.gelu_and_mul`.
        approximate: ``"none"`` for the error function, ``"tanh"`` for the approximation by tanh.
        scale: As for :func:`tiercel.gelu_and_mul`: makes the result float8_e4m3fn.
        out: To write to: contiguous, of the shape and on the device of ``x``, of the result's
            dtype. Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The shape and dtype of ``x``, or float8_e4m3fn with ``scale``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such approximation or
            backend.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted with ``scale`` or ``out``.

    Example:
        >>> hidden = tiercel.gelu(x)
    """
    if out is None:
        return _PLAIN_GELU.forward.pick()(x, approximate, scale, backend)  # type: ignore[no-any-return]
    return _PLAIN_GELU.forward.into()(out, x, approximate, scale, backend)  # type: ignore[no-any-return]


@_PLAIN_RELU.forward.export
def relu(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``max(x, 0)``; NaN stays NaN.

    Arithmetic is float32 and the result is rounded once. Differentiable; works under torch.compile
    and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        x: Any shape; float32, bfloat16 or float16. Rows may be strided, as for
            :func:`tiercel.relu_and_mul`.
        scale: As for :func:`tiercel.relu_and_mul`: makes the result float8_e4m3fn.
        out: To write to: contiguous, of the shape and on the device of ``x``, of the result's
            dtype. Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The shape and dtype of ``x``, or float8_e4m3fn with ``scale``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted with ``scale`` or ``out``.

    Example:
        >>> hidden = tiercel.relu(x)
    """
    if out is None:
        return _PLAIN_RELU.forward.pick()(x, scale, backend)  # type: ignore[no-any-return]
    return _PLAIN_RELU.forward.into()(out, x, scale, backend)  # type: ignore[no-any-return]
