# SPDX-License-Identifier: Apache-2.0
"""The declarations of the mixture-of-experts ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiercel.core.spec import HALVES, INDICES, Bool, Call, Float, Int, Numerics, Spec, Str, Tensor
from tiercel.ops.gemv.spec import FORMATS, GROUPS

FLOAT8 = "float8_e4m3fn"
# In the order of MoeActivation in moe_mlp.h.
ACTIVATIONS = ("silu", "gelu", "relu", "gelu_residual")


def block_scaled(scale: Any) -> bool:
    """True if weights have a scale per 128x128 values; otherwise it is per row or per expert."""
    return scale is not None and scale.ndim == 3


def _check_weights_scale(op: str, name: str, scale: Any, w: Any) -> None:
    from tiercel.core.checks import check_rank, check_shape

    if block_scaled(scale):
        blocks = tuple(-(-size // 128) for size in w.shape[1:])
        per_block = "[E, rows / 128, columns / 128]"
        check_shape(op, name, scale, (w.shape[0], *blocks), per_block)
    else:
        check_rank(op, name, scale, 2)
        columns = 1 if scale.shape[1] == 1 else w.shape[1]
        check_shape(op, name, scale, (w.shape[0], columns), "[E, rows] or [E, 1]")


def _check_half_scales(op: str, call: Call, w_name: str) -> None:
    from tiercel.core.checks import check_rank, check_shape

    x, scale, w_scale = call.x, call.x_scale, getattr(call, f"{w_name}_scale")
    if scale is None:
        return
    _check_weights_scale(op, f"{w_name}_scale", w_scale, getattr(call, w_name))
    check_rank(op, "x_scale", scale, 2)
    if block_scaled(w_scale):
        sizes = (x.shape[0], -(-x.shape[1] // 128))
        check_shape(op, "x_scale", scale, sizes, "[rows of x, columns / 128]")
    else:
        sizes = (1 if scale.shape[0] == 1 else x.shape[0], 1)
        check_shape(op, "x_scale", scale, sizes, "[rows of x, 1] or [1, 1]")


def _check_fused(call: Call) -> None:
    for name in ("w_up", "w_down"):
        scale = getattr(call, f"{name}_scale")
        if scale is not None:
            _check_weights_scale("fused_moe", f"{name}_scale", scale, getattr(call, name))


def _check_up(call: Call) -> None:
    if call.w_up.shape[1] % 2:
        raise ValueError(
            f"moe_up: `w_up` must have two halves of rows, got {list(call.w_up.shape)}"
        )
    _check_half_scales("moe_up", call, "w_up")


def _check_down(call: Call) -> None:
    _check_half_scales("moe_down", call, "w_down")


def _scale(name: str) -> Tensor:
    return Tensor(name, "*", "float32", optional=True)


def _blocks(call: Call) -> int | None:
    if not isinstance(call.block_size, int) or call.block_size < 1:
        return None  # the check of block_size comes later
    return -(-call.sorted_token_ids.shape[0] // call.block_size)  # type: ignore[no-any-return]


_ROUTING = (
    Tensor("sorted_token_ids", "slots", "int32"),
    Tensor("expert_ids", "blocks", "int32", shape_text="[slots / block_size]"),
    Tensor("num_tokens_post_padded", "1", "int32"),
)
_ACTIVATION = Str("activation", "silu", choices=ACTIVATIONS)

# Roundings to bfloat16, 2**-9 each: between the halves, of each expert's output, of the sum. Sums
# that cancel have an absolute error, of values of about 1. (Float32 sums of products lose less than
# 2**-18 of their magnitudes, which are at most 30; float8 has no case.)
FUSED_MOE = Spec(
    "fused_moe",
    Tensor("x", "T H", HALVES, strided=True, dtype_with=("w_up_scale", "bfloat16")),
    Tensor(
        "w_up",
        "E 2I H",
        "x",
        strided=True,
        dtype_with=("w_up_scale", FLOAT8),
        shape_text="[E, 2 * I, H]",
    ),
    Tensor("w_down", "E H I", "x", strided=True, dtype_with=("w_down_scale", FLOAT8)),
    Tensor("topk_weights", "T k", "float32"),
    Tensor("topk_ids", "T k", INDICES),
    _ACTIVATION,
    Tensor("expert_map", "global_experts", "int32", optional=True),
    _scale("w_up_scale"),
    _scale("w_down_scale"),
    results=[Tensor("out", "T H", "x", rtol=1.6e-2, atol=1.6e-2)],
    dims={"2I": lambda call: 2 * call.w_down.shape[2] if call.w_down.dim() == 3 else None},
    check=_check_fused,
    together=("w_up_scale", "w_down_scale"),
    limits="H and I multiples of 8 (float8: 16; with block scales: 128), 16-byte aligned rows",
    numerics=Numerics(
        2**-8,
        of="terms",
        sums="two products and the sum over a token's experts in order; what is "
        "between them is rounded",
        batch_invariant=False,
        varies="the tiles, which are chosen by the number of tokens",
    ),
)

# fused_moe where a gradient is wanted, with what the backward needs: the first product's rows, in
# the order of their experts; the row of each id, -1 for one that is no expert's; and where experts'
# rows begin.
_ELEMENTS = {
    "elements": lambda call: call.topk_ids.shape[0] * call.topk_ids.shape[1],
    "E+1": lambda call: call.w_down.shape[0] + 1,
}
_SAVED = (
    Tensor("pre", "elements 2I", "x", shape_text="[T * k, 2 * I]"),
    Tensor("places", "T k", "int32"),
    Tensor("offsets", "E+1", "int32", shape_text="[E + 1]"),
)
FUSED_MOE_WITH_GRADIENT = FUSED_MOE.without("w_up_scale", "w_down_scale").changed(
    name="fused_moe_with_gradient",
    results=[*FUSED_MOE.results, *_SAVED],
    dims={**FUSED_MOE.dims, **_ELEMENTS},
    check=None,
    together=(),
    gradient_of="fused_moe",
)

GRADIENTS = ("x", "w_up", "w_down", "topk_weights")


def _gradient(of: str) -> Tensor:
    """The gradient of an argument; it has no elements where none is wanted."""

    def shape(call: Call) -> tuple[int, ...]:
        return tuple(getattr(call, of).shape) if getattr(call, f"for_{of}") else (0,)

    dtype = "float32" if of == "topk_weights" else "x"
    return Tensor(f"grad_{of}", "*", dtype, shape=shape)


_X, _W_UP, _W_DOWN, _WEIGHTS, _IDS, _, _MAP = FUSED_MOE_WITH_GRADIENT.arguments

# Its gradients. What the forward saved is made again if it is not given. With `overwrites_pre`
# the memory of `pre` is used for its gradient: for callers that need it no more.
FUSED_MOE_BACKWARD = FUSED_MOE_WITH_GRADIENT.changed(
    name="fused_moe_backward",
    arguments=(
        _X,
        Tensor("grad", "T H", "x", strided=True),
        _W_UP,
        _W_DOWN,
        _WEIGHTS,
        _IDS,
        *(replace(tensor, optional=True) for tensor in _SAVED),
        _ACTIVATION,
        _MAP,
        *(Bool(f"for_{name}", True) for name in GRADIENTS),
        Bool("overwrites_pre", False),
    ),
    results=[_gradient(name) for name in GRADIENTS],
    together=("pre", "places", "offsets"),
)

MOE_UP = Spec(
    "moe_up",
    Tensor("x", "T H", HALVES, strided=True, dtype_with=("x_scale", FLOAT8)),
    Tensor("w_up", "E 2I H", "x", strided=True, shape_text="[E, rows, columns of x]"),
    *_ROUTING,
    Int("top_k", at_least=1),
    Int("block_size", at_least=1),
    _ACTIVATION,
    _scale("x_scale"),
    _scale("w_up_scale"),
    results=[
        Tensor("out", "elements I", "x", dtype_with=("x_scale", "bfloat16"), rtol=8e-3, atol=4e-3)
    ],
    dims={
        "blocks": _blocks,
        "elements": lambda call: call.x.shape[0] * call.top_k,
        "I": lambda call: call.w_up.shape[1] // 2,
    },
    check=_check_up,
    together=("x_scale", "w_up_scale"),
    limits="as `fused_moe`",
    numerics=Numerics(
        2**-13,
        of="terms",
        sums="K in order, in float32 on tensor cores",
        batch_invariant=False,
        varies="the tiles, which are chosen by the number of tokens",
    ),
)

MOE_DOWN = Spec(
    "moe_down",
    Tensor("x", "elements I", HALVES, strided=True, dtype_with=("x_scale", FLOAT8)),
    Tensor("w_down", "E H I", "x", strided=True, shape_text="[E, rows, columns of x]"),
    Tensor("topk_weights", "elements", "float32", shape_text="[T * k]"),
    *_ROUTING,
    Int("block_size", at_least=1),
    _scale("x_scale"),
    _scale("w_down_scale"),
    results=[
        Tensor("out", "elements H", "x", dtype_with=("x_scale", "bfloat16"), rtol=8e-3, atol=4e-3)
    ],
    dims={"blocks": _blocks},
    check=_check_down,
    together=("x_scale", "w_down_scale"),
    limits="as `fused_moe`",
    numerics=Numerics(
        2**-13,
        of="terms",
        sums="K in order, in float32 on tensor cores",
        batch_invariant=False,
        varies="the tiles, which are chosen by the number of tokens",
    ),
)


def _check_offsets(call: Call) -> None:
    if call.offsets.shape[0] < 1:
        raise ValueError("grouped_gemm_backward: `offsets` must have at least 1 element, got 0")


_OFFSETS = Tensor("offsets", "E+1", INDICES, shape_text="[E + 1]")
_OFFSETS_DIM = {"E+1": lambda call: call.w.shape[0] + 1}

GROUPED_GEMM = Spec(
    "grouped_gemm",
    Tensor("x", "M K", HALVES, strided=True),
    Tensor("w", "E N K", "x", strided=True),
    _OFFSETS,
    results=[Tensor("out", "M N", "x", rtol=8e-3, atol=4e-3)],
    dims=_OFFSETS_DIM,
    limits="up to 512 groups; K and N multiples of 8 (float8 with block scales: K of 16), "
    "16-byte aligned rows",
    numerics=Numerics(
        2**-13,
        of="terms",
        sums="K in order, in float32 on tensor cores",
        batch_invariant=False,
        varies="the tiles, which are chosen by the shape",
    ),
)

_K_BLOCKS = {"K_blocks": lambda call: -(-call.x.shape[-1] // 128)}
_N_BLOCKS = {"N_blocks": lambda call: -(-call.w.shape[1] // 128)}
_FP8_WEIGHTS = (
    Tensor("w", "E N K", FLOAT8, strided=True),
    Tensor(
        "w_scale", "E N_blocks K_blocks", "float32", shape_text="[E, N / 128, K / 128], rounded up"
    ),
)
_EXPECTED_ROWS = Int("expected_rows", 0, at_least=0)
# One rounding to bfloat16; and the tensor cores' adders, for each 128 of K alone: see FP8_LINEAR.
_FP8_RESULT: dict[str, Any] = {"dtypes": "bfloat16", "rtol": 8e-3, "atol": 1e-6, "of_sums": 2**-11}

# grouped_gemm of float8 rows and matrices with scales of blocks.
GROUPED_GEMM_FP8 = Spec(
    "grouped_gemm_fp8",
    Tensor("x", "M K", FLOAT8, strided=True),
    _FP8_WEIGHTS[0],
    Tensor("x_scale", "M K_blocks", "float32", strided=True, shape_text="[M, K / 128], rounded up"),
    _FP8_WEIGHTS[1],
    _OFFSETS,
    _EXPECTED_ROWS,
    results=[Tensor("out", "M N", **_FP8_RESULT)],
    dims={**_OFFSETS_DIM, **_K_BLOCKS, **_N_BLOCKS},
    gradient_of="grouped_gemm",
)

# The masked layout: each group has C rows of memory, and counts say how many of them are used.
GROUPED_GEMM_MASKED = Spec(
    "grouped_gemm_masked",
    Tensor("x", "E C K", FLOAT8, strided=True),
    _FP8_WEIGHTS[0],
    Tensor(
        "x_scale",
        "E C K_blocks",
        "float32",
        strided=True,
        shape_text="[E, C, K / 128], rounded up",
    ),
    _FP8_WEIGHTS[1],
    Tensor("counts", "E", INDICES),
    _EXPECTED_ROWS,
    results=[Tensor("out", "E C N", **_FP8_RESULT)],
    dims={**_K_BLOCKS, **_N_BLOCKS},
    gradient_of="grouped_gemm",
)

# The gradient of x: grad[rows] @ w[e].
GROUPED_GEMM_BACKWARD_X = Spec(
    "grouped_gemm_backward_x",
    Tensor("grad", "M N", HALVES, strided=True),
    Tensor("w", "E N K", "grad", strided=True),
    _OFFSETS,
    results=[Tensor("grad_x", "M K", "grad")],
    dims=_OFFSETS_DIM,
    public="grouped_gemm_backward",
)

# The gradient of w: grad[rows].T @ x[rows].
GROUPED_GEMM_BACKWARD_WEIGHT = Spec(
    "grouped_gemm_backward_weight",
    Tensor("grad", "M N", HALVES, strided=True),
    Tensor("x", "M K", "grad", strided=True),
    Tensor("offsets", "bounds", INDICES, shape_text="[E + 1]"),
    results=[Tensor("grad_weight", "E N K", "grad")],
    dims={"E": lambda call: call.offsets.shape[0] - 1},
    check=_check_offsets,
    public="grouped_gemm_backward",
)


# In the order of W4MoeActivation in w4_moe.h.
W4_ACTIVATIONS = ("silu", "silu_residual", "gelu", "relu", "relu_squared")

_W4_SCALES = {"nvfp4": "float8_e4m3fn", "mxfp4": "uint8"}
_W4_CODES = ("uint8", "float4_e2m1fn_x2")


def _check_w4_half(call: Call, half: str, columns: int) -> None:
    weight, scale = getattr(call, f"w_{half}"), getattr(call, f"w_{half}_scale")
    zeros = getattr(call, f"{half}_zero_point")
    name, got = f"w_{half}_scale", list(scale.shape)
    dtype = str(scale.dtype).removeprefix("torch.")
    of_result = "bfloat16" if call.x_scale is not None else str(call.x.dtype)
    due = _W4_SCALES.get(call.format, of_result.removeprefix("torch."))
    if dtype != due:
        raise TypeError(f"w4_moe: `{name}` must have dtype {due}, got {dtype}")
    experts, rows, _ = weight.shape
    if call.format != "int4":
        group = 16 if call.format == "nvfp4" else 32
        if got != [experts, rows, columns // group]:
            raise ValueError(
                f"w4_moe: `{name}` must have shape [E, N, K / {group}] = "
                f"{[experts, rows, columns // group]}, got {got}"
            )
        if zeros is not None:
            raise ValueError(f"w4_moe: `{half}_zero_point` is for int4 only")
        return
    fits = len(got) == 3 and got[:2] == [experts, rows]
    if not fits or columns not in [group * got[2] for group in GROUPS]:
        raise ValueError(
            f"w4_moe: `{name}` must have shape [E, N, K / group] with a group of 32, 64 or 128, "
            f"got {got}"
        )
    if zeros is not None and list(zeros.shape) != got:
        raise ValueError(
            f"w4_moe: `{half}_zero_point` must have shape as `{name}` = {got}, "
            f"got {list(zeros.shape)}"
        )


def _check_x_scale(call: Call) -> None:
    if call.format == "nvfp4":
        raise ValueError(
            "w4_moe: `format` must be 'mxfp4' or 'int4' where `x` is float8_e4m3fn, got 'nvfp4'"
        )
    tokens = call.x.shape[0]
    if call.x_scale.numel() not in (1, tokens):
        raise ValueError(
            f"w4_moe: `x_scale` must have 1 or T = {tokens} elements, got shape "
            f"{list(call.x_scale.shape)}"
        )


def _check_w4(call: Call) -> None:
    if call.x_scale is not None:
        _check_x_scale(call)
    hidden, inner = call.x.shape[1], 2 * call.w_down.shape[2]
    unit = 16 if call.format == "nvfp4" else 32
    for name, size in (("x", hidden), ("w_down", inner)):
        if size % unit:
            raise ValueError(
                f"w4_moe: `{name}` must have a multiple of {unit} values a row, got {size}"
            )
    rows = call.w_up.shape[1]
    due = inner if call.activation == "relu_squared" else 2 * inner
    if rows != due:
        raise ValueError(
            f"w4_moe: `w_up` must have {due} rows an expert, for `w_down` and the activation "
            f"{call.activation!r}, got {rows}"
        )
    _check_w4_half(call, "up", hidden)
    _check_w4_half(call, "down", inner)


def _optional(name: str, dims: str, dtype: str, **more: Any) -> Tensor:
    return Tensor(name, dims, dtype, optional=True, **more)


# Roundings: between the halves, of each expert's output, of the sum; int4's weights, too.
W4_MOE = Spec(
    "w4_moe",
    Tensor("x", "T H", HALVES, strided=True, dtype_with=("x_scale", FLOAT8)),
    Tensor("w_up", "E N H/2", _W4_CODES, strided=True),
    Tensor("w_up_scale", "*", ("uint8", "float8_e4m3fn", *HALVES)),
    Tensor("w_down", "E H I/2", _W4_CODES, strided=True),
    Tensor("w_down_scale", "*", ("uint8", "float8_e4m3fn", *HALVES)),
    Tensor("topk_weights", "T k", "float32"),
    Tensor("topk_ids", "T k", INDICES),
    Str("format", "mxfp4", choices=FORMATS),
    _optional("up_bias", "E N", "x", dtype_with=("x_scale", "bfloat16")),
    _optional("down_bias", "E H", "x", dtype_with=("x_scale", "bfloat16")),
    Str("activation", "silu", choices=W4_ACTIVATIONS),
    Float("alpha", 1.0, at_least=0),
    Float("limit", 0.0, at_least=0),
    Bool("interleaved", False),
    _optional("expert_map", "global_experts", "int32"),
    _optional("up_zero_point", "*", "x", dtype_with=("x_scale", "bfloat16")),
    _optional("down_zero_point", "*", "x", dtype_with=("x_scale", "bfloat16")),
    _optional("up_global_scale", "E", "float32"),
    _optional("down_global_scale", "E", "float32"),
    _optional("x_scale", "*", "float32"),
    results=[
        Tensor("out", "T H", "x", dtype_with=("x_scale", "bfloat16"), rtol=1.6e-2, atol=1.6e-2)
    ],
    check=_check_w4,
    limits="H and I multiples of 64; MXFP4 with bfloat16 or float8",
    numerics=Numerics(
        2**-8,
        of="terms",
        sums="two products and the sum over a token's experts in order; what is "
        "between them is rounded, and of float8 `x` quantised by row",
        batch_invariant=False,
        varies="the tiles, and the split of K, which are chosen by the number of tokens",
    ),
)
