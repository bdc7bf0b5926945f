# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention with e4m3 inputs that are compiled ahead of time."""

import cutlass
from attention_fp8_launch_cute import AttentionFp8, AttentionFp8Packed
from attention_fp8_steps_cute import swizzle
from attention_layouts_cute import PIECE, ROWS
from attention_packed_cute import SCALARS
from attention_problems_cute import MASKS, PROBLEMS, REST
from declaration import Function, Launch, Pointer, Scalar, TensorMap

_FP8 = cutlass.Float8E4M3FN

_HELD = {"held": True, "turns": False}
_HALF = {"held": "half", "turns": False}

# Head dimension, warpgroups, keys a block, stages of k and v, of q, and pieces of o; options of
# AttentionFp8Steps without a mask, and with one: what was fastest of all.
_TILES = {
    (64, 3, 96, 3, 2, 1): ({}, {}),
    (64, 2, 128, 3, 2, 1): (_HELD, _HELD | {"ones": False}),
    (96, 2, 128, 3, 2, 2): (_HALF, _HALF),
    (128, 2, 128, 3, 2, 2): (_HALF, _HELD),
}
_PACKED_TILES = [tile for tile in _TILES if tile[0] != 96]


def function(tile, mask, capped=False, packed=False):
    d, warpgroups, tile_n, stages, q_stages, o_stages = tile
    name = f"attention_fp8_d{d}_{ROWS * warpgroups}x{tile_n}"
    name += ("" if mask == "none" else f"_{mask}") + ("_capped" if capped else "")
    name += "_packed" if packed else ""
    columns, d = d, (d + PIECE - 1) // PIECE * PIECE
    options = {"stages": stages, "q_stages": q_stages, "o_stages": o_stages, "columns": columns}
    options |= {"as_integers": not capped} | _TILES[tile][mask != "none"]
    if packed and d == 128 and mask != "none":
        options["turns"] = True  # without, these spill
    made = AttentionFp8Packed if packed else AttentionFp8
    kernel = made(name, _FP8, d, warpgroups, tile_n, mask, capped, **options)
    q, k, v = (Pointer(name, _FP8) for name in ("q", "k", "v"))
    o = Pointer("o", cutlass.BFloat16)
    floats = [Pointer(name, cutlass.Float32, align=4) for name in ("lse", "factors")]
    starts = [Pointer(name, cutlass.Int32, align=4) for name in ("starts_q", "starts_k") if packed]
    passed = (*starts, o) if packed else ()
    names = ("batch", "seq_q", "seq_k", "heads", "kv_heads", *REST, "band")
    names += (*SCALARS, "blocks") if packed else ("blocks",)
    scalars = [Scalar(name) for name in names]
    outer = ("batch", 2) if packed else ("batch",)
    ones = (1,) * (len(outer) + 1)
    row_bytes = swizzle(kernel.tile_columns)
    v_columns = f"(seq_k + {tile_n - 1}) // {tile_n} * {kernel.tile_columns}"
    v_shape = ("batch", "kv_heads", d, v_columns)
    launch = Launch(
        parameters=(
            TensorMap("q", (*outer, "heads", "seq_q", d), (*ones, kernel.tile_m, d), f"{d}B"),
            TensorMap("k", (*outer, "kv_heads", "seq_k", d), (*ones, tile_n, d), f"{d}B"),
            TensorMap("v", v_shape, (1, 1, d, row_bytes), f"{row_bytes}B"),
            TensorMap("o", (*outer, "heads", "seq_q", d), (*ones, ROWS, PIECE)),
            *(*floats, *passed, *scalars[:-1]),
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
        str(packed).lower(),
    )
    return Function(
        name, kernel, (q, k, v, o, *floats, *starts, *scalars), (launch,), attributes, PROBLEMS
    )


def functions():
    built = []
    for tile in _TILES:
        built += [function(tile, mask) for mask in MASKS]
        if tile[1] == 2:
            built.append(function(tile, "window", capped=True))
    return built + [function(tile, mask, packed=True) for tile in _PACKED_TILES for mask in MASKS]
