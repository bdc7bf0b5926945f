# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm of float8 rows and matrices, with a scale per 1x128 and 128x128 values.

The scheduler, the loader and the ring are grouped_gemm_cute.py's. A step of the ring has 128 values
of the sum, and beside them their scales, which warp 1 copies. The products of a step are scaled
into float32 sums in registers (moe_block_scales_cute.py).

  tiles     the two warpgroups                       for
  128x256   have 64 rows each, and scale the two     many rows: 48 KB serve 1024 cycles of
            halves of the columns in turn            products
  64x128    have 64 columns each                     few rows: the matrices' bytes bind it, and
                                                     there are twice as many tiles to share out

With `capacity` > 0 each group has a buffer of that many rows, of which the first counts[e] are
multiplied: DeepGEMM's masked layout. Then there are no rows outside of the groups, and rows beyond
a count are not stored.

Rejected: pairs of thread blocks that share rows of x by multicast, 5 % slower (H200).

A warp stores its 16 rows of 64 columns through its own shared memory, 128 contiguous bytes at a
time. The ring leaves no room for staging buffers of the copy engine.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from block_scales_cute import SCALE_BLOCK, copy_scale
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from gemm_parts_cute import next_stage, release, result_copies, tensor_in, tiled_mma
from grouped_gemm_cute import CONSUMERS, GroupedGemm
from linear_layouts_cute import EPI, WARPGROUP, swizzled
from moe_arguments_cute import Ring
from moe_block_scales_cute import multiply_steps, stage_scales


class BlocksArguments(NamedTuple):
    """These kernels' parameters after the tensor maps, like Arguments of grouped_gemm_cute.py."""

    offsets: cute.Pointer  # or counts, where there is a capacity
    out: cute.Pointer
    x_scale: cute.Pointer
    w_scale: cute.Pointer
    groups: Int32
    m: Int32
    n: Int32
    k: Int32
    offset_words: Int32  # 2 for int64 offsets, else 1
    capacity: Int32  # rows of memory per group; 0: groups follow one another
    x_group: Int32  # with a capacity, from a group's scales to the next group's; else 0
    x_step: Int32  # from a row's scales to the next row's
    x_across: Int32  # from the scale of 128 values to that of the next ones


class GroupedBlocks(GroupedGemm):
    arguments = BlocksArguments
    scaled = True

    def __init__(self, name, dtype, tile_m, tile_n, stages):
        super().__init__(name, dtype, "plain", tile_m, tile_n, stages)
        self.out_dtype = cutlass.BFloat16
        self.by_rows = tile_m == CONSUMERS * EPI  # how the warpgroups share a tile
        self.pieces = tile_n // EPI if self.by_rows else 1
        self.buffers = 1
        self.half = tile_n // 2
        # For multiply_steps, as of MoeVariant.
        self.by_boxes = True
        self.halves_in_turn = self.scale_a_half = self.by_rows
        self.stage_scales = tile_m + 2
        self.words += stages * self.stage_scales

    # -- which rows --------------------------------------------------------------------------------

    @cute.jit
    def begin(self, p, part):
        row = (part - 1) * p.capacity
        if p.capacity == 0:
            row = self.bound(p, part)
        return row

    @cute.jit
    def end(self, p, part):
        group = part - 1
        row = group * p.capacity
        if p.capacity == 0:
            row = self.bound(p, part + 1)
        elif (group >= 0) & (group < p.groups):
            row += self.nearest(p, group, p.capacity)
        return row

    # -- to shared memory --------------------------------------------------------------------------

    @cute.jit
    def load_scales(self, ring, search, place, lane):
        """Warp 1: the scales of each step's rows and of both halves of its columns. Those beyond
        the group's last row, or the last column, get its scale."""
        full, empty = ring
        storage, p, _ = search
        first, grid, tiles = place
        of_rows = cute.make_rmem_tensor(self.tile_m // 32, Int64)
        down, across = cute.ceil_div(p.n, SCALE_BLOCK), cute.ceil_div(p.k, SCALE_BLOCK)
        x_across = Int64(p.x_across) * 4
        index, phase = Int32(0), Int32(1)
        for number in cutlass.range(first, tiles, grid, unroll=1):
            group, row, end, column, _, _, steps = self.find(search, number)
            of_group = p.x_scale.toint() + Int64(group) * p.x_group * 4
            for i in cutlass.range_constexpr(self.tile_m // 32):
                at = cutlass.min(row + lane + i * 32, end - 1) - group * p.capacity
                of_rows[i] = of_group + Int64(at) * p.x_step * 4
            half = cutlass.min(column * self.tile_n // SCALE_BLOCK + lane, down - 1)
            of_half = p.w_scale.toint() + (Int64(group) * down + half) * across * 4
            for _ in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                to = stage_scales(self, storage, index).toint() + lane * 4
                for i in cutlass.range_constexpr(self.tile_m // 32):
                    copy_scale(to + i * 128, of_rows[i])
                    of_rows[i] += x_across
                copy_scale(to + self.tile_m * 4, of_half, lane < 2)
                of_half += 4
                cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
                index, phase = next_stage(self.stages, index, phase)

    # -- products ----------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, thread, consumer, ring, search, place, tma_out):
        """A warpgroup: its rows, or columns, of each tile, from the ring to the result."""
        full, empty = ring
        storage, p, _ = search
        first, grid, tiles = place
        sharing = CONSUMERS if const_expr(self.by_rows) else 1
        mma, start = (tiled_mma(self.dtype, sharing, self.half) for _ in range(2))
        mma.set(warpgroup.Field.ACCUMULATE, True)
        start.set(warpgroup.Field.ACCUMULATE, False)
        part = mma.get_slice(consumer * WARPGROUP if const_expr(self.by_rows) else 0)
        halves = swizzled(self.dtype, self.half, self.tile_k, 2 * self.stages)
        rx = mma.make_fragment_A(part.partition_A(tensor_in(storage.a, self.smem_layouts()[0])))
        rw = mma.make_fragment_B(part.partition_B(tensor_in(storage.b, halves)))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((self.tile_m, self.half)), Float32)
        sums = cute.make_rmem_tensor(cute.size(acc) * (1 + self.by_rows), Float32)
        fragments = ((acc, acc), sums, rx, rw)
        my_row, my_column, half = consumer * EPI, Int32(0), None
        if const_expr(not self.by_rows):
            my_row, my_column, half = Int32(0), consumer * EPI, consumer
        lanes_row = my_row + thread % WARPGROUP // 32 * 16 + thread % 32 // 4
        index, phase = Int32(0), Int32(0)
        for number in cutlass.range(first, tiles, grid, unroll=1):
            _, row, end, column, _, _, steps = self.find(search, number)
            sums.fill(0.0)
            if (steps > 0) & (row + my_row < end):
                index, phase = multiply_steps(
                    *(self, (start, mma), fragments, Ring(storage, full, empty)),
                    *((index, phase), steps, lanes_row),
                    half=half,
                )
            else:
                for _ in cutlass.range(steps, unroll=1):
                    cute.arch.mbarrier_wait(full + index, phase)
                    release(empty, index)
                    index, phase = next_stage(self.stages, index, phase)
            at = (row + my_row, column * self.tile_n + my_column)
            self.put_rows(p, storage, thread % WARPGROUP, consumer, sums, at, end)

    @cute.jit
    def put_rows(self, p, storage, wg_thread, consumer, sums, at, end):
        row, column = at
        _, r2s, to_sy, piece = result_copies(
            self.out_dtype, storage.y, self.smem_layouts()[2], wg_thread
        )
        for chunk in cutlass.range_constexpr(self.pieces):
            for i in cutlass.range_constexpr(EPI // 2):
                piece[i] = sums[chunk * (EPI // 2) + i].to(self.out_dtype)
            cute.arch.sync_warp()  # all lanes have read the piece before
            cute.copy(r2s, piece, to_sy[None, None, None, consumer])
            cute.arch.sync_warp()
            self.store_rows(p, storage, consumer, wg_thread, row, end, column + chunk * EPI)
