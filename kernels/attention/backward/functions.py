# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention's backward that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap

from kernels.attention.backward.kernel import AttentionBackward
from kernels.attention.backward.narrow import AttentionBackwardNarrow
from kernels.attention.backward.problem import BackwardProblem
from kernels.attention.backward.sequences import POINTERS, SIZES
from kernels.attention.backward.wide import AttentionBackwardWide
from kernels.attention.common.layouts import PIECE, ROWS

_DTYPES = {"bf16": (cutlass.BFloat16, "kBFloat16"), "fp16": (cutlass.Float16, "kFloat16")}

# Head dimension, queries per step. Tiles have 64 columns or a multiple; only products over the head
# dimension have fewer.
_TILES = ((64, 128), (96, 64), (128, 64))

# Tiles for packed sequences; with softcap the last one serves any head dimension.
_PACKED_TILES = (_TILES[0], _TILES[2])

# Keys of 192 columns, values of 128, in bfloat16 without a cap.
_NARROW_TILE, _NARROW_VALUES = (192, 64), 128

# Up to 256 columns of both: one kernel, packed or not, with and without a cap.
_WIDE_TILE = (256, 64)

_ONE = 0x3F800000
_REST = {"scale": _ONE, "slope": _ONE, "gain": _ONE, "left": 5, "right": 0, "room": 9}


def _problem(band, descending, blocks, **sizes):
    return {**sizes, **_REST, "band": band, "descending": descending, "blocks": blocks}


_PROBLEMS = (
    _problem(3, 0, 28, batch=2, seq_q=1000, seq_k=777, heads=8, kv_heads=2),
    _problem(1, 1, 1, batch=1, seq_q=64, seq_k=128, heads=1, kv_heads=1),
    _problem(4, 0, 3, batch=3, seq_q=1, seq_k=1, heads=2, kv_heads=1),
)


def function(dtype, tile, capped=False, packed=False, d_v=None, kind=AttentionBackward):
    element = _DTYPES[dtype][0]
    columns, tile_m = tile
    d = (columns + PIECE - 1) // PIECE * PIECE
    name = f"attention_backward_{dtype}_d{columns}" + (f"v{d_v}" if d_v else "")
    wide = kind is AttentionBackwardWide
    name += f"_{tile_m}x{kind.tile_n}" + ("_capped" if capped else "")
    name += "_packed" if packed and not wide else ""
    kernel = kind(name, element, d, tile_m, capped, columns, packed, d_v)
    tensors = {name: Pointer(name, element) for name in ("q", "k", "v", "do", "dk", "dv")}
    floats = [Pointer(name, cutlass.Float32) for name in ("stats", "dq")]
    pointers = [*floats, *(Pointer(name, cutlass.Int32, align=4) for name in ("turns", "counter"))]
    scalars = BackwardProblem(*map(Scalar, BackwardProblem._fields))
    outer = ("batch", 2) if packed else ("batch",)
    lists = tuple(Pointer(name, cutlass.Int32) for name in POINTERS) if packed else None
    sizes = tuple(map(Scalar, SIZES)) if packed else None

    def tensor_map(name, heads, rows, columns, tile_rows):
        box = (*(1,) * (len(outer) + 1), tile_rows, PIECE)
        return TensorMap(name, (*outer, heads, rows, columns), box)

    launch = Launch(
        parameters=(
            tensor_map("q", "heads", "seq_q", d, tile_m),
            tensor_map("k", "kv_heads", "seq_k", d, kernel.tile_n),
            tensor_map("v", "kv_heads", "seq_k", kernel.d_v, kernel.tile_n),
            tensor_map("do", "heads", "seq_q", kernel.d_v, tile_m),
            tensor_map("dk", "kv_heads", "seq_k", d, ROWS),
            tensor_map("dv", "kv_heads", "seq_k", kernel.d_v, ROWS),
            *(*pointers, *(lists or ())),
            *(*scalars, *(sizes or ())),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = (
        f"DType::{_DTYPES[dtype][1]}",
        *map(str, (columns, d_v or columns, d, kernel.d_v, tile_m, kernel.tile_n)),
        *(str(value).lower() for value in (not capped, capped or wide, not packed or wide, packed)),
    )
    arguments = (*tensors.values(), *pointers, lists, scalars, sizes, Scalar("blocks"))
    return Function(name, kernel, arguments, (launch,), attributes, _PROBLEMS)


def functions():
    built = [
        function(dtype, tile, capped)
        for dtype in _DTYPES
        for tile in _TILES
        for capped in (False, True)
    ]
    built += [
        function(dtype, tile, capped, packed=True)
        for dtype in _DTYPES
        for tile in _PACKED_TILES
        for capped in (False, True)
        if not capped or tile == _PACKED_TILES[-1]
    ]
    built += [
        function("bf16", _NARROW_TILE, False, packed, _NARROW_VALUES, AttentionBackwardNarrow)
        for packed in (False, True)
    ]
    built += [
        function(dtype, _WIDE_TILE, packed=True, kind=AttentionBackwardWide) for dtype in _DTYPES
    ]
    return built
