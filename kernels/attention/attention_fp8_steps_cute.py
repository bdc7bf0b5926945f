# SPDX-License-Identifier: Apache-2.0
"""Attention of e4m3 q, k and v: the forward kernel with what 8 bits change.

wgmma takes 8-bit operands with the summed dimension contiguous only, so v comes transposed, as
[batch, heads, d, keys], from attention_fp8_values.cu. That also puts the keys of each 16 in the
order in which a thread has their probabilities: those are left operands as they lie in registers.

The tensor cores add FP8 products with 13 bits behind the point of the largest. So no sum is left
to them for longer than a block of keys: each block's values are multiplied into registers of their
own, and added to the float32 sums where those are scaled anyway, by the same instruction.
Probabilities are multiplied by 2**8, which cancels, to use e4m3's range.

What a warp does between products binds, not these. So rows of rounded probabilities are added up
by the tensor cores, with 8 columns of ones behind v's in shared memory; sums of the float32 ones
are only taken for who asks for their logarithms. And maxima are compared as integers, which with
16-bit inputs was slower.

Floor: 2 * D multiply-adds a score, of 4096 a cycle and multiprocessor: 16 scores a cycle at
D = 128, as many as there are exponentials, and 32 at D = 64.

Measured and left out: to add up only every eighth block, or when a maximum grows by much (slower,
and off by 1 % where all values have one sign), and a part of the exponentials from a polynomial.
"""

import cutlass
import cutlass.cute as cute
from attention_launch_cute import Launcher
from attention_layouts_cute import PIECE, ROWS
from attention_softmax_cute import (
    add_up,
    float_from_bits,
    hold,
    inverse,
    softmax,
    some_negative,
    with_limit,
)
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

_COUNTED = 8  # the least
_ONES = 0x38383838  # four of e4m3


class AttentionFp8Steps(Launcher):
    """`held`: a block's softmax ("half": of half of the rows) ends before the values of the block
    before it are waited for; `turns`: warpgroups start multiplying one after the other; `ones`:
    rows are added up beside v. Each is faster with some tiles."""

    value_packed = False
    value_major = warpgroup.OperandMajorMode.K
    depth = 32
    lift = 8.0

    def __init__(self, *arguments, held=False, turns=True, ones=True, **options):
        super().__init__(*arguments, **options)
        self.counted = _COUNTED if ones else 0
        self.out_dtype = BFloat16
        self.held = held
        self.turns = turns
        self.tile_columns = tile_columns(self.tile_n)

    def smem_layouts(self):
        """Staged layouts of q, k and transposed v, and o's pieces."""

        def layout(rows, columns, stages, dtype=self.dtype):
            kind = getattr(
                warpgroup.SmemLayoutAtomKind, f"K_SW{swizzle(columns * dtype.width // 8)}"
            )
            atom = warpgroup.make_smem_layout_atom(kind, dtype)
            return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))

        values = layout(self.d + self.counted, self.tile_columns, self.stages)
        shape, stride = values.outer.shape, values.outer.stride
        rows = ((shape[0][0], self.d // shape[0][0]), *shape[1:])
        values_only = cute.make_layout(rows, stride=stride)
        return (
            layout(self.tile_m, self.d, self.q_stages),
            layout(self.tile_n, self.d, self.stages),
            cute.make_composed_layout(values.inner, 0, values_only),
            layout(ROWS, PIECE, self.warpgroups * self.o_stages, self.out_dtype),
        )

    def smem_bytes(self):
        tiles = self.d * (self.q_stages * self.tile_m + self.stages * self.tile_n)
        values = self.stages * (self.d + self.counted) * self.tile_columns
        tiles += (values + 1023) // 1024 * 1024
        tiles += 2 * PIECE * self.o_stages * self.tile_m
        return (tiles + 16 * (self.q_stages + 2 * self.stages) + 1023) // 1024 * 1024

    def value_tile(self):
        return self.d, self.tile_columns

    def value_matrix(self, keys):
        return self.d, (keys + self.tile_n - 1) // self.tile_n * self.tile_columns

    def value_start(self, entry, keys, k_at, batch):
        """A tile for each tile_n keys before a sequence and one for each sequence: enough."""
        if not self.packed:
            return entry
        return (k_at - keys) // self.tile_n + cutlass.min(entry, batch - 1)

    def value_place(self, block, head, start):
        return (0, start + block, head, 0) if self.packed else (0, block, head, start)

    def value_places(self, tma, smem, tile, extents, hidden):
        return self.tma_places(tma, smem, tile, extents, None, packed=False)

    def value_columns(self, sv):
        """With the ones behind each stage's columns of v."""
        shape = sv.layout.shape
        rows = (shape[0][0], (self.d + self.counted) // shape[0][0])
        layout = cute.make_layout((rows, *shape[1:]), stride=sv.layout.stride)
        return cute.make_tensor(sv.iterator, layout)

    @cute.jit
    def prepare(self, storage):
        if const_expr(self.counted):
            words = cute.recast_ptr(storage.v.data_ptr(), dtype=Int32)
            count = self.stages * (self.d + self.counted) * self.tile_columns // 4
            ones = cute.make_tensor(words, cute.make_layout(count))
            for i in cutlass.range(cute.arch.thread_idx()[0], count, self.threads, unroll=1):
                ones[i] = _ONES
            cute.arch.fence_proxy("async.shared", space="cta")

    def make_sums(self, shape):
        """The sums, a block's, and what the sums are to be multiplied by before that is added."""
        held = cute.make_rmem_tensor(2, Float32)
        return cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32), held

    def clear(self, sums):
        sums[0].fill(0.0)
        sums[2].fill(1.0)

    def total(self, sums, at):
        return sums[0][at] * sums[2][at // 2 % 2] + sums[1][at]

    def multiply_pv(self, sums, p, rv, stage):
        mma = self.mma_pv()
        for block in range(self.tile_n // self.depth):
            mma.set(warpgroup.Field.ACCUMULATE, block != 0)
            cute.gemm(mma, sums[1], p[None, None, block], rv[None, None, block, stage], sums[1])
        warpgroup.commit_group()

    def soften(self, s, rows, scale, first, masked, as_integers=False, which=(0, 1)):
        softmax(
            *(s, *rows, self.limited(scale), first, masked, self.lift),
            *(not self.counted, as_integers, which),
        )

    @cute.jit
    def absorb(
        self, s, sums, p, rows, scale, masked: cutlass.Constexpr[bool], v_read, v_ring, lse, batch
    ):
        """Overrides the 16-bit step. The warps of a warpgroup may compare in different ways, but
        must wait for products by one instruction, so the wait stands outside of the branches."""
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
    def count(self, s, rows, lse, first: cutlass.Constexpr[bool]):
        """Exact sums are only for who asks for their logarithm."""
        if const_expr(self.counted):
            if lse.toint() != 0:
                for r in cutlass.range_constexpr(2):
                    add_up(s, rows[1], rows[2], r, first)

    @cute.jit
    def normalize(self, sums, rescale, gain):
        if const_expr(self.counted):
            for r in cutlass.range_constexpr(2):
                rescale[r] = inverse(self.total(sums, self.d // 2 + 2 * r)) * gain

    @cute.jit
    def finish(self, s, sums, p, rows, lse):
        self.to_operand(s, p)
        for i in cutlass.range_constexpr(cute.size(sums[0])):
            sums[0][i] = self.total(sums, i)
        for r in cutlass.range_constexpr(2):
            sums[2][r] = rows[2][r]
        self.count(s, rows, lse, False)

    def take_turn(self, wg):
        if self.turns:
            super().take_turn(wg)

    def give_turn(self, wg):
        if self.turns:
            super().give_turn(wg)

    def to_operand(self, s, p):
        """Of 16 keys, a thread's two and the two 8 further on are neighbours in v."""
        words = cute.recast_tensor(p, Int32)
        for i in range(cute.size(s) // 4):
            first = i // 2 * 8 + i % 2 * 2
            words[i] = cute.arch.inline_ptx(
                "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
                "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
                write_only_types=[Int32],
                read_only_args=[s[first], s[first + 1], s[first + 4], s[first + 5]],
            )

    def scales(self, factors, entry, head, sizes, scale, slope):
        batch, heads, kv_heads = sizes
        at = entry * kv_heads + head // (heads // kv_heads)
        mine = factors + 2 * cutlass.min(at, batch * kv_heads - 1)
        of_scores, of_values = mine.load(), (mine + 1).load()
        if const_expr(self.capped):
            return float_from_bits(scale), float_from_bits(slope) * of_scores, of_values
        scale = float_from_bits(scale) * of_scores
        return scale if self.held == "half" else with_limit(scale, self.lift), None, of_values

    def limited(self, scale):
        """With the limit, for which those tiles have no registers from one use to the next."""
        return with_limit(scale, self.lift) if self.held == "half" and not self.capped else scale


def tile_columns(tile_n):
    """Room for a block's keys in a row of transposed v: narrower swizzles are slow to copy."""
    return (tile_n + 63) // 64 * 64


def swizzle(row_bytes):
    """The widest that rows of so many bytes are made of."""
    return next(width for width in (128, 64) if row_bytes % width == 0)
