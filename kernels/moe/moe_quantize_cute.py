# SPDX-License-Identifier: Apache-2.0
"""`up`'s rows as float8 with a scale of each 1x128 values, as fp8_quantize makes them.

A tile of 128 columns has all of a scale's values: what fp8_quantize would read and write again
(at T = 4096, k = 8, I = 1024: 134 MB) stays in registers. Values are rounded to bfloat16 first, so
that the results are the same bits, but SiLU's: see moe_activations_cute.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from moe_layouts_cute import EPI, ROW, SCALE_BLOCK, WARPGROUP
from moe_out_cute import MoeOut, aligned


class MoeQuantize(MoeOut):
    @cute.jit
    def put_out_quantized(
        self,
        thread,
        consumer,
        storage,
        sums,
        facts,
        first_column,
        rows,
        outs,
        slots_of,
        elements,
    ):
        """A tile's sums, as put_out; a warp's 16 rows of 128 bytes by its own shared memory."""
        lane, warp = thread % 32, thread % WARPGROUP // 32
        out, out_scale = outs
        from_y = storage.y.data_ptr() + consumer * self.pieces * (EPI * EPI)
        bytes_y = from_y.toint()
        half = cute.size(sums) // 2
        cute.arch.sync_warp()  # with those who read it for the tile before
        for lower in cutlass.range_constexpr(2):
            row = warp * 16 + lower * 8 + lane // 4
            largest = Int32(0)  # magnitudes of two, as bfloat16
            for i in cutlass.range_constexpr(0, half, 2):
                if const_expr(i // 2 % 2 == lower):
                    partners = (sums[half + i], sums[half + i + 1])
                    made = self.act_before_float8((sums[i], sums[i + 1]), partners)
                    sums[i], sums[i + 1], largest = _rounded(*made, largest)
            for lanes in (1, 2):
                largest = _larger(largest, _of_lane_across(largest, lanes))
            scale, inverse = _scale_of(largest)
            for i in cutlass.range_constexpr(0, half, 2):
                if const_expr(i // 2 % 2 == lower):
                    column = i // 4 * 8
                    at = row * ROW + (column // 16 ^ row % 8) * 16 + column % 16 + lane % 4 * 2
                    _store_pair(bytes_y + at, sums[i] * inverse, sums[i + 1] * inverse)
            element = facts[2 + self.wg_rows // 32 + lower]
            if (element < elements) & (lane % 4 == 0):
                owner = element
                if slots_of >= 0:
                    owner = slots_of * self.tile_m + consumer * EPI + row
                to = Int64(owner) * (rows // SCALE_BLOCK) + first_column // SCALE_BLOCK
                (out_scale + to).store(scale)
        cute.arch.sync_warp()
        words = cute.make_layout(4)
        for i in cutlass.range_constexpr(4):
            at_row = warp * 16 + lane // 8 + i * 4
            source = from_y + (at_row * EPI + (lane % 8 ^ at_row % 8) * 8)
            values = cute.make_tensor(cute.recast_ptr(source, dtype=Int32).align(16), words)
            owner = self.owner(facts, i)
            if owner < elements:
                if slots_of >= 0:
                    owner = slots_of * self.tile_m + consumer * EPI + at_row
                to = Int64(owner) * rows + (first_column + lane % 8 * 16)  # in bytes
                cute.make_tensor(aligned(out.toint() + to, Int32), words).store(values.load())


def _rounded(first, second, largest):
    """To bfloat16, and the largest magnitudes with them; together, since one alone takes four times
    as long."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 pair, size, most; mov.b32 most, {$r2}; cvt.rn.bf16x2.f32 pair, {$r1}, {$r0}; "
        "abs.bf16x2 size, pair; max.NaN.bf16x2 {$w2}, most, size; "
        "shl.b32 {$w0}, pair, 16; and.b32 {$w1}, pair, 0xffff0000; }",
        write_only_types=[Float32, Float32, Int32],
        read_only_args=[first, second, largest],
    )


def _larger(first, second):
    return cute.arch.inline_ptx(
        "max.NaN.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[first, second],
    )


def _of_lane_across(value, lanes):
    return cute.arch.inline_ptx(
        f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {lanes}, 31, -1;",
        write_only_types=[Int32],
        read_only_args=[value],
    )


def _scale_of(largest):
    """max(largest / 448, 2^-126), NaN stays NaN; and what it is to be multiplied by. `largest`: of
    two bfloat16."""
    return cute.arch.inline_ptx(
        "{ .reg .pred small; .reg .f32 value, other; .reg .b32 bits; "
        "shl.b32 bits, {$r0}, 16; mov.b32 value, bits; "
        "and.b32 bits, {$r0}, 0xffff0000; mov.b32 other, bits; max.NaN.f32 value, value, other; "
        "div.rn.f32 value, value, 0f43E00000; setp.lt.f32 small, value, 0f00800000; "
        "@small mov.f32 value, 0f00800000; mov.f32 {$w0}, value; rcp.rn.f32 {$w1}, value; }",
        write_only_types=[Float32, Float32],
        read_only_args=[largest],
    )


def _store_pair(address, first, second):
    """As float8_e4m3fn, to shared memory."""
    cute.arch.inline_ptx(
        "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, {$r2}, {$r1}; "
        "st.shared.b16 [{$r0}], pair; }",
        read_only_args=[address, first, second],
    )
