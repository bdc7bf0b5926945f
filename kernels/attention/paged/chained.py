# SPDX-License-Identifier: Apache-2.0
"""The fixed parts of the batch-invariant mode, processed one after the other by the tile's block.

It gives the bits of kernel.py's parts combined by paged_combine.cu, without partial results in
global memory, for launches whose tiles fill the GPU. A part's sums are normalised, rounded to 16
bits, and added to float32 totals in shared memory, through which the result is also stored. The
last part comes first, like its blocks. There is room for one stage of queries.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from kernels.attention.common.layouts import PIECE, ROWS, WARPGROUP
from kernels.attention.common.pipelines import sync
from kernels.attention.common.softmax import _fused, _product, inverse, largest
from kernels.attention.forward.kernel import _WARPGROUP
from kernels.attention.paged.kernel import _LN2, PHASES, PagedAttention, begins_part
from kernels.attention.paged.operands import PagedOperands

_LOG2_E = 1.44269504
# The block of keys with which part kPagedMostFixedParts - 1 begins, which has all later keys.
_LAST_START = PHASES[-1][1] + (254 - PHASES[-1][0] << PHASES[-1][2])
_VECTOR = 4  # totals that a thread reads or writes at once


class ChainedOperands(PagedOperands):
    def __init__(self, dtype, variant):
        super().__init__(dtype, variant)
        self.widens = False

    def prepare(self, storage, threads):
        self.memory = cute.recast_ptr(storage.o.data_ptr(), dtype=Float32)

    def make_sums(self, shape):
        # Two rows each. The tile's totals have a logarithm of base 2 and a weight. A part that is
        # added has a factor, a weight, and the weight of the totals so far.
        names = ("tops", "weights", "inverses", "joining", "kept")
        self.rows = {name: cute.make_rmem_tensor(2, Float32) for name in names}
        # The block whose scores come next, and the parts in the totals.
        self.block, self.joined = (cute.make_rmem_tensor(1, Int32) for _ in range(2))
        self.block[0] = 0
        self.begin()
        return super().make_sums(shape)

    def begin(self):
        self.joined[0] = 0
        self.rows["tops"].fill(-Float32.inf)
        self.rows["weights"].fill(0.0)

    @cute.jit
    def absorb(
        self, s, sums, p, rows, scale, masked: cutlass.Constexpr[bool], v_read, v_ring, lse, batch
    ):
        row_max, row_sum, rescale = rows
        behind = self.block[0] + 1
        ended = begins_part(behind) & (behind <= _LAST_START)
        tops, totals = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        for r in cutlass.range_constexpr(2):
            tops[r], totals[r] = row_max[r], row_sum[r]
            # Before a part's first block: then these scores have its first maximum and sum.
            row_max[r] = -Float32.inf if ended else row_max[r]
            row_sum[r] = Float32(0.0) if ended else row_sum[r]
        self.soften(s, rows, scale, False, masked)
        warpgroup.wait_group(0)
        v_ring.consumer_release(v_read)
        self.to_operand(s, p)
        if ended:
            for r in cutlass.range_constexpr(2):
                self.weigh(r, tops[r], totals[r], scale)
            self.join(sums, True)
            sums.fill(0.0)
        else:
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] = sums[i] * rescale[i // 2 % 2]
        self.block[0] = self.block[0] - 1

    @cute.jit
    def weigh(self, r: cutlass.Constexpr[int], top, total, scale):
        """A row of a part joins the totals: its weight and theirs, as paged_combine.cu has them."""
        total = cute.arch.warp_reduction_sum(total, threads_in_group=4)
        top = largest(top, self.limited(scale))
        own = _product((top + cute.math.log2(total)) * _LN2, Float32(_LOG2_E))
        before = self.rows["tops"][r]
        grown = cute.arch.fmax(before, own)
        reference = Float32(0.0) if grown == -Float32.inf else grown
        kept, joining = _exp2(before - reference), _exp2(own - reference)
        self.rows["inverses"][r] = inverse(total)
        self.rows["tops"][r] = grown
        self.rows["kept"][r] = kept
        self.rows["joining"][r] = joining
        self.rows["weights"][r] = _fused(self.rows["weights"][r], kept, joining)

    @cute.jit
    def join(self, sums, to_memory: cutlass.Constexpr[bool]):
        """A part's sums join the totals, in memory or in the sums' place."""
        thread = cute.arch.thread_idx()[0]
        wg, own = thread // WARPGROUP - 1, thread % WARPGROUP
        first = self.joined[0] == 0
        if const_expr(to_memory):
            if first:
                # The tile before this one has left the memory.
                if own < 32:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                sync(_WARPGROUP + wg, WARPGROUP)
        vectors = cute.size(sums) // _VECTOR
        # A warpgroup's totals lie where its pieces do, and as many vectors behind those of all.
        together = self.variant.o_stages * ROWS * PIECE // (2 * WARPGROUP * _VECTOR)
        groups = self.variant.warpgroups
        layout = cute.make_layout(_VECTOR)
        for vector in cutlass.range_constexpr(vectors):
            slot = vector // together * groups * together + vector % together
            at = (slot + wg * together) * WARPGROUP + own
            place = cute.make_tensor((self.memory + at * _VECTOR).align(16), layout)
            totals = cute.make_rmem_tensor(_VECTOR, Float32)
            totals.fill(0.0)
            if not first:
                loaded = place.load()
                for i in cutlass.range_constexpr(_VECTOR):
                    totals[i] = loaded[i]
            for i in cutlass.range_constexpr(_VECTOR):
                r, of_all = i // 2 % 2, vector * _VECTOR + i
                rounded = (sums[of_all] * self.rows["inverses"][r]).to(self.dtype)
                kept = _product(totals[i], self.rows["kept"][r])
                totals[i] = _fused(self.rows["joining"][r], rounded.to(Float32), kept)
            if const_expr(to_memory):
                place.store(totals.load())
            else:
                for i in cutlass.range_constexpr(_VECTOR):
                    sums[vector * _VECTOR + i] = totals[i]
        self.joined[0] = self.joined[0] + 1

    @cute.jit
    def normalize(self, sums, rescale, gain):
        """A tile's last part, unless it is the only one, joins the totals: they are the result."""
        if self.joined[0] > 0:
            self.join(sums, False)
        self.begin()


class ChainedAttention(PagedAttention):
    def storage(self):
        dtype, out_dtype = self.operands.dtype, self.operands.out_dtype
        q_layout, k_layout, _, _ = self.smem_layouts()

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, self.value_size()], 1024]
            o: cute.struct.Align[cute.struct.MemRange[out_dtype, 2 * self.totals()], 1024]
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.variant.q_stages]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.variant.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.variant.stages]

        return Storage

    def totals(self):
        return self.tile_m * self.d_v

    def smem_bytes(self):
        pieces = 2 * PIECE * self.variant.o_stages * self.tile_m
        return super().smem_bytes() - pieces + 4 * self.totals()

    def free_blocks(self, row, offset, low, last, paged, problem):
        self.operands.block[0] = last - 2
        return super().free_blocks(row, offset, low, last, paged, problem)

    @cute.jit
    def finish_rows(self, rows, scale, gain, lse, _, paged, place, at_row, queries, lane):
        row_max, row_sum, rescale = rows
        _, first_head, _, _, start = place
        for r in cutlass.range_constexpr(2):
            factor = inverse(cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4))
            self.operands.weigh(r, row_max[r], row_sum[r], scale)
            weights = self.operands.rows["weights"][r]
            if self.operands.joined[0] > 0:
                factor = _reciprocal(weights) if weights != 0.0 else Float32(0.0)
            rescale[r] = factor
            if lse.toint() != 0:
                row, in_group = at_row[r]
                head = first_head + cutlass.min(in_group, paged.group - 1)
                if lane % 4 == 0 and row < queries:
                    to = lse + (Int64(head) * paged.total_q + start + row)
                    to.store((self.operands.rows["tops"][r] + _log2(weights)) * _LN2)


def _exp2(x):
    return cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def _log2(x):
    return cute.arch.inline_ptx(
        "lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def _reciprocal(x):
    return cute.arch.inline_ptx(
        "rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )
