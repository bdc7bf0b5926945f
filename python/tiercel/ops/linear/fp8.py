# SPDX-License-Identifier: Apache-2.0
"""Linear layers of float8 operands."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Backend, Op
from tiercel.core import platform
from tiercel.core.checks import check_contiguous, check_dtype, check_same_device, check_shape
from tiercel.core.eager import empty
from tiercel.core.platform import Reason
from tiercel.ops.linear import reference as ref
from tiercel.ops.linear.forms import INDEX, rows

__all__ = ["fp8_linear"]

_NAME = "fp8_linear"
_FLOAT8 = torch.float8_e4m3fn
_ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh")
_CUTE = ("TMA and wgmma, scales and activation in the epilogue", "cute")
_TORCH = ("float32 products of the float8 values", "torch")


class _Given(NamedTuple):
    x: Tensor
    weight: Tensor
    x_scale: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    out: Tensor | None
    activation: str


def _split(with_bias: bool, with_out: bool, args: tuple[Any, ...]) -> _Given:
    """`args` end with the activation and the backend."""
    tensors = list(args[4:-2])
    bias, out = (tensors.pop(0) if there else None for there in (with_bias, with_out))
    return _Given(*args[:4], bias, out, args[-2])


def _check_scale(name: str, scale: Tensor, count: int, letter: str, x: Tensor) -> None:
    check_dtype(_NAME, name, scale.dtype, (torch.float32,))
    if scale.numel() not in (1, count):
        raise ValueError(
            f"{_NAME}: `{name}` must have 1 or {letter} = {count} elements, got shape "
            f"{list(scale.shape)}"
        )
    check_same_device(_NAME, name, scale, "x", x)


def _check(given: _Given) -> None:
    x, weight, x_scale, weight_scale, bias, out, activation = given
    check_dtype(_NAME, "x", x.dtype, (_FLOAT8,))
    check_dtype(_NAME, "weight", weight.dtype, (_FLOAT8,))
    if x.dim() < 1:
        raise ValueError(f"{_NAME}: `x` must have at least 1 dimension, got 0")
    n = weight.shape[0] if weight.dim() else 0
    check_shape(_NAME, "weight", weight, (n, x.shape[-1]), "[N, K]")
    check_same_device(_NAME, "weight", weight, "x", x)
    _check_scale("x_scale", x_scale, math.prod(x.shape[:-1]), "M", x)
    _check_scale("weight_scale", weight_scale, n, "N", x)
    if bias is not None:
        check_dtype(_NAME, "bias", bias.dtype, (torch.bfloat16,))
        check_shape(_NAME, "bias", bias, (n,), "[N]")
        check_same_device(_NAME, "bias", bias, "x", x)
    if out is not None:
        check_dtype(_NAME, "out", out.dtype, (torch.bfloat16,))
        check_shape(_NAME, "out", out, (*x.shape[:-1], n), "[..., N]")
        check_same_device(_NAME, "out", out, "x", x)
        check_contiguous(_NAME, "out", out)
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{_NAME}: `activation` must be one of {known}, got {activation!r}")


def _arguments(given: _Given, out: Tensor) -> tuple[Any, ...]:
    """As the launcher takes them."""
    scales = (given.x_scale.reshape(-1), given.weight_scale.reshape(-1))
    index = INDEX.get(given.activation, -1)
    return rows(given.x), given.weight, *scales, given.bias, rows(out), index


def _plan(given: _Given) -> dict[str, Any]:
    shape = (*given.x.shape[:-1], given.weight.shape[0])
    out = torch.empty(shape, dtype=torch.bfloat16, device=given.x.device)
    return dict(_C.fp8_linear_plan(*_arguments(given, out)))


def _why_not(given: _Given) -> Reason | None:
    reason = platform.why_not(given.x.device)
    if reason is not None:
        return reason
    try:
        _plan(given)
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


def _operator(with_bias: bool, with_out: bool) -> Op:
    def split(args: tuple[Any, ...]) -> _Given:
        return _split(with_bias, with_out, args)

    def fake(*args: Any) -> Any:
        x, weight = args[:2]
        shape = (*x.shape[:-1], weight.shape[0])
        return None if with_out else torch.empty(shape, dtype=torch.bfloat16, device=x.device)

    def run(*args: Any) -> Any:
        given = split(args)
        out = given.out
        if out is None:
            out = empty(given.x, (*given.x.shape[:-1], given.weight.shape[0]), torch.bfloat16)
        _C.fp8_linear(*_arguments(given, out))
        return None if with_out else out

    def reference(*args: Any) -> Any:
        given = split(args)
        result = ref.fp8_linear(*given[:5], activation=given.activation).contiguous()
        if given.out is None:
            return result
        given.out.copy_(result)
        return None

    tensors = ["x", "weight", "x_scale", "weight_scale", *["bias"] * with_bias]
    schema = ", ".join([f"Tensor {name}" for name in tensors] + ["Tensor(a!) out"] * with_out)
    return Op(
        f"{_NAME}{'' if with_bias else '_no_bias'}{'_out' if with_out else ''}",
        f"({schema}, str activation='none', str? backend=None) -> {'()' if with_out else 'Tensor'}",
        check=lambda *args: _check(split(args)),
        fake=fake,
        sm90=Backend("sm90", run, *_CUTE, why_not=lambda *args: _why_not(split(args))),
        ref=Backend("ref", reference, *_TORCH),
        family=_NAME,
        describe=lambda *args: _plan(split(args)),
        load=_C.linear_act_load if with_bias and not with_out else None,
    )


_FLAGS = (False, True)
_OPERATORS = {flags: _operator(*flags) for flags in product(_FLAGS, _FLAGS)}


@_OPERATORS[True, False].export
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A linear layer of float8 operands: ``act(x_scale * (x @ weight.T) * weight_scale + bias)``.

    Products are summed by the tensor cores, which keep some 13 bits behind the point of the sum:
    about what rounding to bfloat16 costs is lost at K = 4096. Scales, bias and activation are
    float32, and the result is rounded once. There is no gradient. Works under torch.compile and
    torch.export, and in CUDA graphs; it never synchronises.

    Args:
        x: ``[..., K]``, float8_e4m3fn, as :func:`tiercel.fp8_quantize` makes it.
        weight: ``[N, K]``, float8_e4m3fn, on the device of ``x``. The precompiled kernels take K
            that is a multiple of 16 and N that is a multiple of 8; ref takes others.
        x_scale: float32: what the values of ``x`` are multiplied by, one number or one for each of
            its rows, in any shape of so many elements.
        weight_scale: The same for the rows of ``weight``.
        bias: ``[N]``, bfloat16, or None.
        activation: ``"none"``, ``"silu"``, ``"gelu"`` (by the error function) or ``"gelu_tanh"``.
        out: ``[..., N]`` to write to, contiguous, bfloat16.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[..., N]``, bfloat16.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such activation or
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> x8, x_scale = tiercel.fp8_quantize(x, "row")
        >>> y = tiercel.fp8_linear(x8, w8, x_scale, w_scale)
    """
    tensors = [t for t in (x, weight, x_scale, weight_scale, bias, out) if t is not None]
    op = _OPERATORS[bias is not None, out is not None]
    result = op.pick()(*tensors, activation, backend)
    return result if out is None else out
