# SPDX-License-Identifier: Apache-2.0
"""The declaration of copy_transpose."""

from __future__ import annotations

from tiercel.core.spec import Call, Int, Numerics, Spec, Tensor

_DTYPES = (
    *("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "bool", "int16", "int32"),
)
TILES = (32, 64, 128)


def _check(call: Call) -> None:
    x, tile_size = call.x, call.tile_size
    if x.dim() not in (2, 3):
        raise ValueError(
            f"copy_transpose: `x` must have 2 or 3 dimensions, got {x.dim()} "
            f"(shape {list(x.shape)})"
        )
    if tile_size is not None and tile_size not in TILES:
        raise ValueError(f"copy_transpose: `tile_size` must be 32, 64 or 128, got {tile_size}")


COPY_TRANSPOSE = Spec(
    "copy_transpose",
    Tensor("x", "... M N", _DTYPES, strided=True),
    Int("tile_size", None, optional=True),
    results=[Tensor("out", "... N M", "x")],
    check=_check,
    numerics=Numerics(0),
)
