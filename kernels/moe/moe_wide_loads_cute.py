# SPDX-License-Identifier: Apache-2.0
"""What fills the ring where tiles have 128 rows: all warps of the first warpgroup.

There a step's products take about a thousand cycles, and the ring has room for four steps. Two
warps that copy its rows are a good part of that behind; on an H200 that was 6 % of fused_moe's time
at 512 tokens an expert. So four warps copy a fourth each, and find a tile's rows while the tile
before it is on its way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
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
        second,
        limits,
        counter,
    ):
        """Weights, by the first warp, and rows of x: row, row + COPIES, ... of a thread."""
        k_tiles = routing[3]
        rank, first, grid, tiles, columns = place
        elements, divide, pieces = limits
        parts = self.parts_of_weights(tma_w, storage, sizes, second)
        step_columns = self.width // self.half  # in halves
        row, piece = thread // 8, thread % 8
        to_x = storage.x.data_ptr().toint() + row * ROW + (piece ^ row % 8) * 16
        inverse = Uint32(0xFFFFFFFF) // Uint32(divide)
        sources = cute.make_rmem_tensor(self.tile_m // COPIES, Int32)  # in 16 bytes
        ahead = cute.make_rmem_tensor(self.tile_m // COPIES, Int32)
        number, turn, entry = first, first, Int32(0)
        if const_expr(self.by_turns):
            number = self.in_order(first, routing, tiles, columns)
        given = Int32(0)  # steps of the first tile whose weights are on their way
        if thread < 32:  # before all else that is read for the first tile
            given = self.begin_weights(tma_w, parts, full, routing, place, number)
            cute.arch.griddepcontrol_wait()
        if const_expr(self.by_turns):
            if thread < 32:
                self.publish(storage, entry, self.in_order(first + grid, routing, tiles, columns))
                turn = self.claim(counter, first + grid, grid)
        self.read_ids(ahead, routing, place, number, row, elements)
        index, phase = Int32(0), Int32(1)
        while number < tiles:
            block = number // columns + rank
            column = number % columns * step_columns
            expert = self.expert_of(routing, block)
            steps = k_tiles if expert >= 0 else 0
            for i in cutlass.range_constexpr(self.tile_m // COPIES):
                element = ahead[i]
                of_x = Int32(Int64(element) * Int64(inverse) >> 32)  # element / divide or one less
                if element - of_x * divide >= divide:
                    of_x += 1
                sources[i] = of_x * x_pieces + piece if element < elements else Int32(-1)
            following = number + grid
            if const_expr(self.by_turns):
                following = self.take(storage, entry)
                entry += 1
            self.read_ids(ahead, routing, place, following, row, elements)
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                if (thread < 32) & (step >= given):
                    at = (column, step, expert)
                    self.copy_weights(tma_w, parts, at, full, index)
                # The last step's pieces beyond a row's end are zeros, from nowhere.
                inside = step * (ROW // 16) + piece < pieces
                source = x.toint() + (Int64(step) * ROW if inside else Int64(0))
                to = to_x + index * (self.tile_m * ROW)
                for i in cutlass.range_constexpr(self.tile_m // COPIES):
                    at_row = source + Int64(sources[i]) * 16
                    copy_16(to + i * (COPIES * ROW), at_row, 16 if inside else 0, sources[i] >= 0)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
                index, phase = self.next(index, phase)
            given = Int32(0)
            if const_expr(self.by_turns):
                if thread < 32:
                    turn = cute.arch.shuffle_sync(turn, 0)
                    self.publish(storage, entry, self.in_order(turn, routing, tiles, columns))
                    turn = self.claim(counter, turn, grid)
            number = following

    @cute.jit
    def read_ids(self, ids, routing, place, number, row, elements):
        """The elements of a thread's rows of a tile; of the last one behind it."""
        sorted_ids, blocks = routing[0], routing[2]
        rank, _, _, tiles, columns = place
        block = cutlass.max(cutlass.min(number, tiles - 1), 0) // columns + rank
        for i in cutlass.range_constexpr(self.tile_m // COPIES):
            ids[i] = elements
            if block < blocks:
                ids[i] = (sorted_ids + (block * self.tile_m + row + i * COPIES)).load()
