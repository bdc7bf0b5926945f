# SPDX-License-Identifier: Apache-2.0
"""Scales of blocks on their way to the ring, beside the rows and weights that they are of.

A step has a scale for each row of its tile and for each half of its weights. Who multiplies finds
them in shared memory, and so can read those of a step while the one before it is multiplied: from
memory they would have to be on their way longer, and each step's fence waits for what is.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from moe_layouts_cute import SCALE_BLOCK
from moe_tiles_cute import MoeTiles


class MoeScaleLoads(MoeTiles):
    def scales_of_stage(self, storage, index):
        """Where the ring has a step's: of the rows, then of the two halves."""
        first = self.routing_words() - self.stages * self.stage_scales
        return storage.routing.data_ptr() + (first + index * self.stage_scales)

    @cute.jit
    def scale_of_half(self, of_weights, expert, column, half):
        """Where a tile's first scale of a half of its weights is, counted in scales."""
        _, w_scale_expert, w_scale_step, second = of_weights
        row = column * self.width
        if const_expr(self.scale_a_half):
            row += half * second
        # Of a last tile `down` may have one half only.
        of_row = cutlass.min(row // SCALE_BLOCK * w_scale_step, w_scale_expert - w_scale_step)
        return cutlass.max(expert, 0) * w_scale_expert + of_row

    @cute.jit
    def load_scales(
        self, lane, storage, full, empty, routing, place, k, progress, x_scale, of_weights
    ):
        """A warp, where rows are in the routing's order and come by boxes. It waits for their block
        itself: that drops lines of the L1, through which these copies read."""
        x_scale, x_scale_step = x_scale
        block, column, expert = self.in_order(place[1], routing, place[4])
        entry = Int32(0)
        index, phase = Int32(0), Int32(1)
        while block < routing[2]:
            steps = routing[3] if expert >= 0 else Int32(0)
            if (progress.toint() != 0) & (steps > 0):
                self.wait_for(progress, block, k)
            of_row = (block * self.tile_m + lane) * x_scale_step
            of_half = self.scale_of_half(of_weights, expert, column, lane)
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                to = self.scales_of_stage(storage, index).toint()
                for i in cutlass.range_constexpr(self.tile_m // 32):
                    at = of_row + i * 32 * x_scale_step + step
                    copy_scale(to + (lane + i * 32) * 4, x_scale.toint() + Int64(at) * 4)
                at = of_weights[0].toint() + Int64(of_half + step) * 4
                copy_scale(to + (self.tile_m + lane) * 4, at, lane < 2)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
                index, phase = self.next(index, phase)
            block, column, expert = self.take(storage, entry)
            entry += 1

    @cute.jit
    def copy_scales(self, thread, row, storage, index, x_scale, of_row, of_weights, of_half):
        """Of one row a thread, whose scale is at `of_row` or nowhere, and of the halves."""
        to = self.scales_of_stage(storage, index).toint()
        size = Int32(4) if of_row >= 0 else Int32(0)
        copy_scale(to + row * 4, x_scale.toint() + Int64(cutlass.max(of_row, 0)) * 4, size=size)
        to_half = to + (self.tile_m + thread) * 4
        copy_scale(to_half, of_weights[0].toint() + Int64(of_half) * 4, thread < 2)


def copy_scale(to, address, real=None, size=4):
    """To shared memory; of size 0, zero."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};",
        read_only_args=[to, address, Int32(size)],
        predicate=real,
    )
