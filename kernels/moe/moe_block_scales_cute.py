# SPDX-License-Identifier: Apache-2.0
"""Products of float8 with a scale of each 1x128 values of x and 128x128 of weights.

A step of the ring has 128 values of a row, so its products have one scale a row and 128 columns:
they meet in a second set of sums, which also keeps float32's precision where the tensor cores add
with fewer bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from moe_wide_loads_cute import MoeWideLoads

_BLOCK = 128


class MoeBlockScales(MoeWideLoads):
    @cute.jit
    def multiply_blocks(self, mma, fragments, ring, facts, factors, of_weights, tile, elements):
        """A tile's steps; the place in the ring after them."""
        start, acc, sums, rx, rw = fragments
        full, empty, index, phase, steps = ring
        x_scale, x_scale_step, divide, _ = factors
        w_scale, w_scale_expert, w_scale_step, second = of_weights
        expert, column = tile
        halves = 2 if const_expr(self.up) else 1
        places = []
        for i in cutlass.range_constexpr(2):  # this lane's rows; those of padding leave nothing
            element = cutlass.min(facts[2 + self.wg_rows // 32 + 4 + i], elements - 1)
            places.append(x_scale + Int64(element // divide) * x_scale_step)
        for half in cutlass.range_constexpr(halves):
            row = (column * self.width + half * second) // _BLOCK
            places.append(w_scale + (Int64(expert) * w_scale_expert + row * w_scale_step))
        now = cute.make_rmem_tensor(2 + halves, Float32)
        ahead = cute.make_rmem_tensor(2 + halves, Float32)
        for i in cutlass.range_constexpr(2 + halves):
            ahead[i] = places[i].load()
        for step in cutlass.range(steps, unroll=1):
            following = cutlass.min(step + 1, steps - 1)
            for i in cutlass.range_constexpr(2 + halves):
                now[i] = ahead[i]
                ahead[i] = (places[i] + following).load()
            cute.arch.mbarrier_wait(full + index, phase)
            # The gathered rows were not written by the copy engine.
            cute.arch.fence_proxy("async.shared", space="cta")
            warpgroup.fence()
            for at_k in cutlass.range_constexpr(cute.size(rx, mode=[2])):
                at = (None, None, at_k, index)
                cute.gemm(start if const_expr(at_k == 0) else mma, acc, rx[at], rw[at], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.release(empty, index)
            for half in cutlass.range_constexpr(halves):
                for i in cutlass.range_constexpr(cute.size(acc) // halves):
                    at = half * (cute.size(acc) // halves) + i
                    sums[at] += acc[at] * (now[i // 2 % 2] * now[2 + half])
            index, phase = self.next(index, phase)
        return index, phase
