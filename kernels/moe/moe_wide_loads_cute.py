# SPDX-License-Identifier: Apache-2.0
"""What fills the ring where tiles have 128 rows: all warps of the first warpgroup.

There a step's products take about a thousand cycles, and the ring has room for four steps. Two
warps that copy its rows are a good part of that behind; on an H200 that was 6 % of fused_moe's time
at 512 tokens an expert. So four warps copy a fourth each, and find a tile's rows while the tile
before it is on its way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from moe_layouts_cute import ROW, WARPGROUP
from moe_loads_cute import MoeLoads, copy_16

COPIES = WARPGROUP // 8  # rows that the warps copy at a time, 16 bytes of a row a thread


class MoeWideLoads(MoeLoads):
    @cute.jit
    def load_both(
        self,
        thread,
        tma_w,
        x,
        x_pieces,
        storage,
        full,
        empty,
        routing,
        place,
        sizes,
        weights_at,
        limits,
        counter,
        counted,
        x_scale,
        of_weights,
    ):
        """Weights, by the first warp, and rows of x: row, row + COPIES, ... of a thread; and their
        scales of blocks."""
        k_tiles = routing[3]
        first, grid, columns = place[1], place[2], place[4]
        elements, divide, pieces = limits
        parts = self.parts_of_weights(tma_w, storage, sizes, weights_at)
        step_columns = self.width // self.half  # in halves
        lane, row, piece = thread % 32, thread // 8, thread % 8
        to_x = storage.x.data_ptr().toint() + row * ROW + (piece ^ row % 8) * 16
        copies = self.tile_m // COPIES
        sources = cute.make_rmem_tensor(copies, Int32)  # of a tile's rows
        # A warp copies 32 rows: each lane finds where one of them is, for the others too.
        mine = thread // 32 * 4 + lane % 4 + lane // 4 * COPIES
        block, at_column, expert = self.in_order(first, routing, columns)
        entry = Int32(0)
        given = Int32(0)  # steps of the first tile whose weights are on their way
        if thread < 32:  # before all else that is read for the first tile
            given = self.begin_weights(tma_w, parts, full, routing, (block, at_column, expert))
            cute.arch.griddepcontrol_wait()
        turn = first
        if thread < 32:
            self.publish(storage, entry, *self.in_order(first + grid, routing, columns))
            turn = self.claim(counter, first + grid, grid)
        ahead = self.read_id(routing, block, mine, elements)
        index, phase = Int32(0), Int32(1)
        before, tiles = (Int32(0), Int32(0)), Int32(0)  # the tile that is to be counted
        while block < routing[2]:
            column = at_column * step_columns
            steps = k_tiles if expert >= 0 else 0
            source_row = Int32(-1)  # in 16 bytes
            if ahead < elements:
                source_row = ahead // divide * x_pieces
            of_row, of_half = Int32(-1), Int32(0)
            if const_expr(self.block_scaled):
                if ahead < elements:
                    of_row = ahead // divide * x_scale[1]
                of_half = self.scale_of_half(of_weights, expert, at_column, thread)
            for i in cutlass.range_constexpr(copies):
                sources[i] = cute.arch.shuffle_sync(source_row, lane // 8 + i * 4)
            following, next_column, next_for = self.take(storage, entry)
            entry += 1
            ahead = self.read_id(routing, following, mine, elements)
            if const_expr(self.counts):
                if steps <= self.stages:
                    self.count_tile(thread, storage, counted, before, tiles)
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                if const_expr(self.counts):  # who multiplies is at this tile: the last is stored
                    if step == self.stages:
                        self.count_tile(thread, storage, counted, before, tiles)
                if (thread < 32) & (step >= given):
                    at = (column, step, expert)
                    self.copy_weights(tma_w, parts, at, full, index)
                # The last step's pieces beyond a row's end are zeros, from nowhere.
                inside = step * (ROW // 16) + piece < pieces
                source = x.toint() + (Int64(step) * ROW + piece * 16 if inside else Int64(0))
                to = to_x + index * (self.tile_m * ROW)
                for i in cutlass.range_constexpr(copies):
                    at_row = source + Int64(sources[i]) * 16
                    copy_16(to + i * (COPIES * ROW), at_row, 16 if inside else 0, sources[i] >= 0)
                if const_expr(self.block_scaled):
                    at_scale = of_row + step if of_row >= 0 else Int32(-1)
                    of_step = (x_scale[0], at_scale, of_weights, of_half + step)
                    self.copy_scales(thread, mine, storage, index, *of_step)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
                index, phase = self.next(index, phase)
            given = Int32(0)
            if thread < 32:
                turn = cute.arch.shuffle_sync(turn, 0)
                self.publish(storage, entry, *self.in_order(turn, routing, columns))
                turn = self.claim(counter, turn, grid)
            before, tiles = (block, at_column), tiles + 1
            block, at_column, expert = following, next_column, next_for
        if const_expr(self.counts):
            self.count_tile(thread, storage, counted, before, tiles)

    @cute.jit
    def begin_weights(self, tma_w, parts, full, routing, tile):
        """As many steps of the first tile as the ring has room for, by a warp; how many."""
        block, column, expert = tile
        given = Int32(0)
        if (block < routing[2]) & (expert >= 0):
            given = cutlass.min(routing[3], self.stages)
            for step in cutlass.range(given, unroll=1):
                at = (column * (self.width // self.half), step, expert)
                self.copy_weights(tma_w, parts, at, full, step)
        return given

    @cute.jit
    def read_id(self, routing, block, row, elements):
        """The element of a row of a tile; behind the last tile, none."""
        element = elements
        if block < routing[2]:
            element = (routing[0] + (block * self.tile_m + row)).load()
        return element
