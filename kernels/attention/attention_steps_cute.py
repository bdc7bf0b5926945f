# SPDX-License-Identifier: Apache-2.0
"""The steps of attention's kernel: what a warpgroup does with a block of keys."""

import cutlass
import cutlass.cute as cute
from attention_layouts_cute import PACKED_ROWS, WARPGROUP, AttentionLayouts
from attention_packed_cute import rows_between
from attention_softmax_cute import (
    float_from_bits,
    hide_outside,
    softmax,
    some_negative,
    to_operand,
    with_limit,
)
from attention_tiles_cute import key_blocks, place, tile_position
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

_TURN = 4  # and up, a named barrier each: whose turn it is to start multiplying


class AttentionSteps(AttentionLayouts):
    def tile(self, turn, q_tiles, heads, batch, band):
        at = place(turn, self.mask != "none")
        return tile_position(at, q_tiles, heads, batch, band, self.mask != "none")

    def sequence(self, packed, entry, batch, seq_q, seq_k):
        """Of one sequence: queries, keys, where maps have it, and its first query's row."""
        if not self.packed:
            return seq_q, seq_k, entry, entry, Int32(0)
        entry = cutlass.min(entry, batch - 1)
        q_start, q_end = rows_between(
            packed.starts_q, packed.step_q, packed.total_q, entry, entry + 1
        )
        k_start, k_end = rows_between(
            packed.starts_k, packed.step_k, packed.total_k, entry, entry + 1
        )
        return q_end - q_start, k_end - k_start, q_end, k_end, q_start

    def hidden(self, length):
        """Rows at the beginning of a map that are not the sequence's; see AttentionPacked."""
        return PACKED_ROWS - length if self.packed else None

    def whose(self, entry):
        """A map's outermost coordinates, of one sequence."""
        return (PACKED_ROWS, entry) if self.packed else (entry,)

    def lse_place(self, packed, entry, head, heads, seq_q, start):
        if not self.packed:
            return cutlass.Int64(entry * heads + head) * seq_q
        return cutlass.Int64(head) * packed.total_q + start

    @cute.jit
    def key_blocks(self, row, queries, keys, left, right):
        own = row * self.tile_m + keys - queries
        low, last = key_blocks(own, self.tile_m, self.tile_n, keys, left, right, self.mask)
        if const_expr(self.packed):
            # A tile after a short sequence's end: one block, and nothing is stored.
            last = cutlass.max(last, 1)
            last = last if row * self.tile_m < queries else Int32(1)
            low = cutlass.min(low, last - 1)
        return low, last

    def needs_mask(self, last, seq_k):
        """Whether a tile's first block has keys that some row does not see."""
        return True if self.mask != "none" else last * self.tile_n > seq_k

    def hide(self, s, column, own, seq_k, left, right):
        """Minus infinity for keys that a row does not see: own is what the first row stands at."""
        begin, end = None, (seq_k - column,) * 2
        if self.mask != "none":
            end = [cutlass.min(end[r], own + 8 * r + right + 1 - column) for r in range(2)]
        if self.mask == "window":
            begin = [own + 8 * r - left - column for r in range(2)]
        hide_outside(s, begin, end)

    def soften(self, s, rows, scale, first, masked, as_integers=False):
        softmax(s, *rows, scale, first, masked, self.lift, True, as_integers)

    def count(self, s, rows, lse, first):
        """After a block's probabilities became an operand."""

    def scales(self, factors, entry, head, sizes, scale, slope):
        """Of a tile: what scores are multiplied by for a power of 2 and for the cap's tangent, and
        what results are multiplied by, unless None."""
        scale = float_from_bits(scale)
        return scale if self.capped else with_limit(scale), float_from_bits(slope), None

    def limited(self, scale):
        """A tile's scale as `softmax` and `largest` take it."""
        return scale

    def value_tile(self):
        return self.tile_n, self.d

    def value_matrix(self, keys):
        return keys, self.d

    def value_start(self, entry, keys, k_at, batch):
        """What `value_place` is told of a sequence."""
        return k_at

    def value_places(self, *arguments):
        return self.tma_places(*arguments)

    def value_place(self, block, head, entry):
        return block, 0, head, *self.whose(entry)

    def value_columns(self, sv):
        """v as the right operand: columns down, keys across."""
        return cute.make_tensor(sv.iterator, cute.select(sv.layout, [1, 0, 2]))

    def make_sums(self, shape):
        return cute.make_rmem_tensor(shape, Float32)

    def clear(self, sums):
        sums.fill(0.0)

    def total(self, sums, at):
        return sums[at]

    def to_operand(self, s, p):
        to_operand(s, p, self.dtype)

    def multiply_qk(self, s, rq, rk, q_stage, stage):
        mma = self.mma_qk()
        for block in range(self.columns // self.depth):
            mma.set(warpgroup.Field.ACCUMULATE, block != 0)
            cute.gemm(mma, s, rq[None, None, block, q_stage], rk[None, None, block, stage], s)
        warpgroup.commit_group()

    def multiply_pv(self, sums, p, rv, stage):
        mma = self.mma_pv()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for block in range(self.tile_n // self.depth):
            cute.gemm(mma, sums, p[None, None, block], rv[None, None, block, stage], sums)
        warpgroup.commit_group()

    @cute.jit
    def start(self, s, sums, p, rq, rk, rv, q_read, k_read, v_read, v_ring, wg):
        """Starts a block's scores and the values of the one before it, in this warpgroup's turn."""
        self.take_turn(wg)
        warpgroup.fence()
        self.multiply_qk(s, rq, rk, q_read.index, k_read.index)
        v_ring.consumer_wait(v_read)
        self.multiply_pv(sums, p, rv, v_read.index)
        next_wg = wg + 1
        if next_wg == self.warpgroups:
            next_wg = Int32(0)
        self.give_turn(next_wg)

    def prepare(self, storage):
        """Before the first copies."""

    def normalize(self, sums, rescale, gain):
        """Rows' factors, once all values are added up; by default they are known before."""

    @cute.jit
    def absorb(
        self, s, sums, p, rows, scale, masked: cutlass.Constexpr[bool], v_read, v_ring, lse, batch
    ):
        """A block's softmax, beside the values of the one before it. Twice, since a branch within
        would keep the compiler from mixing the steps."""
        rest = (masked, v_read, v_ring, lse, batch)
        if const_expr(self.as_integers):
            if some_negative(rows[0]):
                self.step(s, sums, p, rows, scale, *rest, False)
            else:
                self.step(s, sums, p, rows, scale, *rest, True)
        else:
            self.step(s, sums, p, rows, scale, *rest, False)

    def step(self, s, sums, p, rows, scale, masked, v_read, v_ring, lse, batch, as_integers):
        self.soften(s, rows, scale, False, masked, as_integers)
        self.finish(s, sums, p, rows, v_read, v_ring, lse, batch)

    @cute.jit
    def finish(self, s, sums, p, rows, v_read, v_ring, lse, batch):
        rescale = rows[2]
        warpgroup.wait_group(0)
        v_ring.consumer_release(v_read)
        self.to_operand(s, p)
        for i in cutlass.range_constexpr(cute.size(sums)):
            sums[i] = sums[i] * rescale[i // 2 % 2]

    def take_turn(self, wg):
        sync(_TURN + wg, 2 * WARPGROUP)

    def give_turn(self, wg):
        cute.arch.barrier_arrive(barrier_id=_TURN + wg, number_of_threads=2 * WARPGROUP)

    def tma_places(self, tma, smem, tile, extents, hidden, packed=None):
        """Where copies of tiles begin, in shared memory and in the tensor that a map describes as
        [batch, heads, rows, columns]. Of its rows, the first `hidden` are left out, unless None."""
        (rows, columns), heads, batch = extents
        packed = self.packed if packed is None else packed
        outer = (heads, PACKED_ROWS + 1, batch) if packed else (heads, batch)
        identity = cute.make_identity_tensor((columns, rows, *outer))
        modes = [1, 0, *range(2, 2 + len(outer))]
        places = cute.make_tensor(identity.iterator, cute.select(identity.layout, modes))
        if hidden is not None:
            places = cute.domain_offset((hidden, 0, *(0 for _ in outer)), places)
        tiles = cute.zipped_divide(places, tile)
        one = cute.make_layout(1)
        return cpasync.tma_partition(tma, 0, one, cute.group_modes(smem, 0, 2), tiles)


def sync(barrier, threads):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
