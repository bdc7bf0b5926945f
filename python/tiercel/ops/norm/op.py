# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the last dimension."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiercel.ops.norm.operators import LAYER, RMS, check_eps, operators

__all__ = ["check_eps", "layer_norm", "rms_norm"]

_RMS_NORM = operators(RMS)
_LAYER_NORM = operators(LAYER)
_ALL = (True, True, True)


@_RMS_NORM.plain[_ALL].export
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
    ``x + residual`` is normalised and returned too, as a transformer's next layer needs it: one
    kernel reads both and writes both. The sum is rounded to the dtype of ``x`` first.

    Statistics and arithmetic are float32, and the result is rounded once. Differentiable in all
    tensors; the gradients of ``weight`` and ``bias`` are sums in a fixed order. Works under
    torch.compile and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16, any strides. The precompiled kernels take N
            up to 131072, and are fastest where rows begin and end on 16 bytes.
        weight: ``[N]``, contiguous, of the dtype of ``x`` or float32, or None.
        bias: ``[N]``, the same.
        eps: Added to the mean of the squares; not negative.
        residual: The shape, dtype and device of ``x``, or None.
        out: To write to: of the shape, dtype and device of ``x``, contiguous; with ``residual`` a
            pair of such. They may be ``x`` and ``residual`` themselves. Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        The normalised tensor, of the shape and dtype of ``x``; with ``residual`` the pair of it and
        ``x + residual``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, N is 0, ``eps`` is negative, or there is
            no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take such rows.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> hidden, stream = tiercel.rms_norm(attended, norm.weight, eps=1e-6, residual=stream)
    """
    return _RMS_NORM(x, weight, bias, residual, out, eps, backend)


@_LAYER_NORM.plain[_ALL].export
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
    the squared distances from the mean. A row is read once, and nothing cancels: squares are of
    distances from the mean of a part of the row, and the parts are joined by Chan's formula.

    With ``residual`` the sum ``x + residual`` is normalised and returned too, as for
    :func:`tiercel.rms_norm`, whose arguments and guarantees are the same.

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16, any strides. The precompiled kernels take N
            up to 131072, and are fastest where rows begin and end on 16 bytes.
        weight: ``[N]``, contiguous, of the dtype of ``x`` or float32, or None.
        bias: ``[N]``, the same.
        eps: Added to the variance; not negative.
        residual: The shape, dtype and device of ``x``, or None.
        out: To write to: of the shape, dtype and device of ``x``, contiguous; with ``residual`` a
            pair of such. They may be ``x`` and ``residual`` themselves. Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        The normalised tensor, of the shape and dtype of ``x``; with ``residual`` the pair of it and
        ``x + residual``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, N is 0, ``eps`` is negative, or there is
            no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take such rows.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> hidden = tiercel.layer_norm(x, norm.weight, norm.bias)
    """
    return _LAYER_NORM(x, weight, bias, residual, out, eps, backend)
