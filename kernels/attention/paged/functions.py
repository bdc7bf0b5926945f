# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention over a paged cache that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap

from kernels.attention.common.layouts import PIECE, ROWS
from kernels.attention.common.problem import MASKS, SCALARS
from kernels.attention.forward.functions import variant_of
from kernels.attention.paged.chained import ChainedAttention, ChainedOperands
from kernels.attention.paged.kernel import COPY_ROWS, POINTERS, SIZES, PagedAttention
from kernels.attention.paged.operands import Factors, PagedOperands
from kernels.attention.paged.prefix import PrefixAttention, PrefixOperands
from kernels.attention.paged.tree import TreeAttention, TreeOperands

_DTYPES = {"bf16": (cutlass.BFloat16, "kBFloat16"), "fp16": (cutlass.Float16, "kFloat16")}

# Head dimension, warpgroups, keys a block, stages of k and v, of q, and pieces of o.
_TILES = (
    (64, 2, 128, 3, 2, 1),
    (128, 2, 128, 2, 2, 2),
    (256, 2, 64, 2, 1, 1),
)
# The only tiles for which chained.py and tree.py are compiled.
_CHAINED_TILE = (128, 2, 128, 2, 1, 2)
_TREE_TILE = (128, 2, 128, 2, 2, 2)
# Up to this head dimension a kernel takes 16-bit and float8 caches.
_MOST_OF_BOTH = 128
# A window without limits is no mask.
_KINDS = (("causal", False), ("window", False), ("window", True))

_ONE = 0x3F800000
_FIXED = {"scale": _ONE, "slope": _ONE, "left": 5, "right": 0, "band": 1}
_NUMBERS = (*SIZES, *Factors._fields[2:], "tree_step", "prefix_step")
_FIXED |= {name: 9 + i for i, name in enumerate(_NUMBERS)}  # all different
_CHECKED = (
    dict(batch=2, seq_q=1000, seq_k=777, heads=8, kv_heads=2, **_FIXED, blocks=132),
    dict(batch=1, seq_q=64, seq_k=128, heads=1, kv_heads=1, **_FIXED, blocks=1),
)


def function(dtype, tile, mask, capped=False, chained=False, tree=False, float8=None):
    element, enumerator = _DTYPES[dtype]
    v = variant_of(tile, mask, capped, packed=True)
    name = f"attention_paged_{dtype}_d{v.d}_{mask}" + ("_capped" if capped else "")
    if float8 is None:
        float8 = v.d <= _MOST_OF_BOTH and not chained and not tree
    elif float8:
        name += "_float8"
    prefix = mask == "window"
    of, operands = (PagedAttention, PagedOperands)
    if prefix:
        of, operands = (PrefixAttention, PrefixOperands)
    kernel = of(name, operands(element, v, float8), v)
    if chained:
        kernel = ChainedAttention(name + "_chained", ChainedOperands(element, v), v)
    if tree:
        kernel = TreeAttention(name + "_tree", TreeOperands(element, v), v)
    name = kernel.name
    pointers = tuple(Pointer(name, element) for name in "qkvo")
    lse = Pointer("lse", cutlass.Float32, align=4)
    kinds = {"sinks": cutlass.Float32}
    starts = tuple(
        Pointer(name, element)
        if name.endswith("_data")
        else Pointer(name, kinds.get(name, cutlass.Int32), align=4)
        for name in POINTERS
    )
    sizes = tuple(map(Scalar, SIZES))
    if prefix:
        starts += (Pointer("prefixes", cutlass.Int32, align=4),)
        sizes += (Scalar("prefix_step"),)
    if tree:
        starts += (Pointer("tree", cutlass.Int64, align=8),)
        sizes += (Scalar("tree_step"),)
    factors = None
    if kernel.widens:
        names = Factors._fields
        factors = (
            *(Pointer(name, cutlass.Float32, align=4) for name in names[:2]),
            *map(Scalar, names[2:]),
        )

    def tensor_map(name, heads, rows):
        return TensorMap(name, ("batch", 2, heads, "seq_q", v.d), (1, 1, 1, rows, PIECE))

    launch = Launch(
        parameters=(
            tensor_map("q", "heads", ROWS),
            tensor_map("k", "kv_heads", COPY_ROWS),
            tensor_map("v", "kv_heads", COPY_ROWS),
            tensor_map("o", "heads", ROWS),
            *(lse, *(factors or ()), *starts, pointers[3], *SCALARS, *sizes),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = (
        f"DType::{enumerator}",
        *map(str, (v.d, v.tile_m, v.tile_n)),
        f"AttentionMask::{MASKS[mask]}",
        str(capped).lower(),
        str(chained).lower(),
        str(tree).lower(),
        str(float8).lower(),
    )
    arguments = (*pointers, lse, None, factors, starts, SCALARS, sizes, Scalar("blocks"))
    return Function(name, kernel, arguments, (launch,), attributes, _CHECKED)


def functions():
    built = [
        function(dtype, tile, *kind) for dtype in _DTYPES for tile in _TILES for kind in _KINDS
    ]
    built += [
        function(dtype, _TILES[-1], *kind, float8=True) for dtype in _DTYPES for kind in _KINDS[1:]
    ]
    return [
        *built,
        function("bf16", _CHAINED_TILE, "causal", chained=True),
        function("bf16", _TREE_TILE, "causal", tree=True),
    ]
