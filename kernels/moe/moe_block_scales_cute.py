# SPDX-License-Identifier: Apache-2.0
"""Products of float8 with a scale of each 1x128 values of x and 128x128 of weights.

A step of the ring has 128 values of a row, so its products have one scale a row and 128 columns:
they meet in a second set of sums, which also keeps float32's precision where the tensor cores add
with fewer bits. A half of a tile is scaled while the other one is multiplied; a wide one, whose
sums leave no registers for that, while the other warpgroup multiplies.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warpgroup
from moe_scales_cute import MoeScales


class MoeBlockScales(MoeScales):
    @cute.jit
    def multiply_blocks(self, mmas, fragments, ring, storage, row, row_scales):
        """A tile's steps, at least one; the place in the ring after them. `row`: this lane's first.
        What a step waits for and looks up is done while the one before it is multiplied."""
        accs, sums, rx, rw = fragments
        full, empty, index, phase, steps = ring
        self.wait_for_step(full, index, phase)
        upper, lower, first, second = self.scales_of_step(storage, index, row)
        for step in cutlass.range(steps, unroll=1):
            self.multiply_half(mmas, accs, rx, rw, 0, index)
            if const_expr(not self.in_turn):
                self.multiply_half(mmas, accs, rx, rw, 1, index)
            if const_expr(self.looks_late and not self.up):
                if step == steps // 2:  # what was asked for before is here by now
                    self.settle(row_scales)
            by_first = (upper * first, lower * first)
            by_second = (upper * second, lower * second)
            if const_expr(not self.scale_a_half):
                by_second = by_first
            warpgroup.wait_group(0 if const_expr(self.in_turn) else 1)
            self.scale_half(accs, sums, by_first, 0)
            if const_expr(self.in_turn):
                self.multiply_half(mmas, accs, rx, rw, 1, index)
            now = index
            index, phase = self.next(index, phase)
            if step + 1 < steps:
                self.wait_for_step(full, index, phase)
                upper, lower, first, second = self.scales_of_step(storage, index, row)
            warpgroup.wait_group(0)
            self.release(empty, now)
            self.scale_half(accs, sums, by_second, 1)
        return index, phase

    def settle(self, row_scales):
        """Waits for values that memory was asked for: their first use would also wait for all that
        is asked for until then."""
        for i in range(cute.size(row_scales)):
            row_scales[i] = cute.arch.shuffle_sync(row_scales[i], cute.arch.lane_idx())

    @cute.jit
    def wait_for_step(self, full, index, phase):
        cute.arch.mbarrier_wait(full + index, phase)
        if const_expr(not self.by_boxes):  # then not all is the copy engine's
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def scales_of_step(self, storage, index, row):
        """Of this lane's two rows of sums, and of both halves of the weights."""
        at = cute.recast_ptr(self.scales_of_stage(storage, index), dtype=Float32)
        halves = (at + self.tile_m).align(8)
        pair = cute.make_tensor(halves, cute.make_layout(2)).load()
        return (at + row).load(), (at + (row + 8)).load(), pair[0], pair[1]

    @cute.jit
    def multiply_half(self, mmas, accs, rx, rw, half, index):
        start, mma = mmas
        warpgroup.fence()
        for at_k in cutlass.range_constexpr(cute.size(rx, mode=[2])):
            a, b = rx[None, None, at_k, index], rw[None, None, at_k, 2 * index + half]
            cute.gemm(start if const_expr(at_k == 0) else mma, accs[half], a, b, accs[half])
        warpgroup.commit_group()

    @cute.jit
    def scale_half(self, accs, sums, by_row, half):
        acc = accs[half]
        for i in cutlass.range_constexpr(cute.size(acc)):
            sums[half * cute.size(acc) + i] += acc[i] * by_row[i // 2 % 2]
