# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention with e4m3 inputs that are compiled ahead of time."""

import cutlass
from attention_fp8_launch_cute import AttentionFp8, swizzle
from attention_layouts_cute import PIECE, ROWS
from attention_problems_cute import MASKS, PROBLEMS, REST
from declaration import Function, Launch, Pointer, Scalar, TensorMap

_FP8 = cutlass.Float8E4M3FN

# Head dimension, warpgroups, keys a block, stages of k and v, of q, and pieces of o; how warpgroups
# keep out of each other's way without a mask, and with one: what was fastest of all four.
_TILES = {
    (64, 3, 96, 3, 2, 1): ({"turns": False}, {}),
    (64, 2, 128, 3, 2, 1): ({}, {"held": True, "turns": False}),
    (96, 2, 128, 3, 2, 2): ({}, {"held": True}),
    (128, 2, 128, 3, 2, 2): ({}, {"held": True}),
}


def function(tile, mask, capped=False):
    d, warpgroups, tile_n, stages, q_stages, o_stages = tile
    name = f"attention_fp8_d{d}_{ROWS * warpgroups}x{tile_n}"
    name += ("" if mask == "none" else f"_{mask}") + ("_capped" if capped else "")
    columns, d = d, (d + PIECE - 1) // PIECE * PIECE
    options = {"stages": stages, "q_stages": q_stages, "o_stages": o_stages, "columns": columns}
    options |= _TILES[tile][mask != "none"]
    kernel = AttentionFp8(name, _FP8, d, warpgroups, tile_n, mask, capped, **options)
    q, k, v = (Pointer(name, _FP8) for name in ("q", "k", "v"))
    o = Pointer("o", cutlass.BFloat16)
    floats = [Pointer(name, cutlass.Float32, align=4) for name in ("lse", "factors")]
    names = ("batch", "seq_q", "seq_k", "heads", "kv_heads", *REST, "band", "blocks")
    scalars = [Scalar(name) for name in names]
    launch = Launch(
        parameters=(
            TensorMap("q", ("batch", "heads", "seq_q", d), (1, 1, kernel.tile_m, d), f"{d}B"),
            TensorMap("k", ("batch", "kv_heads", "seq_k", d), (1, 1, tile_n, d), f"{d}B"),
            TensorMap(
                "v",
                (
                    "batch",
                    "kv_heads",
                    d,
                    f"(seq_k + {tile_n - 1}) // {tile_n} * {kernel.tile_columns}",
                ),
                (1, 1, d, swizzle(kernel.tile_columns)),
                f"{swizzle(kernel.tile_columns)}B",
            ),
            TensorMap("o", ("batch", "heads", "seq_q", d), (1, 1, ROWS, PIECE)),
            *(*floats, *scalars[:-1]),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = (
        str(columns),
        str(d),
        str(kernel.tile_m),
        str(tile_n),
        str(kernel.tile_columns),
        f"AttentionMask::{MASKS[mask]}",
        str(capped).lower(),
    )
    problems = [{k: v for k, v in problem.items() if k != "total_q"} for problem in PROBLEMS]
    return Function(
        name, kernel, (q, k, v, o, *floats, *scalars), (launch,), attributes, tuple(problems)
    )


def functions():
    built = []
    for tile in _TILES:
        built += [function(tile, mask) for mask in MASKS]
        if tile[1] == 2:
            built.append(function(tile, "window", capped=True))
    return built
