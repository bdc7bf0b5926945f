# SPDX-License-Identifier: Apache-2.0
"""Products of float8 with a scale of each 1x128 values of x and 128x128 of weights.

A step of the ring has 128 values of a row, so its products have one scale a row and 128 columns:
they meet in a second set of sums, which also keeps float32's precision where the tensor cores add
with fewer bits. A half of a tile is scaled while the other one is multiplied.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from moe_scales_cute import MoeScales

_BLOCK = 128


class MoeBlockScales(MoeScales):
    @cute.jit
    def scales_of_blocks(self, facts, factors, of_weights, tile, elements, slot):
        """Where a tile's scales are, and those of its first step. They come from memory: who asks
        for them before its turn gets them while the other warpgroup multiplies."""
        x_scale, x_scale_step, divide, _ = factors
        w_scale, w_scale_expert, w_scale_step, second = of_weights
        expert, column = tile
        places = []
        for i in cutlass.range_constexpr(2):  # this lane's rows; those of padding leave nothing
            row = cutlass.min(facts[2 + self.wg_rows // 32 + 4 + i], elements - 1) // divide
            if const_expr(self.by_boxes):
                row = slot + i * 8
            places.append(x_scale + Int64(row) * x_scale_step)
        for half in cutlass.range_constexpr(2 if const_expr(self.up) else 1):
            row = (column * self.width + half * second) // _BLOCK
            of_expert = Int64(cutlass.max(expert, 0)) * w_scale_expert
            places.append(w_scale + (of_expert + row * w_scale_step))
        ahead = cute.make_rmem_tensor(len(places), Float32)
        for i in cutlass.range_constexpr(len(places)):
            ahead[i] = places[i].load()
        return places, ahead

    @cute.jit
    def multiply_blocks(self, mmas, fragments, ring, places, ahead):
        """A tile's steps; the place in the ring after them."""
        accs, sums, rx, rw = fragments
        full, empty, index, phase, steps = ring
        now = cute.make_rmem_tensor(len(places), Float32)
        for step in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(full + index, phase)
            # The gathered rows were not written by the copy engine.
            cute.arch.fence_proxy("async.shared", space="cta")
            for half in cutlass.range_constexpr(2):
                self.multiply_half(mmas, accs, rx, rw, half, index)
            following = cutlass.min(step + 1, steps - 1)
            for i in cutlass.range_constexpr(len(places)):
                now[i] = ahead[i]
                ahead[i] = (
                    places[i] + following
                ).load()  # not before the fence: it waits for loads
            warpgroup.wait_group(1)
            self.scale_half(accs, sums, now, 0)
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
        of_weights = scales[3 if const_expr(self.up and half == 1) else 2]
        by_row = [scales[0] * of_weights, scales[1] * of_weights]
        for i in cutlass.range_constexpr(cute.size(acc)):
            sums[half * cute.size(acc) + i] += acc[i] * by_row[i // 2 % 2]
