# SPDX-License-Identifier: Apache-2.0
"""From a tile's sums to values: scales of float8, routing weights, the activation."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from moe_layouts_cute import WARPGROUP
from moe_wide_loads_cute import MoeWideLoads

_LIST = 3  # named barriers 3 and 4: a warpgroup's list of scales


class MoeScales(MoeWideLoads):
    def columns_scales(self):
        """Of this lane's columns of a chunk and of their partners; or two of a thread, of which
        each tile's are listed in shared memory."""
        columns = 1 if self.lists_scales else self.chunk // 8 * 2
        return cute.make_rmem_tensor((columns, 2), Float32)

    @cute.jit
    def scales_of_rows(self, scales, facts, factors, elements):
        x_scale, x_scale_step, divide, weights = factors
        for i in cutlass.range_constexpr(self.wg_rows // 32):
            scales[i] = 1.0
            element = facts[2 + self.wg_rows // 32 + i]
            if element < elements:
                if const_expr(self.scaled):
                    scales[i] = (x_scale + element // divide * x_scale_step).load()
                if const_expr(not self.up):
                    if weights.toint() != 0:
                        scales[i] *= (weights + element).load()

    @cute.jit
    def scales_of_columns(self, scales, of_columns, first, second, thread):
        """Those of columns from `first` on; of a chunk, or for the list of a tile."""
        scale, step, rows = of_columns
        if const_expr(self.scaled):
            scales.fill(1.0)
            for i in cutlass.range_constexpr(cute.size(scales, mode=[0])):
                at = first + thread % WARPGROUP
                if const_expr(not self.lists_scales):
                    at = first + i // 2 * 8 + thread % 4 * 2 + i % 2
                if at < rows:
                    scales[i, 0] = (scale + at * step).load()
                    if const_expr(self.up):
                        scales[i, 1] = (scale + (at + second) * step).load()
                if const_expr(self.lists_scales and not self.up):
                    if at + second < rows:
                        scales[i, 1] = (scale + (at + second) * step).load()

    @cute.jit
    def list_scales(self, storage, consumer, scales, thread):
        """By a warpgroup, before it reads them: of the first half of its tile, then of the other.
        Where each chunk asks memory for its own, it waits behind the stores of the one before."""
        to = self.scales_list(storage, consumer) + thread % WARPGROUP
        sync(_LIST + consumer, WARPGROUP)  # with the tile before
        to.store(scales[0, 0])
        (to + self.half).store(scales[0, 1])
        sync(_LIST + consumer, WARPGROUP)

    @cute.jit
    def listed_scales(self, storage, consumer, first, lane):
        """Of this lane's columns of a chunk, and of their partners."""
        scales = cute.make_rmem_tensor((self.chunk // 8 * 2, 2), Float32)
        source = self.scales_list(storage, consumer) + (first + lane % 4 * 2)
        for i in cutlass.range_constexpr(0, self.chunk // 8):
            for half in cutlass.range_constexpr(2 if const_expr(self.up) else 1):
                at = (source + (half * self.half + i * 8)).align(8)
                pair = cute.make_tensor(at, cute.make_layout(2)).load()
                scales[i * 2, half], scales[i * 2 + 1, half] = pair[0], pair[1]
        return scales

    def scales_list(self, storage, consumer):
        words = storage.routing.data_ptr() + (self.turn_words() + consumer * self.tile_n)
        return cute.recast_ptr(words, dtype=Float32)

    @cute.jit
    def finish(self, piece, acc, factors, of_row, at, lower):
        """A piece's values of this lane's upper or lower row, from sums `at` on."""
        for i in cutlass.range_constexpr(2 * lower, self.chunk // 2, 4):
            values = [acc[at + i + j] for j in range(2)]
            columns = [i // 4 * 2 + j for j in range(2)]
            if const_expr(self.scaled or not self.up):
                values = [value * of_row for value in values]
            if const_expr(self.scaled):
                values = [values[j] * factors[columns[j], 0] for j in range(2)]
            if const_expr(self.up):
                partners = [acc[at + i + j + self.half // 2] for j in range(2)]
                if const_expr(self.scaled):
                    partners = [partners[j] * of_row * factors[columns[j], 1] for j in range(2)]
                values = self.act(values, partners)
            for j in cutlass.range_constexpr(2):
                piece[i + j] = values[j].to(self.out_dtype)


def sync(barrier, threads):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
