# SPDX-License-Identifier: Apache-2.0
"""The declarations of nvfp4_gemv, nvfp4_linear and w4_linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel.core.spec import HALVES, Call, Numerics, Spec, Str, Tensor

_CODES, _SCALES = "float4_e2m1fn_x2", "float8_e4m3fn"


def _permuted_shape(rows: str) -> Callable[[Call], tuple[int, ...]]:
    def shape(call: Call) -> tuple[int, ...]:
        _, in_bytes, batches = call.a.shape
        down = -(-getattr(call, rows).shape[0] // 128)
        return (32, 4, down, 4, -(-in_bytes // 32), batches)

    return shape


def _permuted(name: str, rows: str) -> Tensor:
    """Scales in atoms of 128 rows by 4 groups; its rows are those of the argument `rows`."""
    down = "ceil(m / 128)" if rows == "a" else "1"
    return Tensor(
        *(name, "*", _SCALES),
        strided=True,
        shape=_permuted_shape(rows),
        shape_text=f"[32, 4, {down}, 4, ceil(k / 64), l]",
    )


def _check_strides(name: str, tensor: Any) -> None:
    _, _, down, _, along, batches = tensor.shape
    due = (16, 4, 512 * along, 1, 512, 512 * along * down)
    sizes = zip(tensor.shape, tensor.stride(), due, strict=True)
    if down * along * batches and any(n > 1 and a != b for n, a, b in sizes):
        raise ValueError(
            f"nvfp4_gemv: `{name}` must have the strides of the permuted layout, {list(due)}, "
            f"got {list(tensor.stride())}"
        )


def _check_gemv(call: Call) -> None:
    in_bytes = call.a.shape[1]
    if in_bytes % 8:
        raise ValueError(
            "nvfp4_gemv: `a` must have a multiple of 16 values along K, 8 bytes, "
            f"got {in_bytes} bytes (shape {list(call.a.shape)})"
        )
    _check_strides("scale_a_permuted", call.scale_a_permuted)
    _check_strides("scale_b_permuted", call.scale_b_permuted)


# k counts values; two lie in one byte, so that torch's shapes show k / 2.
NVFP4_GEMV = Spec(
    "nvfp4_gemv",
    Tensor("a", "m k/2 l", _CODES, strided=True),
    Tensor("b", "1 k/2 l", _CODES, strided=True),
    Tensor("scale_a", "m k/16 l", _SCALES, strided=True, on_cpu=True),
    Tensor("scale_b", "1 k/16 l", _SCALES, strided=True, on_cpu=True),
    _permuted("scale_a_permuted", "a"),
    _permuted("scale_b_permuted", "b"),
    Tensor("c", "m 1 l", "float16", strided=True, written=True),
    dims={"k": lambda call: 2 * call.a.shape[1] if call.a.dim() == 3 else None},
    check=_check_gemv,
    limits="k a multiple of 32, up to 131072",
    numerics=Numerics(
        4e-6,
        of="terms",
        sums="float32: lanes, then warps",
        batch_invariant=False,
        varies="the tuned shape, which is chosen by the sizes",
    ),
)


def _check_linear(call: Call) -> None:
    if call.x.shape[1] % 16:
        shape = list(call.x.shape)
        raise ValueError(f"nvfp4_linear: `x` must have a multiple of 16 columns, got {shape}")


NVFP4_LINEAR = Spec(
    "nvfp4_linear",
    Tensor("x", "T K", "bfloat16", strided=True),
    Tensor("weight", "N K/2", _CODES, strided=True),
    Tensor("scale", "N K/16", _SCALES, strided=True),
    Tensor("global_scale", "1", "float32", strided=True, optional=True),
    # Weights may be rounded to bfloat16 with their scale, the result is.
    results=[Tensor("out", "T N", "bfloat16", rtol=8e-3, atol=5e-2)],
    check=_check_linear,
    limits="K a multiple of 64",
    numerics=Numerics(
        2**-8,
        of="terms",
        sums="float32; weights times their scale in bfloat16",
        batch_invariant=False,
        varies="the tuned shape, which is chosen by the number of tokens",
    ),
)


# In the order of the C++ enumerations.
FORMATS = ("nvfp4", "mxfp4", "int4")
ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh", "relu_squared")
GROUPS = (32, 64, 128)  # of int4


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_x_scale(call: Call) -> None:
    if call.format == "nvfp4":
        raise ValueError(
            "w4_linear: `format` must be 'mxfp4' or 'int4' where `x` is float8_e4m3fn, got 'nvfp4'"
        )
    tokens = call.x.shape[0]
    if call.x_scale.numel() not in (1, tokens):
        raise ValueError(
            f"w4_linear: `x_scale` must have 1 or T = {tokens} elements, got shape "
            f"{list(call.x_scale.shape)}"
        )


def _check_w4(call: Call) -> None:
    if call.x_scale is not None:
        _check_x_scale(call)
    features, k = call.weight.shape[0], call.x.shape[1]
    group = 16 if call.format == "nvfp4" else 32
    if k % group:
        raise ValueError(
            f"w4_linear: `x` must have a multiple of {group} columns, got {list(call.x.shape)}"
        )
    got = list(call.scale.shape)
    scale = call.scale
    dtype = _dtype_name(scale)
    halves = HALVES if call.x_scale is not None else (_dtype_name(call.x),)
    due = {"nvfp4": (_SCALES,), "mxfp4": ("uint8",), "int4": halves}[call.format]
    if dtype not in due:
        raise TypeError(f"w4_linear: `scale` must have dtype {' or '.join(due)}, got {dtype}")
    if call.format != "int4":
        if got != [features, k // group]:
            raise ValueError(
                f"w4_linear: `scale` must have shape [N, K / {group}] = "
                f"{[features, k // group]}, got {got}"
            )
        if call.zero_point is not None:
            raise ValueError("w4_linear: `zero_point` is for int4 only")
        return
    if len(got) != 2 or got[0] != features or k not in [g * got[1] for g in GROUPS]:
        raise ValueError(
            "w4_linear: `scale` must have shape [N, K / group] with a group of 32, 64 or 128, "
            f"got {got}"
        )
    if call.zero_point is None:
        return
    if _dtype_name(call.zero_point) != dtype:
        raise TypeError(
            f"w4_linear: `zero_point` must have dtype {dtype}, got {_dtype_name(call.zero_point)}"
        )
    if list(call.zero_point.shape) != got:
        raise ValueError(
            f"w4_linear: `zero_point` must have shape as `scale` = {got}, "
            f"got {list(call.zero_point.shape)}"
        )


W4_LINEAR = Spec(
    "w4_linear",
    Tensor("x", "T K", HALVES, strided=True, dtype_with=("x_scale", _SCALES)),
    Tensor("weight", "N K/2", ("uint8", _CODES), strided=True),
    Tensor("scale", "*", ("uint8", _SCALES, *HALVES), strided=True),
    Str("format", "mxfp4", choices=FORMATS),
    Tensor("zero_point", "*", HALVES, strided=True, optional=True),
    Tensor("global_scale", "1", "float32", strided=True, optional=True),
    Tensor("bias", "N", "x", optional=True, dtype_with=("x_scale", "bfloat16")),
    Str("activation", "none", choices=ACTIVATIONS),
    Tensor("x_scale", "*", "float32", optional=True),
    # int4's values times their scale are rounded to x's dtype, and the result is. Of float8 x, the
    # adder's bits and those of MXFP4's small scales are lost instead.
    results=[
        Tensor(
            *("out", "T N", "x"),
            dtype_with=("x_scale", "bfloat16"),
            rtol=8e-3,
            atol=1e-3,
            of_sums=2**-9,
        )
    ],
    check=_check_w4,
    limits="K a multiple of 64; MXFP4 with bfloat16 or float8",
    numerics=Numerics(
        2**-9,
        of="terms",
        sums="float32; int4's weights times their scale in the dtype of `x`. Of float8 `x`, as the "
        "tensor cores sum float8: int4's groups, which are scaled and added in float32, and "
        "MXFP4's rows",
        batch_invariant=False,
        varies="the kernel, and the split of K, which are chosen by the number of tokens",
    ),
)
