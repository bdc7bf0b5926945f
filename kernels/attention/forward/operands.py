# SPDX-License-Identifier: Apache-2.0
"""Attention of 16-bit q, k and v: the parts of the forward kernel that depend on the operands'
type.

v has the same layout in shared as in global memory; the tensor cores read it transposed. They add
the products of all blocks to float32 sums in registers, which are rescaled when the maximum grows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from kernels.attention.common.layouts import (
    outer_coordinates,
    sequence_coordinates,
    staged_layout,
    transposed,
)
from kernels.attention.common.softmax import (
    float_from_bits,
    softmax,
    to_operand,
    with_limit,
)


class HalfOperands:
    """bfloat16 or float16, also for the result."""

    value_major = warpgroup.OperandMajorMode.MN
    depth = 16  # columns that one product multiplies
    counted = 0  # columns of ones beside v's
    lift = 0.0  # the largest probability's power of 2
    turns = True  # warpgroups start multiplying one after the other

    def __init__(self, dtype, variant):
        self.dtype = self.out_dtype = dtype
        self.variant = variant
        self.value_packed = variant.packed

    # The shared memory of v.

    def value_tile(self):
        return self.variant.tile_n, self.variant.d_v

    def value_layout(self):
        return staged_layout(self.dtype, *self.value_tile(), self.variant.stages)

    def value_matrix(self, keys):
        """The shape of one head's values in the map."""
        return keys, self.variant.d_v

    def value_coordinates(self, seq_k, heads, batch, hidden):
        return sequence_coordinates(seq_k, self.variant.d_v, heads, batch, hidden)

    def value_start(self, entry, keys, k_at, batch):
        """A sequence's place in the map, for `value_place`."""
        return k_at

    def value_place(self, block, head, start):
        """The coordinates of a block's tile."""
        return block, 0, head, *outer_coordinates(start, self.variant.packed)

    def value_operand(self, sv):
        """v as the right operand: columns down, keys across."""
        return transposed(sv)

    def prepare(self, storage, threads):
        """Writes to shared memory before the first copies arrive; nothing for 16 bits."""

    # Factors of scores and results.

    def scales(self, factors, entry, head, problem):
        """A tile's factors: of scores for a power of 2, of scores for the cap's tangent, and of
        results, unless None."""
        scale = float_from_bits(problem.scale)
        scale = scale if self.variant.capped else with_limit(scale)
        return scale, float_from_bits(problem.slope), None

    def limited(self, scale):
        """A tile's first factor as `softmax` and `largest` take it."""
        return scale

    # The sums of o, in registers.

    def make_sums(self, shape):
        return cute.make_rmem_tensor(shape, Float32)

    def clear(self, sums):
        sums.fill(0.0)

    def total(self, sums, at):
        return sums[at]

    def multiply_pv(self, mma, sums, p, rv, stage):
        """Starts sums += p v for a block of keys."""
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for block in range(self.variant.tile_n // self.depth):
            cute.gemm(mma, sums, p[None, None, block], rv[None, None, block, stage], sums)
        warpgroup.commit_group()

    # After a block's scores.

    def soften(self, s, rows, scale, first, masked):
        softmax(s, *rows, scale, first, masked, self.lift)

    def to_operand(self, s, p):
        to_operand(s, p, self.dtype)

    def count(self, s, rows, lse, first):
        """After a block's probabilities became an operand; `softmax` has added them up."""

    @cute.jit
    def absorb(
        self, s, sums, p, rows, scale, masked: cutlass.Constexpr[bool], v_read, v_ring, lse, batch
    ):
        """A block's softmax, while the values of the block before it are multiplied."""
        self.soften(s, rows, scale, False, masked)
        rescale = rows[2]
        warpgroup.wait_group(0)
        v_ring.consumer_release(v_read)
        self.to_operand(s, p)
        for i in cutlass.range_constexpr(cute.size(sums)):
            sums[i] = sums[i] * rescale[i // 2 % 2]

    def normalize(self, sums, rescale, gain):
        """The rows' factors of the result, where only the finished sums tell them."""
