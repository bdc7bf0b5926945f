# SPDX-License-Identifier: Apache-2.0
"""From a tile's sums to values: scales of float8, routing weights, the activation."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from moe_wide_loads_cute import MoeWideLoads


class MoeScales(MoeWideLoads):
    def columns_scales(self):
        return cute.make_rmem_tensor((self.chunk // 8 * 2, 2), Float32)

    @cute.jit
    def scales_of_rows(self, scales, facts, factors, elements):
        x_scale, x_scale_step, divide, weights = factors
        for i in cutlass.range_constexpr(self.wg_rows // 32):
            scales[i] = 1.0
            element = facts[2 + self.wg_rows // 32 + i // 2 * 6 + 4 + i % 2]
            if element < elements:
                if const_expr(self.scaled):
                    scales[i] = (x_scale + element // divide * x_scale_step).load()
                if const_expr(not self.up):
                    if weights.toint() != 0:
                        scales[i] *= (weights + element).load()

    @cute.jit
    def scales_of_columns(self, scales, of_columns, column, chunk, rows, second, lane):
        """Of this lane's columns of a chunk, and of their partners."""
        scale, step = of_columns
        if const_expr(self.scaled):
            scales.fill(1.0)
            for i in cutlass.range_constexpr(self.chunk // 8 * 2):
                at = column * self.width + chunk * self.chunk + i // 2 * 8 + lane % 4 * 2 + i % 2
                if at < rows:
                    scales[i, 0] = (scale + at * step).load()
                    if const_expr(self.up):
                        scales[i, 1] = (scale + (at + second) * step).load()

    @cute.jit
    def finish(self, piece, acc, factors, of_row, at, lower):
        """A piece's values of this lane's upper or lower row, from sums `at` on."""
        for i in cutlass.range_constexpr(self.chunk // 2):
            if const_expr(i // 2 % 2 == lower):
                value = acc[at + i]
                if const_expr(self.scaled or not self.up):
                    value = value * of_row
                if const_expr(self.scaled):
                    value = value * factors[i // 4 * 2 + i % 2, 0]
                if const_expr(self.up):
                    partner = acc[at + i + self.half // 2]
                    if const_expr(self.scaled):
                        partner = partner * of_row * factors[i // 4 * 2 + i % 2, 1]
                    value = self.act(value, partner)
                piece[i] = value.to(self.out_dtype)
