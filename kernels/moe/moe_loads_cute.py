# SPDX-License-Identifier: Apache-2.0
"""What fills the ring of moe_up's and moe_down's kernel, and who is left without a block."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from moe_layouts_cute import EPI, GATHERERS, ROW, coordinates
from moe_routing_cute import within
from moe_scale_loads_cute import MoeScaleLoads

# As createpolicy.fractional.L2 makes them, of all bytes.
EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000
COPIES = GATHERERS // 8  # rows that they copy at a time, 16 bytes of a row each


class MoeLoads(MoeScaleLoads):
    @cute.jit
    def load_weights(
        self,
        tma_w,
        storage,
        full,
        empty,
        routing,
        place,
        sizes,
        weights_at,
        tma_x=None,
        x_rows=None,
        counter=None,
        progress=None,
    ):
        """One warp: both halves of each step's tile of weights; x's rows too, where by boxes."""
        k_tiles = routing[3]
        _, first, grid, tiles, columns = place
        parts = self.parts_of_weights(tma_w, storage, sizes, weights_at)
        if const_expr(self.by_boxes):
            to_x, from_x = self.parts_of_rows(tma_x, storage, x_rows, sizes[2])
        step_columns = self.width // self.half  # in halves
        index, phase = Int32(0), Int32(1)
        number, turn, entry = first, first, Int32(0)
        at_column, handed = Int32(0), Int32(0)
        given = Int32(0)  # steps of the first tile whose weights are on their way
        if const_expr(self.in_expert_order):
            number, at_column, handed = self.in_order(first, routing, columns)
            if const_expr(not self.by_boxes):  # before all else that is read for the first tile
                begun = (number, at_column * step_columns, handed)
                given = self.begin_weights(tma_w, parts, full, routing, begun)
                cute.arch.griddepcontrol_wait()
            self.publish(storage, entry, *self.in_order(first + grid, routing, columns))
            turn = self.claim(counter, first + grid, grid)
        while number < self.end_of(routing, place):
            block = self.block_of(number, place)
            column = self.column_of(number, at_column, place) * step_columns
            expert = self.expert_for(routing, block, handed)
            steps = k_tiles if expert >= 0 else 0
            if const_expr(self.by_boxes):
                if (progress.toint() != 0) & (steps > 0):
                    self.wait_for(progress, block, sizes[2])
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                at = (column, step, expert)
                if step >= given:
                    self.copy_weights(tma_w, parts, at, full, index)
                if const_expr(self.by_boxes):
                    copy(tma_x, from_x[None, (block, step)], to_x[None, index], full + index)
                index, phase = self.next(index, phase)
            given = Int32(0)
            if const_expr(self.in_expert_order):
                number, at_column, handed = self.take(storage, entry)
                entry += 1
                turn = cute.arch.shuffle_sync(turn, 0)
                self.publish(storage, entry, *self.in_order(turn, routing, columns))
                turn = self.claim(counter, turn, grid)
            elif const_expr(not self.by_turns):
                number += grid
            else:
                # Weights needed no waiting, the counter does. The ring is full meanwhile.
                cute.arch.griddepcontrol_wait()
                number = self.claim_next(counter, number, grid, tiles)
                self.publish(storage, entry, number)
                entry += 1

    @cute.jit
    def begin_weights(self, tma_w, parts, full, routing, tile):
        """As many steps of the first tile as the ring has room for, by a warp; how many."""
        block, column, expert = tile
        given = Int32(0)
        if (block < routing[2]) & (expert >= 0):
            given = cutlass.min(routing[3], self.stages)
            for step in cutlass.range(given, unroll=1):
                self.copy_weights(tma_w, parts, (column, step, expert), full, step)
        return given

    @cute.jit
    def hint_for_weights(self, experts, elements):
        """Where experts have few rows, most weights are read once: they leave the L2 before all
        else, rows of x and between the halves, which are read again and again."""
        hint = None  # of 16 bits and many rows it was up to 1 % slower (H200)
        if const_expr(self.dtype.width == 8 or not self.in_expert_order):
            hint = Int64(EVICT_FIRST) if elements <= experts * EPI else Int64(EVICT_NORMAL)
        return hint

    def parts_of_weights(self, tma_w, storage, sizes, weights_at):
        """Where the ring has a step's two halves, where they are, and the L2's hint for them."""
        second, hint = weights_at
        layout = self.smem_layout(self.dtype, self.half, 2 * self.stages)
        sw = storage.w.get_tensor(layout.outer, swizzle=layout.inner)
        places = coordinates(*sizes)
        other = cute.domain_offset((second, 0, 0), places)
        return (*self.partition(tma_w, sw, places), self.partition(tma_w, sw, other)[1], hint)

    def parts_of_rows(self, tma_x, storage, x_rows, k):
        layout = self.smem_layout(self.dtype, self.tile_m, self.stages)
        sx = storage.x.get_tensor(layout.outer, swizzle=layout.inner)
        identity = cute.make_identity_tensor((k, x_rows))
        places = cute.make_tensor(identity.iterator, cute.select(identity.layout, [1, 0]))
        tiles = cute.zipped_divide(places, (self.tile_m, self.tile_k))
        one = cute.make_layout(1)
        return cpasync.tma_partition(tma_x, 0, one, cute.group_modes(sx, 0, 2), tiles)

    @cute.jit
    def copy_weights(self, tma_w, parts, at, full, index):
        """Both halves of a step's tile, by a warp."""
        to_w, from_first, from_second, hint = parts
        barrier, to = full + index, 2 * index
        with cute.arch.elect_one():
            rows = self.tile_n + (self.tile_m if const_expr(self.by_boxes) else 0)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, rows * ROW)
        copy(tma_w, from_first[None, at], to_w[None, to], barrier, hint)
        copy(tma_w, from_second[None, at], to_w[None, to + 1], barrier, hint)

    def partition(self, tma, smem, places):
        one = cute.make_layout(1)
        tiles = cute.zipped_divide(places, (self.half, self.tile_k))
        return cpasync.tma_partition(tma, 0, one, cute.group_modes(smem, 0, 2), tiles)

    @cute.jit
    def gather_rows(
        self, thread, x, x_pieces, storage, full, empty, routing, place, limits, x_scale, of_weights
    ):
        """Each thread a 16-byte piece of its rows: row, row + COPIES, ...; and a row's scale of
        blocks, or a half's."""
        rank, first, grid, tiles, columns = place
        elements, divide, pieces = limits
        row, piece = thread // 8, thread % 8
        to_x = storage.x.data_ptr().toint() + row * ROW + (piece ^ row) * 16
        sources = cute.make_rmem_tensor(self.tile_m // COPIES, Int32)  # in 16 bytes
        index, phase = Int32(0), Int32(1)
        number, entry = first, Int32(0)
        while number < tiles:
            block = number // columns + rank
            steps = self.steps_of(routing, block)
            rows = self.rows_of(routing, block)
            for i in cutlass.range_constexpr(self.tile_m // COPIES):
                element = self.element_of(routing, rows, row + i * COPIES, elements)
                element = within(element, elements)
                sources[i] = Int32(-1)
                if element < elements:
                    sources[i] = element // divide * x_pieces + piece
            of_row, of_half = Int32(-1), Int32(0)
            if const_expr(self.block_scaled):
                element = within(self.element_of(routing, rows, thread, elements), elements)
                if element < elements:
                    of_row = element // divide * x_scale[1]
                expert = self.expert_of(routing, block)
                of_half = self.scale_of_half(of_weights, expert, number % columns, thread)
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                inside = step * (ROW // 16) + piece < pieces
                to = to_x + index * (self.tile_m * ROW)
                for i in cutlass.range_constexpr(self.tile_m // COPIES):
                    # The last step's pieces beyond a row's end are zeros, from nowhere.
                    at = sources[i] + (step * (ROW // 16) if inside else 0)
                    source = x.toint() + Int64(at) * 16
                    size = 16 if inside else 0
                    copy_16(to + i * (COPIES * ROW), source, size, sources[i] >= 0)
                if const_expr(self.block_scaled):
                    at_row = of_row + step if of_row >= 0 else Int32(-1)
                    of_step = (x_scale[0], at_row, of_weights, of_half + step)
                    self.copy_scales(thread, thread, storage, index, *of_step)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
                index, phase = self.next(index, phase)
            if const_expr(self.by_turns):
                number, _, _ = self.take(storage, entry)
                entry += 1
            else:
                number += grid

    @cute.jit
    def clear_rows_of_none(self, ids, id_words, bound, elements, rows, out):
        """Zeros for ids that are no expert's, which are in no block; by one warp of each block."""
        lane = cute.arch.lane_idx()
        zeros = cute.make_rmem_tensor(8, self.out_dtype)
        zeros.fill(0.0)
        start = cute.arch.block_idx()[0] * 32
        for group in cutlass.range(start, elements, cute.arch.grid_dim()[0] * 32, unroll=1):
            mine = group + lane
            none = False
            if mine < elements:
                low = (ids + mine * id_words).load()
                none = (low < 0) | (low >= bound)
                if id_words == 2:
                    none = none | ((ids + (mine * 2 + 1)).load() != 0)
            if none:
                for at in cutlass.range(0, rows, 8, unroll=1):
                    to = out + (Int64(mine) * rows + at)
                    cute.make_tensor(to.align(16), cute.make_layout(8)).store(zeros.load())


def copy(tma, source, to, barrier, hint=None):
    cute.copy(tma, source, to, tma_bar_ptr=barrier, cache_policy=hint)


def copy_16(to, source, size, real):
    """16 bytes to shared memory; those from `size` on are zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[to, source, size],
        predicate=real,
    )
