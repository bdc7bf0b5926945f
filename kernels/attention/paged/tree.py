# SPDX-License-Identifier: Apache-2.0
"""The forward kernel over a paged cache for sequences whose new tokens are a tree.

A row sees all keys before the new tokens of its sequence, and those of the up to 64 new tokens
whose bit is set in its word. So only a tile's last one or two blocks need a mask. The host sets no
limit to the right of a query. Words are read for each masked block, so that no registers hold them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.attention.common.tiles import free_blocks
from kernels.attention.paged.kernel import Paged, PagedAttention
from kernels.attention.paged.operands import PagedOperands

_WORD = 64  # bits

TreePaged = NamedTuple(
    "TreePaged",
    [*Paged.__annotations__.items(), ("tree", cute.Pointer), ("tree_step", Int32)],  # bytes
)


class TreeOperands(PagedOperands):
    def __init__(self, dtype, variant):
        super().__init__(dtype, variant)
        self.widens = False

    def make_sums(self, shape):
        # The first row of q that the sequence has whose scores are next.
        self.start = cute.make_rmem_tensor(1, Int32)
        return super().make_sums(shape)


class TreeAttention(PagedAttention):
    def packed_rows(self, starts, sizes):
        *starts, tree, o = starts
        *sizes, tree_step = sizes
        return TreePaged(*starts, o, *sizes, tree, tree_step)

    def row_of(self, tile, own, paged):
        return [(*row, paged) for row in super().row_of(tile, own, paged)]

    def sequence(self, paged, entry, problem):
        found = super().sequence(paged, entry, problem)
        self.latest = found[-1]
        return found

    def keys_of(self, rows, keys, queries):
        """The rows for `hide`, of the sequence read last: the tile's first block is next."""
        self.operands.start[0] = self.latest
        return self.moved(rows, keys - queries)

    def moved(self, rows, offset):
        """The arguments of `hide`: each row, and the number of keys before the new tokens."""
        return [(*row, offset) for row in rows]

    def free_blocks(self, row, offset, low, last, paged, problem):
        """The blocks without a mask, all of them before the new tokens."""
        return free_blocks(offset - 1, 1, self.tile_n, low, last, problem.left, Int32(0), self.mask)

    def hide(self, s, column, own, keys, problem):
        start = self.operands.start[0]
        for r, (query, _, paged, old) in enumerate(own):
            # A row that is none of the sequence's has any word.
            at = cutlass.min(start + query, paged.total_q - 1)
            address = paged.tree.toint() + Int64(at) * paged.tree_step
            word = cute.make_ptr(Int64, address, cute.AddressSpace.gmem, assumed_align=8).load()
            words = []
            for first in range(0, self.tile_n, _WORD):
                seen = seen_keys(word, keys - old, old, old - column - first)
                words += [Int32(seen), Int32(seen >> 32)]
            hide_unseen(s, r, words)

    def finish_rows(self, rows, scale, gain, lse, sinks, paged, place, at_row, queries, lane):
        at_row = [row[:2] for row in at_row]
        return super().finish_rows(
            rows, scale, gain, lse, sinks, paged, place, at_row, queries, lane
        )


def seen_keys(word, tokens, old, before):
    """Bit i: a row with this word sees the key that `before` - i old keys come before. There are
    `tokens` new ones. Shifts by a word's width or more, and by negative numbers, give 0."""
    tokens = cutlass.min(cutlass.max(tokens, 1), _WORD)
    ones = Int64(-1)
    # Bits of tokens that the sequence does not have, or that have no key, do not count.
    word = word & _right(ones, _WORD - tokens) & _left(ones, cutlass.max(-old, 0))
    not_old = _left(ones, cutlass.max(before, 0))
    return (not_old ^ ones) | _left(word, before) | _right(word, -before)


def _left(x, by):
    return cute.arch.inline_ptx(
        "shl.b64 {$w0}, {$r0}, {$r1};", write_only_types=[Int64], read_only_args=[x, by]
    )


def _right(x, by):
    return cute.arch.inline_ptx(
        "shr.u64 {$w0}, {$r0}, {$r1};", write_only_types=[Int64], read_only_args=[x, by]
    )


@cute.jit
def hide_unseen(s, r: cutlass.Constexpr[int], words):
    """Sets a row's scores to minus infinity where the words, whose bits count from the thread's
    first column on, have no bit."""
    for i in cutlass.range_constexpr(cute.size(s) // 4):
        for e in cutlass.range_constexpr(2):
            at, column = 4 * i + 2 * r + e, 8 * i + e
            bit = (words[column // 32] >> (column % 32)) & 1
            s[at] = s[at] if bit == 1 else -Float32.inf
