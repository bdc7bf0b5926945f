# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention that are compiled ahead of time."""

import cutlass
from attention_launch_cute import Attention, AttentionPacked
from attention_layouts_cute import PIECE, ROWS
from attention_packed_cute import SCALARS
from attention_problems_cute import MASKS, PROBLEMS, REST
from declaration import Function, Launch, Pointer, Scalar, TensorMap

_DTYPES = {"bf16": (cutlass.BFloat16, "kBFloat16"), "fp16": (cutlass.Float16, "kFloat16")}

# Head dimension, warpgroups, keys a block, stages of k and v, of q, and pieces of o. Tiles have 64
# columns or a multiple; only products of q and k know of fewer.
_TILES = (
    (64, 3, 128, 3, 2, 1),
    (64, 2, 128, 3, 2, 1),
    (96, 2, 128, 2, 2, 2),
    (128, 2, 128, 2, 2, 2),
    (192, 2, 96, 2, 1, 1),
    (256, 2, 64, 2, 1, 1),
)
_PACKED_TILES = (_TILES[1], _TILES[3])
_NOT = ((64, 2, "none"),)  # where another tile is always better


def function(dtype, tile, mask, capped=False, packed=False):
    element = _DTYPES[dtype][0]
    d, warpgroups, tile_n, stages, q_stages, o_stages = tile
    name = f"attention_{dtype}_d{d}_{ROWS * warpgroups}x{tile_n}"
    name += ("" if mask == "none" else f"_{mask}") + ("_capped" if capped else "")
    name += "_packed" if packed else ""
    options = {"stages": stages, "q_stages": q_stages, "o_stages": o_stages}
    columns, d = d, (d + PIECE - 1) // PIECE * PIECE
    options["columns"] = columns
    kernel = (AttentionPacked if packed else Attention)(
        name, element, d, warpgroups, tile_n, mask, capped, **options
    )
    q, k, v, o = (Pointer(name, element) for name in ("q", "k", "v", "o"))
    lse = Pointer("lse", cutlass.Float32, align=4)
    starts = [Pointer(name, cutlass.Int32, align=4) for name in ("starts_q", "starts_k") if packed]
    passed = (*starts, o) if packed else ()
    names = ("batch", "seq_q", "seq_k", "heads", "kv_heads", *REST, "band")
    names += (*SCALARS, "blocks") if packed else ("blocks",)
    scalars = [Scalar(name) for name in names]
    outer = ("batch", 2) if packed else ("batch",)
    q_shape, k_shape = (*outer, "heads", "seq_q", d), (*outer, "kv_heads", "seq_k", d)
    ones = (1,) * (len(outer) + 1)
    launch = Launch(
        parameters=(
            TensorMap("q", q_shape, (*ones, kernel.tile_m, PIECE)),
            TensorMap("k", k_shape, (*ones, tile_n, PIECE)),
            TensorMap("v", k_shape, (*ones, tile_n, PIECE)),
            TensorMap("o", q_shape, (*ones, ROWS, PIECE)),
            *(lse, *passed, *scalars[:-1]),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = (
        f"DType::{_DTYPES[dtype][1]}",
        str(columns),
        str(kernel.tile_m),
        str(tile_n),
        f"AttentionMask::{MASKS[mask]}",
        str(capped).lower(),
        str(packed).lower(),
    )
    return Function(
        name, kernel, (q, k, v, o, lse, *starts, *scalars), (launch,), attributes, PROBLEMS
    )


def functions():
    built = []
    for dtype in _DTYPES:
        for tile in _TILES:
            built += [
                function(dtype, tile, mask) for mask in MASKS if (*tile[:2], mask) not in _NOT
            ]
            # A window without limits is no mask.
            if tile[1] == 2 and tile[0] != 96:
                built.append(function(dtype, tile, "window", capped=True))
    built += [
        function(dtype, tile, mask, packed=True)
        for dtype in _DTYPES
        for tile in _PACKED_TILES
        for mask in MASKS
    ]
    return built
