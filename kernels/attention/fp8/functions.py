# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention with e4m3 inputs that are compiled ahead of time."""

import cutlass
from declaration import Pointer, TensorMap

from kernels.attention.common.layouts import swizzle_bytes
from kernels.attention.common.problem import MASKS
from kernels.attention.forward.functions import declare, name_of, variant_of
from kernels.attention.forward.kernel import AttentionForward
from kernels.attention.fp8.operands import Fp8Operands

_HELD = {"held": True, "turns": False}
_HALF = {"held": "half", "turns": False}

# Head dimension, warpgroups, keys a block, stages of k and v, of q, and pieces of o; the fastest
# options of Fp8Operands without a mask, and with one.
_TILES = {
    (64, 3, 96, 3, 2, 1): ({}, {}),
    (64, 2, 128, 3, 2, 1): (_HELD, _HELD | {"ones": False}),
    (96, 2, 128, 3, 2, 2): (_HALF, _HALF),
    (128, 2, 128, 3, 2, 2): (_HALF, _HELD),
}
_PACKED_TILES = [tile for tile in _TILES if tile[0] != 96]


def function(tile, mask, capped=False, packed=False):
    v = variant_of(tile, mask, capped, packed)
    options = _TILES[tile][v.masked]
    if packed and v.d == 128 and v.masked:
        options = options | {"turns": True}  # without, these spill
    operands = Fp8Operands(v, **options)
    kernel = AttentionForward(name_of("fp8", v), operands, v)

    columns, tile_n = operands.tile_columns, v.tile_n
    swizzle = swizzle_bytes(columns)
    value_map = TensorMap(
        "v",
        ("batch", "kv_heads", v.d, f"(seq_k + {tile_n - 1}) // {tile_n} * {columns}"),
        (1, 1, v.d, swizzle),
        f"{swizzle}B",
    )
    attributes = tuple(map(str, (v.columns, v.d, v.tile_m, tile_n, columns)))
    factors = Pointer("factors", cutlass.Float32, align=4)
    return declare(kernel, attributes, factors, value_map)


def functions():
    built = []
    for tile in _TILES:
        built += [function(tile, mask) for mask in MASKS]
        if tile[1] == 2:
            built.append(function(tile, "window", capped=True))
    return built + [function(tile, mask, packed=True) for tile in _PACKED_TILES for mask in MASKS]
