# SPDX-License-Identifier: Apache-2.0
"""float8 products with a scale per 1x128 values of x and 128x128 of the weights.

A step of the ring has 128 values of K, so its products have one scale per row and half of the
weights. They are scaled into a second set of float32 sums, which also avoids the error of the
tensor cores' 13-bit accumulation over all of K. One half of a tile is scaled while the other is
multiplied. A wide tile has no registers for the products of both halves: they are scaled in turn,
while the other warpgroup multiplies.

The scales of a step lie in the ring beside its rows and weights: tile_m of rows, then two of the
weights' halves. The consumer warps read them one step ahead. Loads from global memory would be in
flight for longer, and each step's fence would wait for them.
"""

import cutlass
import cutlass.cute as cute
from block_scales_cute import SCALE_BLOCK, add_scaled, copy_scale, start_products
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from gemm_parts_cute import next_stage, release
from moe_arguments_cute import address


def stage_scales(v, storage, index):
    """The offset of a stage's scales."""
    first = v.words - v.stages * v.stage_scales
    return storage.words.data_ptr() + (first + index * v.stage_scales)


# -- loading -----------------------------------------------------------------------------------


@cute.jit
def scale_of_half(v, p, expert, column, half):
    """The index of the first scale of a half of a tile's weights."""
    row = column * v.width
    if const_expr(v.scale_a_half):
        row += half * p.second
    # The last tile of `down` may have one half only.
    of_row = cutlass.min(row // SCALE_BLOCK * p.w_scale_step, p.w_scale_expert - p.w_scale_step)
    return cutlass.max(expert, 0) * p.w_scale_expert + of_row


@cute.jit
def copy_step_scales(v, p, storage, index, thread, of_row, of_half):
    """A thread's row, whose scale is at `of_row` or 0 if that is negative, and two threads' halves
    of the weights."""
    to = stage_scales(v, storage, index).toint()
    size = Int32(4) if of_row >= 0 else Int32(0)
    copy_scale(to + thread * 4, address(p.x_scale) + Int64(cutlass.max(of_row, 0)) * 4, size=size)
    to_half = to + (v.tile_m + thread) * 4
    copy_scale(to_half, address(p.w_scale) + Int64(of_half) * 4, thread < 2)


# -- multiplying -------------------------------------------------------------------------------


@cute.jit
def multiply_steps(v, mmas, fragments, ring, stage, steps, row, row_scales=None, half=None):
    """A tile's steps, at least one; returns the stage after them. `row`: this lane's first. `half`:
    the one half of the weights that this warpgroup multiplies, if not both. A step waits for the
    next one's data, and reads its scales, while its own products are computed."""
    accs, sums, rx, rw = fragments
    storage, full, empty = ring
    index, phase = stage
    _wait(v, full, index, phase)
    upper, lower, first, second = _step_scales(v, storage, index, row)
    for step in cutlass.range(steps, unroll=1):
        at = 2 * index if const_expr(half is None) else 2 * index + half
        start_products(mmas, accs[0], rx, rw, index, at)
        if const_expr(half is None and not v.halves_in_turn):
            start_products(mmas, accs[1], rx, rw, index, 2 * index + 1)
        if const_expr(row_scales is not None and v.halves_in_turn and not v.up):
            if step == steps // 2:  # the loads issued before the first step have arrived by now
                _settle(row_scales)
        by_first = (upper * first, lower * first)
        by_second = (upper * second, lower * second)
        if const_expr(not v.scale_a_half):
            by_second = by_first
        if const_expr(half is None):
            warpgroup.wait_group(0 if const_expr(v.halves_in_turn) else 1)
            add_scaled(sums, 0, accs[0], by_first)
        if const_expr(v.halves_in_turn):
            start_products(mmas, accs[1], rx, rw, index, 2 * index + 1)
        now = index
        index, phase = next_stage(v.stages, index, phase)
        if step + 1 < steps:
            _wait(v, full, index, phase)
            upper, lower, first, second = _step_scales(v, storage, index, row)
        warpgroup.wait_group(0)
        cute.arch.sync_warp()  # all lanes have read the scales; one lane arrives for its warp
        release(empty, now)
        add_scaled(sums, cute.size(sums) - cute.size(accs[1]), accs[1], by_second)
    return index, phase


def _settle(row_scales):
    """Waits for loads in flight: their first use later would also wait for loads issued since."""
    for i in range(cute.size(row_scales)):
        row_scales[i] = cute.arch.shuffle_sync(row_scales[i], cute.arch.lane_idx())


@cute.jit
def _wait(v, full, index, phase):
    cute.arch.mbarrier_wait(full + index, phase)
    if const_expr(not v.by_boxes):  # threads wrote to the stage, too
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def _step_scales(v, storage, index, row):
    """The scales of this lane's two rows of sums and of both halves of the weights."""
    at = cute.recast_ptr(stage_scales(v, storage, index), dtype=Float32)
    halves = (at + v.tile_m).align(8)
    pair = cute.make_tensor(halves, cute.make_layout(2)).load()
    return (at + row).load(), (at + (row + 8)).load(), pair[0], pair[1]
