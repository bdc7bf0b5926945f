# SPDX-License-Identifier: Apache-2.0
"""16-bit operands whose keys and values may come from a float8 cache with factors."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.attention.common.softmax import float_from_bits, with_limit
from kernels.attention.forward.operands import HalfOperands


class Factors(NamedTuple):
    """The factors of stored keys and values; a null pointer stands for 1."""

    k_scale: cute.Pointer
    v_scale: cute.Pointer
    k_scale_step: Int32  # from a head's to the next one's: 0 or 1
    v_scale_step: Int32


class PagedOperands(HalfOperands):
    def __init__(self, dtype, variant, widens=True):
        super().__init__(dtype, variant)
        self.widens = widens  # takes float8 caches

    def scales(self, factors, entry, head, problem):
        if not self.widens:
            return super().scales(factors, entry, head, problem)
        factors = Factors(*factors)
        # A part of a tile's keys has heads of its own.
        kv_head = head % problem.heads // (problem.heads // problem.kv_heads)
        of_keys = stored_factor(factors.k_scale, kv_head * factors.k_scale_step)
        of_values = stored_factor(factors.v_scale, kv_head * factors.v_scale_step)
        scale, slope = float_from_bits(problem.scale), float_from_bits(problem.slope)
        if self.variant.capped:
            return scale, slope * of_keys, of_values
        return with_limit(scale * of_keys), None, of_values


@cute.jit
def stored_factor(factors, at):
    factor = Float32(1.0)
    if factors.toint() != 0:
        factor = (factors + at).load()
    return factor
