# SPDX-License-Identifier: Apache-2.0
"""The tiles of queries that a thread block works on, and the blocks of keys that a tile needs."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@cute.jit
def rounds_of_block(tiles, alternate: cutlass.Constexpr[bool]):
    """The number of tiles that this block gets."""
    rounds = tiles // cute.arch.grid_dim()[0]
    if place(rounds, alternate) < tiles:
        rounds += 1
    return rounds


@cute.jit
def place(turn, alternate: cutlass.Constexpr[bool]):
    """This block's tile in a round. If tiles get shorter, rounds alternate in direction, so that
    two rounds give each block the same work."""
    block = cute.arch.block_idx()[0]
    blocks = cute.arch.grid_dim()[0]
    if const_expr(alternate):
        block = blocks - 1 - block if turn % 2 == 1 else block
    return turn * blocks + block


@cute.jit
def tile_position(tile, q_tiles, heads, batch, band, longest_first: cutlass.Constexpr[bool]):
    """(row of tiles, head, batch entry) of a tile: the tiles of `band` heads alternate."""
    section = tile // (band * q_tiles)
    height = cutlass.min(heads * batch - section * band, band)
    height = cutlass.max(height, 1)  # also for a tile after the last one
    within = tile - section * band * q_tiles
    row = within // height
    pair = section * band + within - row * height
    if const_expr(longest_first):
        row = q_tiles - 1 - row
    entry = pair // heads
    return row, pair - entry * heads, entry


@cute.jit
def key_blocks(own, rows, size, seq_k, left, right, mask: cutlass.Constexpr[str]):
    """(first, end) of the blocks of `size` keys that a tile sees, at least one block. The tile's
    `rows` queries are at keys `own` and up."""
    first, last = Int32(0), cute.ceil_div(seq_k, size)
    if const_expr(mask != "none"):
        end = own + rows + right
        last = cutlass.max(1, cutlass.min(last, cute.ceil_div(end, size)))
    if const_expr(mask == "window"):
        first = cutlass.min(cutlass.max(own - left, 0) // size, last - 1)
    return first, last


@cute.jit
def free_blocks(own, rows, size, first, last, left, right, mask: cutlass.Constexpr[str]):
    """(first, end) of the blocks before the last one in which every row sees every key."""
    bottom, top = first, last - 1
    if const_expr(mask != "none"):
        top = cutlass.min(top, cutlass.max(own + right + 1, 0) // size)
        top = cutlass.max(top, first)
    if const_expr(mask == "window"):
        begin = cutlass.max(own + rows - 1 - left, 0)
        bottom = cutlass.min(cutlass.max(cute.ceil_div(begin, size), first), top)
    return bottom, top
