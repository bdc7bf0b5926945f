# SPDX-License-Identifier: Apache-2.0
"""Stores a warpgroup's sums: 64 rows of a tile, each to its element's row of the result.

`up` with block scales may store float8 with a scale per 1x128 values, as fp8_quantize makes them. A
tile of 128 columns has all values of a scale, so they stay in registers: fp8_quantize would read
and write them again (at T = 4096, k = 8, I = 1024: 134 MB). They are rounded to bfloat16 first, so
that the results have the same bits, except for SiLU (moe_activations_cute.py).
"""

import cutlass
import cutlass.cute as cute
from block_scales_cute import SCALE_BLOCK
from cutlass import Float32, Int32, Int64, const_expr
from gemm_parts_cute import result_copies, result_piece
from linear_layouts_cute import EPI, ROW, WARPGROUP
from moe_arguments_cute import address
from moe_scales_cute import (
    finish,
    list_scales,
    listed_scales,
    read_column_scales,
    scales_of_columns,
)
from moe_variant_cute import CONSUMERS, tile_layout


@cute.jit
def put_out(v, p, storage, thread, consumer, acc, facts, first_column, slots_of, scales):
    """A warpgroup's sums to their elements' rows, or to the rows of block `slots_of` if that is
    not negative. A warp's 16 rows of 64 columns go through its own shared memory, so that 8
    lanes store 128 neighbouring bytes."""
    rows_scales, columns_scales, of_columns = scales
    elements = p.elements
    lane, wg_thread = thread % 32, thread % WARPGROUP
    layout = tile_layout(v.out_dtype, EPI, CONSUMERS * v.pieces)
    _, r2s, to_sy, piece = result_copies(v.out_dtype, storage.y, layout, wg_thread)
    if const_expr(v.chunk < EPI):
        piece.fill(0.0)
    if const_expr(v.lists_scales):
        list_scales(v, storage, consumer, columns_scales, thread)
    vector = cute.make_layout(8)
    lower = True
    if const_expr(v.pingpong):
        lower = cute.arch.vote_any_sync(facts[4] < elements)
    y_row = wg_thread // 32 * 16 + lane // 8  # and every fourth after it
    starts = cute.make_rmem_tensor(4, Int64)  # this lane's rows of the result; -1 for padding
    for i in cutlass.range_constexpr(4):
        owner = _owner(facts, i)
        starts[i] = Int64(-1)
        if owner < elements:
            if const_expr(v.up):
                if slots_of >= 0:
                    owner = slots_of * v.tile_m + y_row + i * 4
                    if const_expr(not v.pingpong):
                        owner += consumer * EPI
            starts[i] = Int64(owner) * p.rows
    for chunk in cutlass.range_constexpr(v.width // v.chunk):
        first = first_column + chunk * v.chunk
        factors = columns_scales
        if const_expr(v.lists_scales):
            factors = listed_scales(v, storage, consumer, chunk * v.chunk, lane)
        elif const_expr(chunk > 0):
            factors = scales_of_columns(v)
            read_column_scales(v, p, factors, *of_columns, first, lane)
        at = chunk * (v.chunk // 2)
        finish(v, piece, acc, factors, rows_scales[0], at, 0)
        # With few tokens the lower 8 rows of a warp are padding.
        if const_expr(not v.pingpong) or lower:
            finish(v, piece, acc, factors, rows_scales[1], at, 1)
        # With two pieces of shared memory, all lanes have read the one before the last.
        if const_expr(v.pieces == 1):
            cute.arch.sync_warp()
        buffer = consumer * v.pieces + chunk % v.pieces
        cute.copy(r2s, piece, to_sy[None, None, None, buffer])
        cute.arch.sync_warp()
        from_y = storage.y.data_ptr() + buffer * (EPI * EPI)
        at_column = first + lane % 8 * 8
        for i in cutlass.range_constexpr(4):
            source = result_piece(from_y, y_row + i * 4, lane)
            values = cute.make_tensor(source.align(16), vector)
            if (starts[i] >= 0) & (at_column < p.rows) & (lane % 8 * 8 < v.chunk):
                to = address(p.out) + (starts[i] + at_column) * (v.out_dtype.width // 8)
                cute.make_tensor(_aligned(to, v.out_dtype), vector).store(values.load())


@cute.jit
def put_out_float8(v, p, storage, thread, consumer, sums, facts, first_column, slots_of):
    """A warpgroup's sums; a warp's 16 rows of 128 bytes go through its own shared memory."""
    lane, warp = thread % 32, thread % WARPGROUP // 32
    from_y = storage.y.data_ptr() + consumer * v.pieces * (EPI * EPI)
    bytes_y = from_y.toint()
    half = cute.size(sums) // 2
    cute.arch.sync_warp()  # all lanes have read the previous tile's
    for lower in cutlass.range_constexpr(2):
        row = warp * 16 + lower * 8 + lane // 4
        largest = Int32(0)  # two magnitudes, as bfloat16
        for i in cutlass.range_constexpr(0, half, 2):
            if const_expr(i // 2 % 2 == lower):
                partners = (sums[half + i], sums[half + i + 1])
                made = v.act_before_float8((sums[i], sums[i + 1]), partners)
                sums[i], sums[i + 1], largest = _rounded(*made, largest)
        for lanes in (1, 2):
            largest = _larger(largest, _from_lane(largest, lanes))
        scale, inverse = _scale_of(largest)
        for i in cutlass.range_constexpr(0, half, 2):
            if const_expr(i // 2 % 2 == lower):
                column = i // 4 * 8
                at = row * ROW + (column // 16 ^ row % 8) * 16 + column % 16 + lane % 4 * 2
                _store_pair(bytes_y + at, sums[i] * inverse, sums[i + 1] * inverse)
        element = facts[3 + lower]
        if (element < p.elements) & (lane % 4 == 0):
            owner = element
            if slots_of >= 0:
                owner = slots_of * v.tile_m + consumer * EPI + row
            to = Int64(owner) * (p.rows // SCALE_BLOCK) + first_column // SCALE_BLOCK
            (p.out_scale + to).store(scale)
    cute.arch.sync_warp()
    words = cute.make_layout(4)
    for i in cutlass.range_constexpr(4):
        at_row = warp * 16 + lane // 8 + i * 4
        source = result_piece(from_y, at_row, lane)
        values = cute.make_tensor(cute.recast_ptr(source, dtype=Int32).align(16), words)
        owner = _owner(facts, i)
        if owner < p.elements:
            if slots_of >= 0:
                owner = slots_of * v.tile_m + consumer * EPI + at_row
            to = Int64(owner) * p.rows + (first_column + lane % 8 * 16)  # in bytes
            cute.make_tensor(_aligned(address(p.out) + to, Int32), words).store(values.load())


def _aligned(to, dtype):
    """A pointer to 16 bytes in global memory."""
    return cute.make_ptr(dtype, to, cute.AddressSpace.gmem, assumed_align=16)


@cute.jit
def _owner(facts, i):
    """The element of a warp's row lane / 8 + i * 4, from the lanes that hold it for their sums."""
    return cute.arch.shuffle_sync(facts[3 + i // 2], cute.arch.lane_idx() // 8 * 4 + i % 2 * 16)


def _rounded(first, second, largest):
    """Two values rounded to bfloat16, and the largest magnitudes with theirs. Rounding one value
    alone takes four times as long."""
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


def _from_lane(value, lanes):
    return cute.arch.inline_ptx(
        f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {lanes}, 31, -1;",
        write_only_types=[Int32],
        read_only_args=[value],
    )


def _scale_of(largest):
    """The scale max(largest / 448, 2^-126), where NaN stays NaN, and its inverse. `largest` has two
    bfloat16."""
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
    """Two values to shared memory, as float8_e4m3fn."""
    cute.arch.inline_ptx(
        "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, {$r2}, {$r1}; "
        "st.shared.b16 [{$r0}], pair; }",
        read_only_args=[address, first, second],
    )
