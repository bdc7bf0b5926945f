# SPDX-License-Identifier: Apache-2.0
"""From a tile's sums to the result's rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr
from cutlass.cute.nvgpu import warp
from moe_block_scales_cute import MoeBlockScales
from moe_layouts_cute import EPI, WARPGROUP


def aligned(address, dtype):
    """A pointer to 16 bytes in memory."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)


class MoeOut(MoeBlockScales):
    @cute.jit
    def owner(self, facts, i, half=0):
        """The element of a warp's row lane / 8 + i * 4, from lanes that have it for their sums."""
        of_sums = facts[2 + self.wg_rows // 32 + half * 2 + i // 2]
        return cute.arch.shuffle_sync(of_sums, cute.arch.lane_idx() // 8 * 4 + i % 2 * 16)

    @cute.jit
    def put_out(
        self,
        thread,
        consumer,
        storage,
        acc,
        facts,
        scales,
        columns_scales,
        of_columns,
        first_column,
        elements,
        rows,
        second,
        out,
        slots_of,
    ):
        """A tile's sums to their elements' rows, or to those of the block `slots_of`. A warp's 16
        rows of 64 columns go through its own shared memory, so that 8 lanes store 128 neighbouring
        bytes."""
        lane, wg_thread = thread % 32, thread % WARPGROUP
        layout = self.smem_layout(self.out_dtype, EPI, self.consumers * self.pieces)
        sy = storage.y.get_tensor(layout.outer, swizzle=layout.inner)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.out_dtype)
        copy_c = cute.make_tiled_copy_C_atom(stmatrix, self.mma(self.out_dtype, 1, EPI))
        r2s = cute.make_tiled_copy_S(stmatrix, copy_c)
        to_sy = r2s.get_slice(wg_thread).partition_D(sy)
        piece = cute.make_rmem_tensor(to_sy.shape[:3], self.out_dtype)
        if const_expr(self.chunk < EPI):
            piece.fill(0.0)
        if const_expr(self.lists_scales):
            self.list_scales(storage, consumer, columns_scales, thread)
        vector = cute.make_layout(8)
        lower = True
        if const_expr(self.pingpong):
            lower = cute.arch.vote_any_sync(facts[2 + self.wg_rows // 32 + 1] < elements)
        y_row = wg_thread // 32 * 16 + lane // 8  # and every fourth after it
        starts = cute.make_rmem_tensor(4, Int64)  # of a lane's rows of the result; -1 of padding's
        for half in cutlass.range_constexpr(self.wg_rows // EPI):
            for i in cutlass.range_constexpr(4):
                owner = self.owner(facts, i, half)
                starts[i] = Int64(-1)
                if owner < elements:
                    if const_expr(self.up):
                        if slots_of >= 0:
                            owner = slots_of * self.tile_m + y_row + i * 4
                            if const_expr(not self.pingpong):
                                owner += consumer * EPI
                    starts[i] = Int64(owner) * rows
            for chunk in cutlass.range_constexpr(self.width // self.chunk):
                first = first_column + chunk * self.chunk
                factors = columns_scales
                if const_expr(self.lists_scales):
                    factors = self.listed_scales(storage, consumer, chunk * self.chunk, lane)
                elif const_expr(half + chunk > 0):
                    factors = self.columns_scales()
                    self.scales_of_columns(factors, of_columns, first, second, lane)
                at = half * (self.tile_n // 2) + chunk * (self.chunk // 2)
                self.finish(piece, acc, factors, scales[half * 2], at, 0)
                # With few tokens the lower 8 rows of a warp are padding.
                if const_expr(not self.pingpong) or lower:
                    self.finish(piece, acc, factors, scales[half * 2 + 1], at, 1)
                # With two pieces of shared memory, the last one's readers are done with this one.
                if const_expr(self.pieces == 1):
                    cute.arch.sync_warp()
                buffer = consumer * self.pieces + chunk % self.pieces
                cute.copy(r2s, piece, to_sy[None, None, None, buffer])
                cute.arch.sync_warp()
                from_y = storage.y.data_ptr() + buffer * (EPI * EPI)
                at_column = first + lane % 8 * 8
                for i in cutlass.range_constexpr(4):
                    at_row = y_row + i * 4
                    offset = at_row * EPI + (lane % 8 ^ at_row % 8) * 8
                    values = cute.make_tensor((from_y + offset).align(16), vector)
                    if (starts[i] >= 0) & (at_column < rows) & (lane % 8 * 8 < self.chunk):
                        to = out.toint() + (starts[i] + at_column) * (self.out_dtype.width // 8)
                        cute.make_tensor(aligned(to, self.out_dtype), vector).store(values.load())
