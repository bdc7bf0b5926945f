# SPDX-License-Identifier: Apache-2.0
"""The declaration of w4_moe."""

from __future__ import annotations

from typing import Any

from tiercel.core.spec import HALVES, INDICES, Bool, Call, Float, Numerics, Spec, Str, Tensor
from tiercel.ops.gemv.spec import FORMATS, GROUPS

# In the order of W4MoeActivation in w4_moe.h.
ACTIVATIONS = ("silu", "silu_residual", "gelu", "relu", "relu_squared")

_SCALES = {"nvfp4": "float8_e4m3fn", "mxfp4": "uint8"}
_CODES = ("uint8", "float4_e2m1fn_x2")


def _check_half(call: Call, half: str, columns: int) -> None:
    weight, scale = getattr(call, f"w_{half}"), getattr(call, f"w_{half}_scale")
    zeros = getattr(call, f"{half}_zero_point")
    name, got = f"w_{half}_scale", list(scale.shape)
    dtype = str(scale.dtype).removeprefix("torch.")
    due = _SCALES.get(call.format, str(call.x.dtype).removeprefix("torch."))
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


def _check(call: Call) -> None:
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
    _check_half(call, "up", hidden)
    _check_half(call, "down", inner)


def _optional(name: str, dims: str, dtype: str, **more: Any) -> Tensor:
    return Tensor(name, dims, dtype, optional=True, **more)


# Roundings: between the halves, of each expert's output, of the sum; int4's weights, too.
W4_MOE = Spec(
    "w4_moe",
    Tensor("x", "T H", HALVES, strided=True),
    Tensor("w_up", "E N H/2", _CODES, strided=True),
    Tensor("w_up_scale", "*", ("uint8", "float8_e4m3fn", *HALVES)),
    Tensor("w_down", "E H I/2", _CODES, strided=True),
    Tensor("w_down_scale", "*", ("uint8", "float8_e4m3fn", *HALVES)),
    Tensor("topk_weights", "T k", "float32"),
    Tensor("topk_ids", "T k", INDICES),
    Str("format", "mxfp4", choices=FORMATS),
    _optional("up_bias", "E N", "x"),
    _optional("down_bias", "E H", "x"),
    Str("activation", "silu", choices=ACTIVATIONS),
    Float("alpha", 1.0, at_least=0),
    Float("limit", 0.0, at_least=0),
    Bool("interleaved", False),
    _optional("expert_map", "global_experts", "int32"),
    _optional("up_zero_point", "*", "x"),
    _optional("down_zero_point", "*", "x"),
    _optional("up_global_scale", "E", "float32"),
    _optional("down_global_scale", "E", "float32"),
    results=[Tensor("out", "T H", "x", rtol=1.6e-2, atol=1.6e-2)],
    check=_check,
    limits="H and I multiples of 64; MXFP4 with bfloat16",
    numerics=Numerics(
        2**-8,
        of="terms",
        sums="two products and the sum over a token's experts in order; what is "
        "between them is rounded",
        batch_invariant=False,
        varies="the tiles, which are chosen by the number of tokens",
    ),
)
