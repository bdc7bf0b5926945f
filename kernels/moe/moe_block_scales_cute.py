# SPDX-License-Identifier: Apache-2.0
"""Products of float8 with a scale of each 1x128 values of x and 128x128 of weights.

A step of the ring has 128 values of a row, so its products have one scale a row and 128 columns:
they meet in a second set of sums, which also keeps float32's precision where the tensor cores add
with fewer bits. A half of a tile is scaled while the other one is multiplied; a wide one, whose
sums leave no registers for that, while the other warpgroup multiplies.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from moe_layouts_cute import SCALE_BLOCK
from moe_scales_cute import MoeScales


class MoeBlockScales(MoeScales):
    @cute.jit
    def scales_of_blocks(self, facts, factors, of_weights, tile, elements, slot):
        """Where this lane's scale is, and the one of a tile's first step. Four lanes share two rows
        of sums: they have a scale each, of these rows and of the halves' weights. They come from
        memory: who asks for them before its turn gets them while the other warpgroup multiplies."""
        x_scale, x_scale_step, divide, _ = factors
        w_scale, w_scale_expert, w_scale_step, second = of_weights
        expert, column = tile
        which = cute.arch.lane_idx() % 4
        at = 2 + self.wg_rows // 32
        row = facts[at] if which == 0 else facts[at + 1]
        row = cutlass.min(row, elements - 1) // divide  # those of padding leave nothing
        if const_expr(self.by_boxes):
            row = slot + which * 8
        place = x_scale.toint() + Int64(row) * x_scale_step * 4
        if which >= 2:
            row = column * self.width
            if const_expr(self.scale_a_half):
                row += (which - 2) * second
            # Of a last tile `down` may have one half only.
            of_row = cutlass.min(row // SCALE_BLOCK * w_scale_step, w_scale_expert - w_scale_step)
            of_expert = Int64(cutlass.max(expert, 0)) * w_scale_expert
            place = w_scale.toint() + (of_expert + of_row) * 4
        return place, _load(place)

    @cute.jit
    def multiply_blocks(self, mmas, fragments, ring, place, ahead):
        """A tile's steps; the place in the ring after them."""
        accs, sums, rx, rw = fragments
        full, empty, index, phase, steps = ring
        now = cute.make_rmem_tensor(4, Float32)
        for step in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(full + index, phase)
            # The gathered rows were not written by the copy engine.
            cute.arch.fence_proxy("async.shared", space="cta")
            self.multiply_half(mmas, accs, rx, rw, 0, index)
            if const_expr(not self.in_turn):
                self.multiply_half(mmas, accs, rx, rw, 1, index)
            following = cutlass.min(step + 1, steps - 1)
            for i in cutlass.range_constexpr(4):
                now[i] = cute.arch.shuffle_sync(ahead, cute.arch.lane_idx() // 4 * 4 + i)
            # Not before the fence: it waits for loads.
            ahead = _load(place + Int64(following) * 4)
            warpgroup.wait_group(0 if const_expr(self.in_turn) else 1)
            self.scale_half(accs, sums, now, 0)
            if const_expr(self.in_turn):
                self.multiply_half(mmas, accs, rx, rw, 1, index)
            warpgroup.wait_group(0)
            self.release(empty, index)
            self.scale_half(accs, sums, now, 1)
            index, phase = self.next(index, phase)
        return index, phase

    @cute.jit
    def multiply_half(self, mmas, accs, rx, rw, half, index):
        start, mma = mmas
        warpgroup.fence()
        for at_k in cutlass.range_constexpr(cute.size(rx, mode=[2])):
            a, b = rx[None, None, at_k, index], rw[None, None, at_k, 2 * index + half]
            cute.gemm(start if const_expr(at_k == 0) else mma, accs[half], a, b, accs[half])
        warpgroup.commit_group()

    @cute.jit
    def scale_half(self, accs, sums, scales, half):
        acc = accs[half]
        of_weights = scales[2 + (half if const_expr(self.scale_a_half) else 0)]
        by_row = [scales[0] * of_weights, scales[1] * of_weights]
        for i in cutlass.range_constexpr(cute.size(acc)):
            sums[half * cute.size(acc) + i] += acc[i] * by_row[i // 2 % 2]


def _load(address):
    return cute.arch.inline_ptx(
        "ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )
