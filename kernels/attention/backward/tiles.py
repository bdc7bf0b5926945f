# SPDX-License-Identifier: Apache-2.0
"""The tiles of keys that a block of threads works on, and the blocks of queries that a tile needs.

Query i sees the keys from i + offset - left to i + offset + right, where offset is Sk - Sq.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def tile_position(tile, k_tiles, heads, batch, band, descending):
    """(column of tiles, head of keys, batch entry): the tiles of `band` heads alternate."""
    section = tile // (band * k_tiles)
    height = cutlass.max(cutlass.min(heads * batch - section * band, band), 1)
    within = tile - section * band * k_tiles
    column = within // height
    pair = section * band + within - column * height
    column = k_tiles - 1 - column if descending != 0 else column
    entry = pair // heads
    return column, pair - entry * heads, entry


@cute.jit
def query_blocks(key, keys, size, seq_q, offset, left, right):
    """(first, end) of the blocks of `size` queries that see one of `keys` keys from `key` on."""
    first = cutlass.max(key - offset - right, 0) // size
    end = cutlass.max(key + keys - offset + left, 0)
    end = cutlass.min(cute.ceil_div(end, size), cute.ceil_div(seq_q, size))
    return first, cutlass.max(first, end)


@cute.jit
def needs_mask(key, keys, query, size, seq_k, offset, left, right):
    """True if one of the `size` queries from `query` on does not see one of the keys."""
    hidden = key + keys > seq_k or key + keys - 1 > query + offset + right
    return hidden or key < query + size - 1 + offset - left


@cute.jit
def turn_of(column, keys, k_tiles, query, size, offset, left, right, descending):
    """The number of tiles of keys that add to this block of queries before this one."""
    first = cutlass.max(query + offset - left, 0) // keys
    end = cute.ceil_div(cutlass.max(query + size + offset + right, 0), keys)
    last = cutlass.min(end, k_tiles) - 1
    return last - column if descending != 0 else Int32(column - first)
