# SPDX-License-Identifier: Apache-2.0
"""The forward kernels of 16-bit attention that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap

from kernels.attention.common.layouts import PIECE, ROWS, swizzle_bytes
from kernels.attention.common.packed import SIZES
from kernels.attention.common.problem import CHECKED, MASKS, SCALARS
from kernels.attention.forward.kernel import AttentionForward, Variant
from kernels.attention.forward.operands import HalfOperands

_DTYPES = {"bf16": (cutlass.BFloat16, "kBFloat16"), "fp16": (cutlass.Float16, "kFloat16")}

# Head dimension, warpgroups, keys a block, stages of k and v, of q, and pieces of o. Tiles have 64
# columns or a multiple; only products of q and k have fewer.
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

# Keys of 192 columns, values of 128 (latent attention's prefill). Other values of another size than
# the keys, masks of these and float16 take a tile above, whose further columns are zeros.
_NARROW_VALUES = 128
_NARROW_TILE = (192, 2, 128, 2, 2, 1)


def variant_of(tile, mask, capped, packed, d_v=None):
    columns, *sizes = tile
    d = (columns + PIECE - 1) // PIECE * PIECE
    return Variant(d, columns, d_v or d, *sizes, mask, capped, packed)


def name_of(prefix, variant):
    columns = f"d{variant.columns}" + (f"v{variant.d_v}" if variant.d_v < variant.d else "")
    name = f"attention_{prefix}_{columns}_{variant.tile_m}x{variant.tile_n}"
    name += f"_{variant.mask}" if variant.masked else ""
    return name + ("_capped" if variant.capped else "") + ("_packed" if variant.packed else "")


def declare(kernel, attributes, factors=None, value_map=None):
    """The declaration of a kernel. FP8's has `factors`, and a map of transposed values; others have
    sinks."""
    operands, v = kernel.operands, kernel.variant
    q, k, v_, o = (
        Pointer(name, operands.out_dtype if name == "o" else operands.dtype) for name in "qkvo"
    )
    lse = Pointer("lse", cutlass.Float32, align=4)
    sinks = Pointer("sinks", cutlass.Float32, align=4) if factors is None else None
    starts = [Pointer(name, cutlass.Int32, align=4) for name in ("starts_q", "starts_k")]
    sizes = tuple(map(Scalar, SIZES))
    starts, sizes = (tuple(starts), sizes) if v.packed else (None, None)

    outer = ("batch", 2) if v.packed else ("batch",)
    swizzle = swizzle_bytes(v.d * operands.dtype.width // 8)

    def tensor_map(name, heads, rows, tile_rows, row_bytes, width, columns=v.d):
        box = (*(1,) * (len(outer) + 1), tile_rows, row_bytes * 8 // width)
        return TensorMap(name, (*outer, heads, rows, columns), box, f"{row_bytes}B")

    width = operands.dtype.width
    launch = Launch(
        parameters=(
            tensor_map("q", "heads", "seq_q", v.q_rows, swizzle, width),
            tensor_map("k", "kv_heads", "seq_k", v.tile_n, swizzle, width),
            value_map or tensor_map("v", "kv_heads", "seq_k", v.tile_n, swizzle, width, v.d_v),
            tensor_map("o", "heads", "seq_q", ROWS, 2 * PIECE, 16, v.d_v),
            *(lse, sinks or factors),
            *((*starts, o) if v.packed else ()),
            *(*SCALARS, *(sizes or ())),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes += (
        f"AttentionMask::{MASKS[v.mask]}",
        str(v.capped).lower(),
        str(v.packed).lower(),
    )
    arguments = (q, k, v_, o, lse, sinks, factors, starts, SCALARS, sizes, Scalar("blocks"))
    return Function(kernel.name, kernel, arguments, (launch,), attributes, CHECKED)


def function(dtype, tile, mask, capped=False, packed=False, d_v=None):
    element, enumerator = _DTYPES[dtype]
    v = variant_of(tile, mask, capped, packed, d_v)
    kernel = AttentionForward(name_of(dtype, v), HalfOperands(element, v), v)
    sizes = (v.columns, v.d_v, v.tile_m, v.tile_n)
    attributes = (f"DType::{enumerator}", *map(str, sizes))
    return declare(kernel, attributes)


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
    # Wider heads, and a cap: compiled for a window only, which serves all masks.
    built += [
        function(dtype, _TILES[-1], "window", capped, packed=True)
        for dtype in _DTYPES
        for capped in (False, True)
    ]
    built += [
        function("bf16", _NARROW_TILE, mask, packed=packed, d_v=_NARROW_VALUES)
        for packed in (False, True)
        for mask in MASKS
        if packed or mask != "window"
    ]
    return built
