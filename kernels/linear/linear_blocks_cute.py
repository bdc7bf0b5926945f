# SPDX-License-Identifier: Apache-2.0
"""Block scales in linear's kernels: a scale per 1x128 values of x and 128x128 of w.

A stage of the ring has 128 values of K, so its products have one scale per row of x and 128 rows of
w. They start from zero, and are scaled and added to the sums in float32. That also limits the error
of the tensor cores' 13-bit accumulation to 128 products.

A tile of 256 columns has no registers for the products of both halves: one is scaled before the
other begins, while the other warpgroup multiplies. A tile of 128 rows for one warpgroup has halves
of 64 rows: one is scaled while the other is multiplied.

The scales of a stage are beside it in shared memory: tile_m for rows, then those of w. One warp
copies them. The consumer warps read them one step ahead.

Gated tiles have two scales of w too: that of the gates, and that of what they are for.

Tiles of 144 and 192 columns, which may begin in the middle of 128, have two scales of w. They serve
65 to 128 rows, with one product per step, if they fill whole waves. Those of 192 also serve narrow
w, with three products of 64 columns, each scaled while the next one is computed. Those of 96 serve
up to 64 rows likewise.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from activations_cute import ACTIVATIONS
from block_scales_cute import SCALE_BLOCK, add_scaled, copy_scale, fixed, start_products
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

LOADERS = 32  # threads that copy scales
FOUR = 4  # steps whose scales are loaded together
_OF_W = 4  # places for w's scales in a stage: up to two, and aligned
_FIRST = 5  # the barrier of a tile's first products
_CONSUMERS = 256  # threads
# Numbers of linear_act.h, chosen at run time, so that one kernel serves all activations.
_ACTIVATIONS = ((2, "silu"), (3, "gelu"), (4, "gelu_tanh"))


class BlockScales(NamedTuple):
    """The kernel's last parameters; x_step and w_step are from row to row of the scales."""

    across: Int32  # from the scale of 128 values of x to that of the next ones
    activation: Int32


def stage_words(tile_m):
    """Floats beside a stage."""
    return tile_m + _OF_W


def _row_of_w(kernel, first_column, lane, n):
    """The row of w's scales that a lane copies: of the tile's first columns, then of its last; of a
    gated tile, whose n is a multiple of 128, of the gates and then of what they are for."""
    if kernel.parts == 2:
        return first_column // SCALE_BLOCK + lane * (n // SCALE_BLOCK)
    return cutlass.min(first_column // SCALE_BLOCK + lane, (n - 1) // SCALE_BLOCK)


@cute.jit
def load_tile_scales(kernel, ring, state, steps, scales, p, sizes, first_row, first_column):
    """A warp: the scales of each of a tile's steps. Rows beyond the last one have its scales."""
    x_scale, w_scale, x_step, w_step = p
    m, n, across = sizes
    lane = cute.arch.lane_idx()
    of_x = cute.make_rmem_tensor(kernel.tile_m // 32, Int64)
    for i in cutlass.range_constexpr(kernel.tile_m // 32):
        row = cutlass.min(first_row + lane + i * 32, m - 1)
        of_x[i] = x_scale.toint() + Int64(row) * x_step * 4
    row_of_w = _row_of_w(kernel, first_column, lane, n)
    of_w = w_scale.toint() + Int64(row_of_w) * w_step * 4
    for step in cutlass.range(steps[0], steps[1], unroll=1):
        ring.sync_object_empty.wait(state.index, state.phase)
        to = (scales + state.index * stage_words(kernel.tile_m)).toint() + lane * 4
        for i in cutlass.range_constexpr(kernel.tile_m // 32):
            copy_scale(to + i * 128, of_x[i] + Int64(step) * across * 4)
        is_one = lane < kernel.scales_of_w
        copy_scale(to + kernel.tile_m * 4, of_w + Int64(step) * 4, is_one)
        cute.arch.cp_async_mbarrier_arrive_noinc(ring.producer_get_barrier(state))
        state.advance()
    return state


@cute.jit
def load_tile_scales_in_fours(
    kernel, ring, state, steps, scales, p, sizes, first_row, first_column
):
    """load_tile_scales by way of registers: the scales of four steps at a time.

    Rows of scales are often a multiple of 128 bytes apart. Copies of 4 bytes a row then meet the
    same bank of the L1 in each lane, 32 turns for 32 rows, while the tensor cores read shared
    memory in three of four cycles."""
    x_scale, w_scale, x_step, w_step = p
    m, n, across = sizes
    lane, part = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 1
    groups = kernel.tile_m // 64
    first_lane = part * (kernel.tile_m // 2) + lane
    of_x = cute.make_rmem_tensor((groups, FOUR), Float32)
    of_w = cute.make_rmem_tensor(FOUR, Float32)
    of_w.fill(0.0)
    words = stage_words(kernel.tile_m)
    to = cute.make_tensor(scales, cute.make_layout(kernel.stages * words))
    row_of_w = _row_of_w(kernel, first_column, lane, n)
    is_one = first_lane < kernel.scales_of_w
    start_of_x, start_of_w = x_scale.toint(), w_scale + Int64(row_of_w) * w_step
    of_all = start_of_x | Int64(x_step * 4) | Int64((across - 1) * 16)
    wide = (of_all | Int64((steps[0] | steps[1]) * 4)) % 16 == 0 and across == 1
    for first in cutlass.range(steps[0], steps[1], FOUR, unroll=1):
        for i in cutlass.range_constexpr(groups):
            row = cutlass.min(first_row + first_lane + i * 32, m - 1)
            of_row = x_scale + Int64(row) * x_step
            if wide:
                four = cute.make_tensor((of_row + first).align(16), cute.make_layout(FOUR)).load()
                for j in cutlass.range_constexpr(FOUR):
                    of_x[i, j] = four[j]
            else:
                for j in cutlass.range_constexpr(FOUR):
                    step = cutlass.min(first + j, steps[1] - 1)
                    of_x[i, j] = (of_row + Int64(step) * across).load()
        if is_one:
            for j in cutlass.range_constexpr(FOUR):
                of_w[j] = (start_of_w + cutlass.min(first + j, steps[1] - 1)).load()
        for j in cutlass.range_constexpr(FOUR):
            if first + j < steps[1]:
                ring.sync_object_empty.wait(state.index, state.phase)
                at = state.index * words + first_lane
                for i in cutlass.range_constexpr(groups):
                    to[at + i * 32] = of_x[i, j]
                if is_one:
                    to[at + kernel.tile_m] = of_w[j]
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ring.producer_get_barrier(state))
                state.advance()
    return state


@cute.jit
def multiply_steps(kernel, ring, read, steps, mmas, accs, sums, operands, scales, at):
    """A tile's steps, at least one; returns the stage behind them. `at`: this lane's first row of
    the tile, the tile's first column, and the warpgroup.

    Between two products of a warpgroup there are the first one's scaling and little else: a step
    asks for the next one's data while its last products are computed, and reads the next one's
    scales while those are scaled. A kernel that `overlaps` scales a part while it multiplies the
    next one. Of one that `staggers`, the second warpgroup begins a tile when the first one has its
    first products, so that one scales while the other multiplies."""
    row, column, consumer = at
    row, second = fixed(row), SCALE_BLOCK - column % SCALE_BLOCK
    operands = (*operands, second)
    lane = cute.arch.lane_idx()
    empty = fixed(empty_barriers(kernel, ring, lane))
    ring.consumer_wait(read)
    read_scales = _read_scales(kernel, scales, read.index, row)
    order = consumer
    if const_expr(kernel.staggers):
        # With tiles shorter than the ring the first warpgroup could arrive for the next tile before
        # the second one has waited for this: then neither does.
        order = consumer if steps >= kernel.stages else Int32(_CONSUMERS)
        if order == 1:
            cute.arch.barrier(barrier_id=_FIRST, number_of_threads=_CONSUMERS)
    _start(kernel, mmas, accs, operands, 0, read.index)
    for step in cutlass.range(steps, unroll=1):
        by = _factors(read_scales)
        for part in cutlass.range_constexpr(kernel.parts_of_w - 1):
            warpgroup.wait_group(0)
            if const_expr(kernel.staggers):
                cute.arch.inline_ptx(
                    f"bar.arrive {_FIRST}, {_CONSUMERS};", predicate=step + order == 0
                )
            if const_expr(kernel.overlaps):
                _start(kernel, mmas, accs, operands, part + 1, read.index)
            _add(kernel, sums, part, accs, operands, by)
            if const_expr(not kernel.overlaps):
                _start(kernel, mmas, accs, operands, part + 1, read.index)
        done = read.index
        read.advance()
        is_there = ring.consumer_try_wait(read)
        warpgroup.wait_group(0)
        if const_expr(kernel.staggers and kernel.parts_of_w == 1):
            cute.arch.inline_ptx(f"bar.arrive {_FIRST}, {_CONSUMERS};", predicate=step + order == 0)
        cute.arch.sync_warp()  # all lanes have read the scales; one lane arrives for its warp
        release(kernel, empty + done * 8, lane)
        more = step + 1 < steps
        if more:
            ring.consumer_wait(read, is_there)
            if const_expr(kernel.overlaps):
                _start(kernel, mmas, accs, operands, 0, read.index)
        # After the last step these are another tile's, or none, and not used.
        read_scales = _read_scales(kernel, scales, read.index, row)
        _add(kernel, sums, kernel.parts_of_w - 1, accs, operands, by)
        if const_expr(not kernel.overlaps):
            if more:
                _start(kernel, mmas, accs, operands, 0, read.index)
    return read


@cute.jit
def multiply_few_rows(kernel, ring, read, steps, mmas, accs, sums, operands, scales, at):
    """The steps of a kernel of few rows, whose products wait for loads: with the order of
    multiply_steps, 16 rows took a third longer (H200). Here a step waits for the next one's data
    while its own products are computed. `at`: this lane's first row and the tile's first column."""
    row, column = at
    operands = (*operands, SCALE_BLOCK - column % SCALE_BLOCK)
    ring.consumer_wait(read)
    by = _factors(_read_scales(kernel, scales, read.index, row))
    for step in cutlass.range(steps, unroll=1):
        for part in cutlass.range_constexpr(kernel.parts_of_x):
            _start(kernel, mmas, accs, operands, part, read.index)
        now = by
        if const_expr(kernel.parts_of_x == 2):
            warpgroup.wait_group(1)
            _add(kernel, sums, 0, accs, operands, now)
        done = read.clone()
        read.advance()
        if step + 1 < steps:
            ring.consumer_wait(read)
            by = _factors(_read_scales(kernel, scales, read.index, row))
        warpgroup.wait_group(0)
        cute.arch.sync_warp()
        ring.consumer_release(done)
        _add(kernel, sums, kernel.parts_of_x - 1, accs, operands, now)


def empty_barriers(kernel, ring, lane):
    """The address of the first barrier that this lane arrives at: of the lane-th block."""
    address = ring.sync_object_empty.get_barrier(0).toint()
    if kernel.multicasts == 1:
        return address
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        read_only_args=[Int32(address), cutlass.min(lane, kernel.multicasts - 1)],
        write_only_types=[Int32],
    )


def release(kernel, barrier, lane):
    """A warp's arrival in each block that loads for this one."""
    space = "cta" if kernel.multicasts == 1 else "cluster"
    cute.arch.inline_ptx(
        f"mbarrier.arrive.shared::{space}.b64 _, [{{$r0}}];",
        read_only_args=[barrier],
        predicate=lane < kernel.multicasts,
    )


@cute.jit
def _start(kernel, mmas, accs, operands, part, index):
    """Begins the products of a part of the tile, of one stage."""
    rx, rw, _ = operands
    of_x = kernel.parts_of_x * index + (part if kernel.parts_of_x == 2 else 0)
    of_w = kernel.parts_of_w * index + (part if kernel.parts_of_w > 1 else 0)
    start_products(mmas, accs[part % len(accs)], rx, rw, of_x, of_w)


@cute.jit
def _add(kernel, sums, part, accs, operands, by):
    """Adds a part's products to its sums, scaled."""
    acc = accs[part % len(accs)]
    first = part * cute.size(acc)
    if const_expr(kernel.overlaps):
        upper, lower = by[0], by[1]
        if part * (kernel.tile_n // kernel.parts_of_w) >= operands[2]:
            upper, lower = by[2], by[3]
        add_scaled(sums, first, acc, (upper, lower))
    elif const_expr(kernel.parts_of_w == 2 or kernel.scales_of_w == 1):
        add_scaled(sums, first, acc, by[2 * part : 2 * part + 2])
    elif const_expr(kernel.parts == 2):
        half = kernel.width // 2  # values of a lane: gates, then what they are for
        add_scaled(sums, first, acc, by[:2], 0, half)
        add_scaled(sums, first + half, acc, by[2:], half, half)
    else:
        # Columns from the second scale's first one on have that; tiles begin at multiples of a run.
        run = math.gcd(kernel.tile_n, SCALE_BLOCK)
        second = operands[2]
        for at in cutlass.range_constexpr(0, kernel.tile_n, run):
            upper, lower = by[0], by[1]
            if at >= second:
                upper, lower = by[2], by[3]
            add_scaled(sums, first + at // 2, acc, (upper, lower), at // 2, run // 2)


@cute.jit
def _read_scales(kernel, scales, index, row):
    """A stage's scales: of this lane's upper and lower row; of the rows 64 below where a warpgroup
    has 128; the first of w and the last."""
    at = scales + index * stage_words(kernel.tile_m)
    of_w = at + kernel.tile_m
    first, upper, lower = of_w.load(), (at + row).load(), (at + (row + 8)).load()
    last, next_upper, next_lower = first, upper, lower
    if const_expr(kernel.scales_of_w == 2):
        last = (of_w + 1).load()
    if const_expr(kernel.parts_of_x == 2):
        next_upper, next_lower = (at + (row + 64)).load(), (at + (row + 72)).load()
    return upper, lower, next_upper, next_lower, first, last


def _factors(read_scales):
    """Scales of this lane's upper and lower row, by the tile's first scale of w and its last."""
    upper, lower, next_upper, next_lower, first, last = read_scales
    return upper * first, lower * first, next_upper * last, next_lower * last


def activate(activation, values, first, count):
    """Applies the activation of that number to `count` values from `first` on."""
    for number, name in _ACTIVATIONS:
        _apply(activation == number, ACTIVATIONS[name], values, first, count)


@cute.jit
def _apply(chosen, function, values, first, count):
    if chosen:
        for i in cutlass.range_constexpr(count):
            values[first + i] = function(values[first + i])


def producer_group(kernel):
    """Arrivals that fill a stage: the copy engine's, and the threads' that copy scales."""
    loaders = 2 if kernel.in_fours else LOADERS  # its two warps arrive once each
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, 1 + loaders * kernel.blocks)
