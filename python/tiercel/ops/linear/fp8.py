# SPDX-License-Identifier: Apache-2.0
"""Linear layers of float8 operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tiercel import _C
from tiercel.core.op import Lookup, Native, Op
from tiercel.core.spec import Call
from tiercel.ops.linear import reference as ref
from tiercel.ops.linear.contract import call_fp8_backend, flat_scales
from tiercel.ops.linear.kernels import INDEX, as_matrix, two_rows
from tiercel.ops.linear.spec import FP8_LINEAR

__all__ = ["fp8_linear"]


def _launch(native: Callable[..., Any], call: Call) -> Any:
    call = flat_scales(call)
    call.x, call.out = as_matrix(call.x), as_matrix(call.out)
    return _FP8_LINEAR.launch(native, call)


def _two_rows(call: Call) -> dict[str, Any]:
    x_scale = call.x_scale.reshape(-1)
    return {**two_rows(call), "x_scale": x_scale if x_scale.numel() == 1 else x_scale[:2]}


def _reference(call: Call) -> Tensor:
    return ref.fp8_linear(
        call.x,
        call.weight,
        call.x_scale,
        call.weight_scale,
        call.bias,
        activation=call.activation,
    )


_FP8_LINEAR = Op(
    FP8_LINEAR,
    sm90=Native(
        _C.fp8_linear,
        _C.fp8_linear_plan,
        (*FP8_LINEAR.names[:5], "out", Lookup("activation", INDEX)),
        "TMA and wgmma, scales and activation in the epilogue",
        "cute",
        load=_C.linear_act_load,
        ranks={"x": 2, "x_scale": 1, "weight_scale": 1},
        launch=_launch,
        sample=_two_rows,
    ),
    reference=_reference,
    method="float32 products of the float8 values",
    plugin=call_fp8_backend,
)


@_FP8_LINEAR.export
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
    arguments = (x, weight, x_scale, weight_scale, bias, activation, backend)
    if out is None:
        result: Tensor = _FP8_LINEAR.pick()(*arguments)
        return result
    return _FP8_LINEAR.into()(out, *arguments)  # type: ignore[no-any-return]
