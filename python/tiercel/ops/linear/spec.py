# SPDX-License-Identifier: Apache-2.0
"""The declarations of the linear layers."""

from __future__ import annotations

import math
from typing import Any

from tiercel.core.spec import HALVES, Bool, Call, Dim, DType, Numerics, Spec, Str, Tensor

# The last one is not precompiled.
ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh", "relu_squared")
GATES = ("silu", "gelu", "gelu_tanh")
_FP8_ACTIVATIONS = ("none", *GATES)

_X = Tensor("x", "... K", HALVES, strided=True)
_RESIDUAL = Tensor("residual", "... N", "x", strided=True, optional=True)

# Two roundings to bfloat16, 2**-9 each, before and after the activation. Sums are of about 1, the
# magnitudes of their products at most 30: float32 sums lose less than 2**-18 of those.
LINEAR_ACT = Spec(
    "linear_act",
    _X,
    Tensor("weight", "N K", "x", strided=True),
    Tensor("bias", "N", "x", strided=True, optional=True),
    Str("activation", "gelu", choices=ACTIVATIONS),
    _RESIDUAL,
    results=[Tensor("out", "... N", "x", rtol=8e-3, atol=4e-3)],
    limits="N and K multiples of 8, 16-byte aligned rows",
    numerics=Numerics(
        2**-13,
        of="terms",
        sums="`K` in order, in float32 on tensor cores",
        batch_invariant=False,
        varies="the tiles, and splits of K, that are chosen by the number of rows",
    ),
)

# Also returns x @ weight.T + bias, from which the backward of most activations starts.
LINEAR_ACT_PREACTIVATION = LINEAR_ACT.changed(
    name="linear_act_preactivation",
    results=(*LINEAR_ACT.results, Tensor("preactivation", "... N", "x")),
)


def _check_halves(call: Call) -> None:
    if call.weight.shape[0] % 2:
        raise ValueError(
            "gated_linear: `weight` must have an even number of rows [2N, K], got "
            f"{list(call.weight.shape)}"
        )


# Both halves, the activation and the product are rounded to bfloat16, by 2**-9 each.
GATED_LINEAR = Spec(
    "gated_linear",
    _X,
    Tensor("weight", "2N K", "x", strided=True),
    Tensor("bias", "2N", "x", strided=True, optional=True),
    Str("activation", "silu", choices=GATES),
    results=[Tensor("out", "... N", "x", rtol=1.2e-2, atol=8e-3)],
    dims={"N": Dim("weight", 0, divisor=2)},
    check=_check_halves,
    limits="as `linear_act`",
    numerics=Numerics(
        2**-13,
        of="terms",
        sums="`K` in order, in float32 on tensor cores",
        batch_invariant=False,
        varies="the tiles, and splits of K, that are chosen by the number of rows",
    ),
)


SCALE_BLOCK = 128


def has_block_scales(x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> bool:
    """True if scales are of 1x128 and 128x128 values. Those that could be of rows as well mean the
    same."""
    x_shapes, w_shape = _block_scale_shapes(x, weight)
    rows, columns = math.prod(x.shape[:-1]), weight.shape[0]
    if tuple(x_scale.shape) in x_shapes and x_scale.numel() not in (1, rows):
        return True
    return tuple(weight_scale.shape) == w_shape and weight_scale.numel() not in (1, columns)


def _block_scale_shapes(x: Any, weight: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shapes that `x_scale` and that `weight_scale` may have."""
    down, across = ((size + SCALE_BLOCK - 1) // SCALE_BLOCK for size in weight.shape)
    batch = tuple(x.shape[:-1])
    return ((*batch, across), (math.prod(batch), across)), (down, across)


def _check_block_scales(op: str, call: Call, rows_text: str) -> None:
    x_shapes, w_shape = _block_scale_shapes(call.x, call.weight)
    for name, shapes, text in (
        ("x_scale", x_shapes, "[M, K / 128]"),
        ("weight_scale", (w_shape,), f"[{rows_text} / 128, K / 128]"),
    ):
        shape = tuple(getattr(call, name).shape)
        if shape not in shapes:
            raise ValueError(
                f"{op}: `{name}` must have shape {text} = {list(shapes[-1])}, got {list(shape)}"
            )


def _check_scales(call: Call) -> None:
    rows, columns = math.prod(call.x.shape[:-1]), call.weight.shape[0]
    if has_block_scales(call.x, call.weight, call.x_scale, call.weight_scale):
        _check_block_scales("fp8_linear", call, "N")
        return
    for name, count, letter in (("x_scale", rows, "M"), ("weight_scale", columns, "N")):
        scale = getattr(call, name)
        if scale.numel() not in (1, count):
            raise ValueError(
                f"fp8_linear: `{name}` must have 1 or {letter} = {count} elements, got shape "
                f"{list(scale.shape)}"
            )


_FLOAT8 = "float8_e4m3fn"

# One rounding to bfloat16; and the tensor cores' adders keep 13 bits behind the largest of 32
# products and the sum so far: in a model of them that costs 2**-16 of the products' magnitudes
# (root mean square), the worst of many sums 2**-12. An activation's slope is below 1.13.
FP8_LINEAR = Spec(
    "fp8_linear",
    Tensor("x", "... K", _FLOAT8, strided=True),
    Tensor("weight", "N K", _FLOAT8, strided=True),
    Tensor("x_scale", "*", "float32", strided=True),
    Tensor("weight_scale", "*", "float32", strided=True),
    Tensor("bias", "N", "bfloat16", strided=True, optional=True),
    Str("activation", "none", choices=_FP8_ACTIVATIONS),
    results=[Tensor("out", "... N", "bfloat16", rtol=8e-3, atol=1e-6, of_sums=1.13 * 2**-11)],
    check=_check_scales,
    limits="K a multiple of 16, N a multiple of 8",
    numerics=Numerics(
        1.13 * 2**-11,
        of="terms",
        sums="K in order on tensor cores, with 13 bits behind the sum's point",
        batch_invariant=False,
        varies="the tiles, and splits of K, that are chosen by the number of rows",
    ),
)


def _across(tokens: int) -> int:
    return (tokens + SCALE_BLOCK - 1) // SCALE_BLOCK


_OF_TOKENS = (
    Tensor("grad", "N P", _FLOAT8, strided=True),
    Tensor("x", "K P", _FLOAT8, strided=True),
    Tensor("grad_scale", "B N", "float32", strided=True, shape_text="[P / 128, N]"),
    Tensor("x_scale", "B K", "float32", strided=True, shape_text="[P / 128, K]"),
)
_OF_SCALES = {"B": lambda call: _across(call.grad.shape[1]) if call.grad.dim() == 2 else None}

# Products of 128 tokens are sums of tensor cores, as fp8_linear's, with 13 bits behind the point.
# They are added in float32; a bfloat16 result is rounded once.
FP8_LINEAR_WEIGHT_GRAD = Spec(
    "fp8_linear_weight_grad",
    *_OF_TOKENS,
    DType("dtype", "bfloat16", choices=("bfloat16", "float32")),
    results=[Tensor("out", "N K", "dtype", rtol=8e-3, atol=1e-6, of_sums=2**-11)],
    dims=_OF_SCALES,
    limits="P a multiple of 16, K a multiple of 8",
    numerics=Numerics(
        2**-11,
        of="terms",
        sums="128 tokens on tensor cores, with 13 bits behind the sum's point; those in float32, "
        "in order",
    ),
)

# Adds to `total` instead.
FP8_LINEAR_WEIGHT_GRAD_ADD = Spec(
    "fp8_linear_weight_grad_add",
    *_OF_TOKENS,
    Tensor("total", "N K", "float32", written=True),
    dims=_OF_SCALES,
    public="fp8_linear_weight_grad",
)


# Both operands are rounded to e4m3: 2**-4 of a value, where that is not among the smallest of the
# 128 that share its scale.
FP8_LINEAR_TRAINING = Spec(
    "fp8_linear_training",
    Tensor("x", "... K", "bfloat16", strided=True),
    Tensor("weight", "N K", ("bfloat16", "float32"), strided=True),
    Tensor("bias", "N", "bfloat16", strided=True, optional=True),
    Tensor("weight_grad", "N K", "float32", optional=True),
    results=[Tensor("out", "... N", "bfloat16", rtol=8e-3, atol=1e-6, of_sums=2**-11)],
    limits="N and K multiples of 16",
    numerics=Numerics(
        2**-3,
        of="terms",
        sums="operands rounded to e4m3, then as `fp8_linear`",
        batch_invariant=False,
        varies="the tiles, and splits of K, that are chosen by the number of rows",
    ),
)


def _check_gated_blocks(call: Call) -> None:
    _check_halves(call)
    _check_block_scales("gated_linear", call, "2N")


# gated_linear of float8 operands with scales of blocks.
GATED_LINEAR_FP8 = Spec(
    "gated_linear_fp8",
    Tensor("x", "... K", _FLOAT8, strided=True),
    Tensor("weight", "2N K", _FLOAT8, strided=True),
    Tensor("x_scale", "*", "float32", strided=True),
    Tensor("weight_scale", "*", "float32", strided=True),
    Tensor("bias", "2N", "bfloat16", strided=True, optional=True),
    Str("activation", "silu", choices=GATES),
    results=[Tensor("out", "... N", "bfloat16", rtol=1.2e-2, atol=8e-3)],
    dims={"N": Dim("weight", 0, divisor=2)},
    check=_check_gated_blocks,
    limits="K a multiple of 16, N a multiple of 128",
    gradient_of="gated_linear",
)


def _token_tiles(call: Call) -> int:
    return _across(math.prod(call.x.shape[:-1]))


# Also returns the quantised transpose of x, from which the weight's gradient is made.
FP8_LINEAR_TRAINING_KEEPING = FP8_LINEAR_TRAINING.changed(
    name="fp8_linear_training_keeping",
    results=(
        *FP8_LINEAR_TRAINING.results,
        Tensor("x_t", "K P", _FLOAT8),
        Tensor("x_t_scale", "B K", "float32"),
    ),
    dims={"B": _token_tiles, "P": lambda call: _token_tiles(call) * SCALE_BLOCK},
)

FUSED_MLP = Spec(
    "fused_mlp",
    Tensor("x", "... K", HALVES, strided=True, dtype_with=("up_scale", "bfloat16")),
    Tensor("up_weight", "H2 K", "x", strided=True, dtype_with=("up_scale", _FLOAT8)),
    Tensor("down_weight", "N H", "x", strided=True, dtype_with=("down_scale", _FLOAT8)),
    Tensor("up_bias", "H2", "x", strided=True, optional=True),
    Tensor("down_bias", "N", "x", strided=True, optional=True),
    Str("activation", "silu", choices=ACTIVATIONS),
    Bool("gated", True),
    _RESIDUAL,
    Tensor("up_scale", "*", "float32", strided=True, optional=True),
    Tensor("down_scale", "*", "float32", strided=True, optional=True),
    results=[Tensor("out", "... N", "x")],
    together=("up_scale", "down_scale"),
    limits="as `linear_act`, or as `fp8_linear`",
    numerics=Numerics(
        2**-8,
        of="terms",
        sums="two products; what is between them is rounded to the dtype, and with scales "
        "quantised as `x` is",
        batch_invariant=False,
        varies="the tiles, and splits of K, that are chosen by the number of rows",
    ),
)

_GRAD = Tensor("grad", "M N", HALVES, strided=True)

# grad @ weight
BACKWARD_X = Spec(
    "linear_act_backward_x",
    _GRAD,
    Tensor("weight", "N K", "grad", strided=True),
    results=[Tensor("grad_x", "M K", "grad")],
    public="linear_act_backward",
)

# grad.T @ x
BACKWARD_WEIGHT = Spec(
    "linear_act_backward_weight",
    _GRAD,
    Tensor("x", "M K", "grad", strided=True),
    results=[Tensor("grad_weight", "N K", "grad")],
    public="linear_act_backward",
)
