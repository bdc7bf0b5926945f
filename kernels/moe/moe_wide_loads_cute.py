# SPDX-License-Identifier: Apache-2.0
"""What fills the ring where tiles have 128 rows: one warp of weights, three of rows.

There a step's products take about a thousand cycles, and the ring has room for four steps. What a
loading warp does for a step has to take less: it is one warp, whose instructions wait for each
other, some five cycles each. A warp that copied a fourth of the rows and the weights took 1330, so
that moe_up's steps took 1550 (H200). So weights have a warp of their own, rows three, whose
addresses are made once a tile; and they find a tile's rows while the tile before it is on its way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from moe_layouts_cute import ROW, WIDE_GATHERERS
from moe_loads_cute import MoeLoads, copy_16
from moe_routing_cute import within
from moe_scale_loads_cute import copy_scale

_COPIES = WIDE_GATHERERS // 8  # rows that they copy at a time, 16 bytes of a row each
_PASSES = -(-128 // _COPIES)
_REST = (_PASSES - 8) * 4  # lanes of a warp that find a second row


class MoeWideLoads(MoeLoads):
    @cute.jit
    def load_rows(
        self,
        thread,
        x,
        x_pieces,
        storage,
        full,
        empty,
        routing,
        place,
        limits,
        counted,
        x_scale,
        of_weights,
    ):
        """Rows of x: row, row + _COPIES, ... of a thread; and their scales of blocks."""
        elements, divide, pieces = limits
        lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        row, piece = warp * 4 + lane // 8, lane % 8
        # _COPIES rows on, the swizzle has another bit.
        to_x = storage.x.data_ptr().toint() + row * ROW
        to_even = to_x + (piece ^ row % 8) * 16
        to_odd = to_x + (piece ^ row % 8 ^ 4) * 16
        sources = cute.make_rmem_tensor(_PASSES, Int32)  # of a tile's rows, in 16 bytes
        # A warp copies 44 rows: each lane finds where one or two of them are, for the others too.
        mine = warp * 4 + lane % 4 + lane // 4 * _COPIES
        second = mine + 8 * _COPIES
        if lane >= _REST:
            second = Int32(self.tile_m)
        block, at_column, expert = self.in_order(place[1], routing, place[4])
        entry = Int32(0)
        ahead = self.read_id(routing, block, mine, elements)
        ahead_second = self.read_id(routing, block, second, elements)
        index, phase = Int32(0), Int32(1)
        before, tiles = (Int32(0), Int32(0)), Int32(0)  # the tile that is to be counted
        while block < routing[2]:
            steps = routing[3] if expert >= 0 else 0
            ahead, ahead_second = within(ahead, elements), within(ahead_second, elements)
            token, second_token = ahead // divide, ahead_second // divide
            is_real, is_second = ahead < elements, ahead_second < elements
            from_row = token * x_pieces if is_real else Int32(-1)
            from_second = second_token * x_pieces if is_second else Int32(-1)
            for i in cutlass.range_constexpr(_PASSES):
                found = from_row if const_expr(i < 8) else from_second
                sources[i] = cute.arch.shuffle_sync(found, lane // 8 + i % 8 * 4)
            scale, second_scale = Int64(0), Int64(0)
            if const_expr(self.block_scaled):
                # Two lanes without a second row copy the scales of the weights' halves.
                scale = x_scale[0].toint() + Int64(token * x_scale[1] if is_real else 0) * 4
                at_scale = second_token * x_scale[1] if is_second else Int32(0)
                second_scale = x_scale[0].toint() + Int64(at_scale) * 4
                if lane >= _REST:
                    half = cutlass.min(lane - _REST, 1)
                    of_half = self.scale_of_half(of_weights, expert, at_column, half)
                    second_scale = of_weights[0].toint() + Int64(of_half) * 4
            following, next_column, next_for = self.take(storage, entry)
            entry += 1
            ahead = self.read_id(routing, following, mine, elements)
            ahead_second = self.read_id(routing, following, second, elements)
            if const_expr(self.counts):
                if (steps > 0) & (steps <= self.stages):
                    self.count_tile(warp, storage, counted, before, tiles)
            source = x.toint() + piece * 16
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                size = Int32(16)
                if const_expr(not self.block_scaled):
                    # The last step's pieces beyond a row's end are zeros.
                    size = Int32(16) if step * (ROW // 16) + piece < pieces else Int32(0)
                at = source if size > 0 else x.toint()
                for i in cutlass.range_constexpr(_PASSES):
                    to = to_even if const_expr(i % 2 == 0) else to_odd
                    to += index * (self.tile_m * ROW) + i * (_COPIES * ROW)
                    copy_16(to, at + Int64(sources[i]) * 16, size, sources[i] >= 0)
                source += ROW
                if const_expr(self.block_scaled):
                    to_scales = self.scales_of_stage(storage, index).toint()
                    copy_scale(to_scales + mine * 4, scale)
                    to_second = second
                    if lane >= _REST:
                        to_second = self.tile_m + lane - _REST
                    is_half = (warp == 0) & (lane >= _REST) & (lane < _REST + 2)
                    is_row = second < self.tile_m
                    copy_scale(to_scales + to_second * 4, second_scale, is_row | is_half)
                    scale, second_scale = scale + 4, second_scale + 4
                cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
                if const_expr(self.counts):  # who multiplies is at this tile: the last is stored
                    if step == self.stages:
                        self.count_tile(warp, storage, counted, before, tiles)
                index, phase = self.next(index, phase)
            # Nobody waits for the rows of experts that are elsewhere.
            is_here = steps > 0
            before = (block if is_here else before[0], at_column if is_here else before[1])
            tiles += 1 if is_here else 0
            block, at_column, expert = following, next_column, next_for
        if const_expr(self.counts):
            self.count_tile(warp, storage, counted, before, tiles)

    @cute.jit
    def read_id(self, routing, block, row, elements):
        """The element of a row of a tile, as the list has it; of rows that the tile has not, and
        behind the last tile, none."""
        element = elements
        if (block < routing[2]) & (row < self.tile_m):
            element = (routing[0] + (block * self.tile_m + row)).load()
        return element
