# SPDX-License-Identifier: Apache-2.0
"""Scales per row: of x and the weights of a float8 tile, with the routing weights of `down`.

They multiply the sums in the epilogue, before the activation. A tile of 128 rows keeps the scales
of its weight rows in shared memory: a chunk's reads from global memory would wait for the stores of
the previous chunk.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from gemm_parts_cute import sync
from linear_layouts_cute import WARPGROUP
from moe_arguments_cute import address
from moe_variant_cute import TURNS

_LIST = 3  # named barriers 3 and 4: a warpgroup's list of scales


def scales_of_columns(v):
    """Registers for the scales of a lane's columns of a chunk and of their partners; where they are
    listed, for the two that a thread lists per tile."""
    columns = 1 if v.lists_scales else v.chunk // 8 * 2
    return cute.make_rmem_tensor((columns, 2), Float32)


@cute.jit
def read_row_scales(v, p, scales, facts, elements):
    """The factors of this lane's rows; elements from `elements` on get 1."""
    for i in cutlass.range_constexpr(2):
        scales[i] = 1.0
        element = facts[3 + i]
        if element < elements:
            if const_expr(v.scaled):
                scales[i] = (p.x_scale + element // p.divide * p.x_scale_step).load()
            if const_expr(not v.up):
                if address(p.weights) != 0:
                    scales[i] *= (p.weights + element).load()


@cute.jit
def read_column_scales(v, p, scales, w_scale, rows, first, thread):
    """The scales of columns from `first` on, for a chunk or for a tile's list."""
    if const_expr(v.scaled):
        scales.fill(1.0)
        for i in cutlass.range_constexpr(cute.size(scales, mode=[0])):
            at = first + thread % WARPGROUP
            if const_expr(not v.lists_scales):
                at = first + i // 2 * 8 + thread % 4 * 2 + i % 2
            if at < rows:
                scales[i, 0] = (w_scale + at * p.w_scale_step).load()
                if const_expr(v.up):
                    scales[i, 1] = (w_scale + (at + p.second) * p.w_scale_step).load()
            if const_expr(v.lists_scales and not v.up):
                if at + p.second < rows:
                    scales[i, 1] = (w_scale + (at + p.second) * p.w_scale_step).load()


@cute.jit
def list_scales(v, storage, consumer, scales, thread):
    """A warpgroup lists its tile's scales: the first half's, then the second half's."""
    to = _list(v, storage, consumer) + thread % WARPGROUP
    sync(_LIST + consumer, WARPGROUP)  # all have read the previous tile's
    to.store(scales[0, 0])
    (to + v.half).store(scales[0, 1])
    sync(_LIST + consumer, WARPGROUP)


@cute.jit
def listed_scales(v, storage, consumer, first, lane):
    """The scales of a lane's columns of a chunk and of their partners."""
    scales = cute.make_rmem_tensor((v.chunk // 8 * 2, 2), Float32)
    source = _list(v, storage, consumer) + (first + lane % 4 * 2)
    for i in cutlass.range_constexpr(0, v.chunk // 8):
        for half in cutlass.range_constexpr(2 if const_expr(v.up) else 1):
            at = (source + (half * v.half + i * 8)).align(8)
            pair = cute.make_tensor(at, cute.make_layout(2)).load()
            scales[i * 2, half], scales[i * 2 + 1, half] = pair[0], pair[1]
    return scales


def _list(v, storage, consumer):
    words = storage.words.data_ptr() + (TURNS * v.turn_words + consumer * v.tile_n)
    return cute.recast_ptr(words, dtype=Float32)


@cute.jit
def finish(v, piece, acc, of_columns, of_row, at, lower):
    """Scales a chunk's sums, from `at` on, of a lane's upper or lower row and applies the
    activation."""
    for i in cutlass.range_constexpr(2 * lower, v.chunk // 2, 4):
        values = [acc[at + i + j] for j in range(2)]
        columns = [i // 4 * 2 + j for j in range(2)]
        if const_expr(v.scaled or not v.up):
            values = [value * of_row for value in values]
        if const_expr(v.scaled):
            values = [values[j] * of_columns[columns[j], 0] for j in range(2)]
        if const_expr(v.up):
            partners = [acc[at + i + j + v.half // 2] for j in range(2)]
            if const_expr(v.scaled):
                partners = [partners[j] * of_row * of_columns[columns[j], 1] for j in range(2)]
            values = v.act(values, partners)
        for j in cutlass.range_constexpr(2):
            piece[i + j] = values[j].to(v.out_dtype)
