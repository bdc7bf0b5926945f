# SPDX-License-Identifier: Apache-2.0
"""Attention of e4m3 q, k and v: the parts of the forward kernel that depend on the operands' type.

wgmma takes 8-bit operands with the summed dimension contiguous only, so v comes transposed, as
[batch, heads, d, keys], from attention_fp8_values.cu. That kernel also puts each 16 keys in the
order in which a thread has their probabilities, so that these are left operands without moving.

The tensor cores accumulate FP8 products with 13 bits below the largest term, so they sum only one
block of keys: each block's product with the values goes to separate registers, and is added to the
float32 sums by the instruction that rescales those. Probabilities are multiplied by 2**8, which
cancels, to use e4m3's range.

A warp's work between products is the bound, not the products. So the tensor cores also sum the rows
of rounded probabilities, with 8 columns of ones after v's in shared memory; float32 probabilities
are summed only if lse is requested. Maxima are compared as integers, which was slower with 16-bit
inputs.

Lower bound: 2 * D multiply-adds per score, of 4096 per cycle and multiprocessor: 16 scores per
cycle at D = 128, as many as there are exponentials, and 32 at D = 64.

Rejected: adding to the float32 sums only every eighth block, or when a maximum grows by much
(slower, and off by 1 % if all values have one sign), and a polynomial for some of the exponentials.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from kernels.attention.common.layouts import coordinates, staged_layout
from kernels.attention.common.softmax import (
    add_up,
    float_from_bits,
    hold,
    inverse,
    softmax,
    some_negative,
    with_limit,
)

_ONES = 0x38383838  # four of e4m3


class Fp8Operands:
    """e4m3 operands, a bfloat16 result.

    `held`: a block's softmax ("half": half of its rows) ends before the kernel waits for the values
    of the block before it; `turns`: warpgroups start multiplying one after the other; `ones`: rows
    are added up beside v. Each is faster with some tiles. `as_integers`: maxima are compared as
    integers unless a row's maximum so far is negative."""

    dtype = cutlass.Float8E4M3FN
    out_dtype = BFloat16
    value_major = warpgroup.OperandMajorMode.K
    value_packed = False
    depth = 32  # columns that one product multiplies
    lift = 8.0  # the largest probability's power of 2

    def __init__(self, variant, held=False, turns=True, ones=True):
        self.variant = variant
        self.counted = 8 if ones else 0  # columns of ones beside v's, the fewest of a product
        self.held = held
        self.turns = turns
        self.as_integers = not variant.capped
        # A block's columns in a row of transposed v: narrower swizzles are slow to copy.
        self.tile_columns = (variant.tile_n + 63) // 64 * 64

    # The shared memory of v.

    def value_tile(self):
        return self.variant.d, self.tile_columns

    def value_layout(self):
        """v's rows of a stage; the rows of ones behind them belong to the stage too."""
        rows, stages = self.variant.d + self.counted, self.variant.stages
        values = staged_layout(self.dtype, rows, self.tile_columns, stages)
        shape, stride = values.outer.shape, values.outer.stride
        rows = ((shape[0][0], self.variant.d // shape[0][0]), *shape[1:])
        return cute.make_composed_layout(values.inner, 0, cute.make_layout(rows, stride=stride))

    def value_matrix(self, keys):
        tile_n = self.variant.tile_n
        return self.variant.d, (keys + tile_n - 1) // tile_n * self.tile_columns

    def value_coordinates(self, seq_k, heads, batch, hidden):
        return coordinates(*self.value_matrix(seq_k), heads, batch)

    def value_start(self, entry, keys, k_at, batch):
        """A sequence's first tile: room for one per tile_n keys before it, and one more for each
        sequence before it."""
        if not self.variant.packed:
            return entry
        return (k_at - keys) // self.variant.tile_n + cutlass.min(entry, batch - 1)

    def value_place(self, block, head, start):
        return (0, start + block, head, 0) if self.variant.packed else (0, block, head, start)

    def value_operand(self, sv):
        """With the ones behind each stage's columns of v."""
        shape = sv.layout.shape
        rows = (shape[0][0], (self.variant.d + self.counted) // shape[0][0])
        layout = cute.make_layout((rows, *shape[1:]), stride=sv.layout.stride)
        return cute.make_tensor(sv.iterator, layout)

    @cute.jit
    def prepare(self, storage, threads: cutlass.Constexpr[int]):
        """Fills the stages of v with ones: the copies of v leave those behind it."""
        if const_expr(self.counted):
            words = cute.recast_ptr(storage.v.data_ptr(), dtype=Int32)
            rows = self.variant.stages * (self.variant.d + self.counted)
            count = rows * self.tile_columns // 4
            ones = cute.make_tensor(words, cute.make_layout(count))
            for i in cutlass.range(cute.arch.thread_idx()[0], count, threads, unroll=1):
                ones[i] = _ONES
            cute.arch.fence_proxy("async.shared", space="cta")

    # Factors of scores and results.

    def scales(self, factors, entry, head, problem):
        at = entry * problem.kv_heads + head // (problem.heads // problem.kv_heads)
        mine = factors + 2 * cutlass.min(at, problem.batch * problem.kv_heads - 1)
        of_scores, of_values = mine.load(), (mine + 1).load()
        if const_expr(self.variant.capped):
            scale = float_from_bits(problem.scale)
            return scale, float_from_bits(problem.slope) * of_scores, of_values
        scale = float_from_bits(problem.scale) * of_scores
        return scale if self.held == "half" else with_limit(scale, self.lift), None, of_values

    def limited(self, scale):
        """With the limit, which tiles with "half" compute at each use: they have no registers to
        keep it in."""
        late = self.held == "half" and not self.variant.capped
        return with_limit(scale, self.lift) if late else scale

    # The sums of o, in registers.

    def make_sums(self, shape):
        """The sums, one block's, and the factors of the sums before that block's is added."""
        held = cute.make_rmem_tensor(2, Float32)
        return cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32), held

    def clear(self, sums):
        sums[0].fill(0.0)
        sums[2].fill(1.0)

    def total(self, sums, at):
        return sums[0][at] * sums[2][at // 2 % 2] + sums[1][at]

    def multiply_pv(self, mma, sums, p, rv, stage):
        """Starts p v of one block of keys."""
        for block in range(self.variant.tile_n // self.depth):
            mma.set(warpgroup.Field.ACCUMULATE, block != 0)
            cute.gemm(mma, sums[1], p[None, None, block], rv[None, None, block, stage], sums[1])
        warpgroup.commit_group()

    # After a block's scores.

    def soften(self, s, rows, scale, first, masked, as_integers=False, which=(0, 1)):
        softmax(
            *(s, *rows, self.limited(scale), first, masked, self.lift),
            *(not self.counted, as_integers, which),
        )

    def to_operand(self, s, p):
        """Probabilities as the left operand: among 16 keys, a thread's two and the two 8 further on
        are neighbours in v."""
        words = cute.recast_tensor(p, Int32)
        for i in range(cute.size(s) // 4):
            first = i // 2 * 8 + i % 2 * 2
            words[i] = cute.arch.inline_ptx(
                "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
                "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
                write_only_types=[Int32],
                read_only_args=[s[first], s[first + 1], s[first + 4], s[first + 5]],
            )

    @cute.jit
    def count(self, s, rows, lse, first: cutlass.Constexpr[bool]):
        """Adds up the float32 probabilities, for a caller that asks for the logarithms."""
        if const_expr(self.counted):
            if lse.toint() != 0:
                for r in cutlass.range_constexpr(2):
                    add_up(s, rows[1], rows[2], r, first)

    @cute.jit
    def absorb(
        self, s, sums, p, rows, scale, masked: cutlass.Constexpr[bool], v_read, v_ring, lse, batch
    ):
        """A block's softmax, while the values of the block before it are multiplied. The warps of a
        warpgroup may compare in different ways, but must wait for products by one instruction, so
        the wait stands outside of the branches, each of which is compiled by itself."""
        negative = some_negative(rows[0])
        if const_expr(self.held):
            if const_expr(self.as_integers):
                if negative:
                    self.before_wait(s, rows, scale, masked, batch, False)
                else:
                    self.before_wait(s, rows, scale, masked, batch, True)
            else:
                self.before_wait(s, rows, scale, masked, batch, False)
        warpgroup.wait_group(0)
        v_ring.consumer_release(v_read)
        if const_expr(self.as_integers and self.held is not True):
            if negative:
                self.after_wait(s, sums, p, rows, scale, masked, lse, False)
            else:
                self.after_wait(s, sums, p, rows, scale, masked, lse, True)
        else:
            self.after_wait(s, sums, p, rows, scale, masked, lse, False)

    def before_wait(self, s, rows, scale, masked, batch, as_integers):
        which = (0,) if self.held == "half" else (0, 1)
        self.soften(s, rows, scale, False, masked, as_integers, which)
        hold(batch)

    def after_wait(self, s, sums, p, rows, scale, masked, lse, as_integers):
        if self.held is not True:
            which = (1,) if self.held == "half" else (0, 1)
            self.soften(s, rows, scale, False, masked, as_integers, which)
        self.finish(s, sums, p, rows, lse)

    @cute.jit
    def finish(self, s, sums, p, rows, lse):
        self.to_operand(s, p)
        for i in cutlass.range_constexpr(cute.size(sums[0])):
            sums[0][i] = self.total(sums, i)
        for r in cutlass.range_constexpr(2):
            sums[2][r] = rows[2][r]
        self.count(s, rows, lse, False)

    @cute.jit
    def normalize(self, sums, rescale, gain):
        """The rows' factors of the result, from the sums of the columns of ones."""
        if const_expr(self.counted):
            for r in cutlass.range_constexpr(2):
                rescale[r] = inverse(self.total(sums, self.variant.d // 2 + 2 * r)) * gain
