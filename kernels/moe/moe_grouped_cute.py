# SPDX-License-Identifier: Apache-2.0
"""moe_up and moe_down: each block of routed rows times its expert's weights.

The plan. For many tokens products bind it: at T = 4096, k = 8, E = 64, H = 2048, I = 1024 they are
412 GFLOP, 0.6 ms at the rate of the best GEMM. Rows gathered beforehand would move 134 MB twice,
so they are gathered on the way to shared memory, which the copy engine cannot do: threads copy 16
bytes each, rows by the routing's ids, beside the engine's tiles of weights. A block's results go
straight to their elements' rows. For few tokens the weights' bytes bind it, and the ring of stages
keeps enough of them on their way; `down` begins to load its own before `up` has ended.

A tile is one block of the routing times tile_n rows of weights: for `up` a half of them of the gate
and their partners, which meet in the activation; for `down` neighbours. Warps of the first
warpgroup load, the others' multiply, 64 rows of the tile a warpgroup. One whose rows are all
padding multiplies nothing. float8 rows and weights have scales, which meet the sums before the
activation, or each step's (moe_block_scales_cute.py).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from moe_layouts_cute import EPI, WARPGROUP
from moe_quantize_cute import MoeQuantize
from moe_routing_cute import within
from moe_scales_cute import sync

_TURN = 3  # named barriers 3 and 4: whose turn it is to multiply


class MoeGrouped(MoeQuantize):
    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        w: cute.Pointer,
        sorted_ids: cute.Pointer,
        expert_ids: cute.Pointer,
        used: cute.Pointer,
        counter: cute.Pointer,
        progress: cute.Pointer,
        weights: cute.Pointer,
        ids: cute.Pointer,
        x_scale: cute.Pointer,
        w_scale: cute.Pointer,
        out_scale: cute.Pointer,
        out: cute.Pointer,
        experts: Int32,
        w_rows: Int32,
        k: Int32,
        second: Int32,
        rows: Int32,
        elements: Int32,
        divide: Int32,
        x_pieces: Int32,
        id_words: Int32,
        bound: Int32,
        early: Int32,
        x_scale_step: Int32,
        w_scale_expert: Int32,
        w_scale_step: Int32,
        x_rows: Int32,
        to_slots: Int32,
        listed: Int32,
        blocks: Int32,
        stream,
    ):
        k16 = cute.assume(k, divby=128 // self.dtype.width)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_w, _ = cpasync.make_tiled_tma_atom(
            load,
            cute.make_tensor(
                w, cute.make_layout((w_rows, k16, experts), stride=(k16, 1, w_rows * k16))
            ),
            cute.slice_(self.smem_layout(self.dtype, self.half, 1), (None, None, 0)),
            (self.half, self.tile_k),
        )
        tma_x = None
        if const_expr(self.by_boxes):
            tma_x, _ = cpasync.make_tiled_tma_atom(
                load,
                cute.make_tensor(x, cute.make_layout((x_rows, k16), stride=(k16, 1))),
                cute.slice_(self.smem_layout(self.dtype, self.tile_m, 1), (None, None, 0)),
                (self.tile_m, self.tile_k),
            )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            *(tma_w, tma_x, x, sorted_ids, expert_ids, used, counter, progress, weights, ids),
            *(x_scale, w_scale, out_scale, out, experts, w_rows, k, second, rows, elements, divide),
            *(x_pieces, id_words, bound, early, x_scale_step, w_scale_expert, w_scale_step),
            *(x_rows, to_slots, listed),
        ).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(1, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_w: cute.CopyAtom,
        tma_x: cute.CopyAtom | None,
        x: cute.Pointer,
        sorted_ids: cute.Pointer,  # null where blocks of threads route ids themselves
        expert_ids: cute.Pointer,
        used: cute.Pointer,
        counter: cute.Pointer,  # of tiles taken, from 0; or null
        progress: cute.Pointer,  # of `up`, see moe_progress_cute.py; or null
        weights: cute.Pointer,  # of elements, or null
        ids: cute.Pointer,  # of experts, by element; or null: see clear_rows_of_none
        x_scale: cute.Pointer,  # of rows of x
        w_scale: cute.Pointer,  # of rows of weights
        out_scale: cute.Pointer,  # of 1x128 values of the result, then of float8; or null
        out: cute.Pointer,  # [elements, rows]
        experts: Int32,
        w_rows: Int32,  # of an expert
        k: Int32,
        second: Int32,  # rows from a tile's first half of weights to its second
        rows: Int32,  # of the result, an expert
        elements: Int32,
        divide: Int32,  # element e has row e / divide of x
        x_pieces: Int32,  # of 16 bytes, from a row of x to the next
        id_words: Int32,  # 2 of int64 ids, else 1
        bound: Int32,  # ids at or above it are no expert's
        early: Int32,  # the routing is older than the kernel before this one: do not wait for it
        x_scale_step: Int32,  # 0: one for all
        w_scale_expert: Int32,
        w_scale_step: Int32,
        x_rows: Int32,
        to_slots: Int32,  # rows of the result are in the routing's order
        listed: Int32,  # blocks that the lists have room for
    ):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        storage = cutlass.utils.SmemAllocator().allocate(self.storage())
        full = storage.barriers.data_ptr()
        empty = full + self.stages
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_w)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + i, self.gatherers + 1)
                    cute.arch.mbarrier_init(empty + i, 4 * self.sharing)
                self.init_turns(storage)
                self.init_stored(storage)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        columns = cute.ceil_div(rows, self.width)
        k_tiles = cute.ceil_div(k, self.tile_k)
        # Always 0, of tiles by number. Without it ptxas makes other code, which was not measured.
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        first = cute.arch.block_idx()[0]
        grid = cute.arch.grid_dim()[0]
        lists = (sorted_ids, expert_ids)
        blocks, places = Int32(0), Int32(0)
        if const_expr(self.routes):
            lists = (sorted_ids.toint(), expert_ids.toint())
            if lists[0] == 0:
                self.prepare_routing(thread, storage, ids, id_words, experts, elements)
                if early == 0:
                    cute.arch.griddepcontrol_wait()
                made = self.route(thread, storage, ids, id_words, experts, elements)
                lists, places, blocks = made[:2], made[2], made[3]
        if const_expr(self.by_boxes):
            if progress.toint() == 0:
                cute.arch.griddepcontrol_wait()
        elif warp_index > 0 or early == 0:
            cute.arch.griddepcontrol_wait()
        if warp_index > 0:
            cute.arch.griddepcontrol_launch_dependents()
        if places == 0:
            blocks = cutlass.min(cutlass.max(used.load(), 0) // self.tile_m, listed)
        tiles = blocks * columns
        routing = (*lists, blocks, k_tiles, places, experts)
        place = (rank, first, grid, tiles, columns)

        if warpgroup_index == 0:
            if const_expr(self.registers > 0):
                cute.arch.setmaxregister_decrease(self.loader_registers)
            sizes = (experts, w_rows, k)
            limits = (elements, divide, k * self.dtype.width // 128)
            weights_at = (second, self.hint_for_weights(experts, elements))
            scales = ((x_scale, x_scale_step), (w_scale, w_scale_expert, w_scale_step, second))
            if const_expr(self.by_boxes):
                if warp_index == 0:
                    self.load_weights(
                        *(tma_w, storage, full, empty, routing, place, sizes, weights_at),
                        *(tma_x, x_rows, counter, progress),
                    )
                if const_expr(self.block_scaled):
                    if warp_index == 1:
                        self.load_scales(
                            *(thread - 32, storage, full, empty, routing, place, k, progress),
                            *scales,
                        )
            elif warp_index == 0:
                self.load_weights(
                    *(tma_w, storage, full, empty, routing, place, sizes, weights_at),
                    counter=counter,
                )
            elif const_expr(self.in_expert_order):
                self.load_rows(
                    *(thread - 32, x, x_pieces, storage, full, empty, routing, place, limits),
                    *((progress, rows), *scales),
                )
            elif warp_index < 1 + self.gatherers // 32:
                self.gather_rows(
                    *(thread - 32, x, x_pieces, storage, full, empty, routing, place, limits),
                    *scales,
                )
            if const_expr(not self.up):
                if (warp_index == 3) & (ids.toint() != 0):
                    self.clear_rows_of_none(ids, id_words, bound, elements, rows, out)
            if const_expr(self.by_boxes):
                if warp_index == 3:  # who waits for this grid waits for the one before it
                    cute.arch.griddepcontrol_wait()
        else:
            if const_expr(self.registers > 0):
                cute.arch.setmaxregister_increase(self.registers)
            consumer = warpgroup_index - 1
            factors = (x_scale, x_scale_step, divide, weights)
            of_weights = (w_scale, w_scale_expert, w_scale_step, second)
            self.multiply(
                *(thread, consumer, storage, full, empty, routing, place),
                *(elements, rows, factors, of_weights, (out, out_scale), to_slots),
            )

    @cute.jit
    def multiply(
        self,
        thread,
        consumer,
        storage,
        full,
        empty,
        routing,
        place,
        elements,
        rows,
        factors,
        of_weights,
        outs,
        to_slots,
    ):
        """A warpgroup: its rows of its tiles, from the ring to the result."""
        k_tiles = routing[3]
        rank, first, grid, tiles, columns = place
        w_scale, w_scale_expert, w_scale_step, second = of_weights
        lane = thread % 32
        wide = self.half if const_expr(self.block_scaled) else self.tile_n
        mma = self.mma(self.dtype, self.sharing, wide)
        part = mma.get_slice(0 if const_expr(self.pingpong) else consumer * WARPGROUP)
        x_layout = self.smem_layout(self.dtype, self.tile_m, self.stages)
        w_layout = self.smem_layout(self.dtype, wide, self.stages * (self.tile_n // wide))
        sx = storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        sw = storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        rx = mma.make_fragment_A(part.partition_A(sx))
        rw = mma.make_fragment_B(part.partition_B(sw))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((self.tile_m, wide)), Float32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        mmas, accs, sums = mma, acc, acc
        if const_expr(self.block_scaled):
            start = self.mma(self.dtype, self.sharing, wide)
            start.set(warpgroup.Field.ACCUMULATE, False)
            mmas, accs = (start, mma), (acc, acc)
            if const_expr(not self.in_turn):
                accs = (acc, cute.make_rmem_tensor(acc.shape, Float32))
            sums = cute.make_rmem_tensor(2 * cute.size(acc), Float32)

        index, phase = Int32(0), Int32(0)
        number, every, entry = first, grid, Int32(0)
        at_column, next_column, handed, next_expert = Int32(0), Int32(0), Int32(0), Int32(0)
        dealt = const_expr(self.pingpong and not self.by_turns)
        if const_expr(dealt):
            number, every = first + consumer * grid, self.consumers * grid
        if const_expr(self.pingpong):
            if consumer == 1:
                arrive(_TURN + 0)
                if first < tiles:
                    steps = self.steps_of(routing, first // columns + rank)
                    index, phase = self.skip(index, phase, steps)
                    if const_expr(self.by_turns):
                        number, _, _ = self.take(storage, entry)
                        entry += 1
        else:
            number, next_column, next_expert = self.in_order(first, routing, columns)
        # What is known of a tile is read while the one before it is multiplied, or goes out (see
        # `looks_late`); where warpgroups take turns with tiles as they come, while the other one
        # multiplies.
        facts, ahead = self.facts(), self.facts()
        scales = cute.make_rmem_tensor(self.wg_rows // 32, Float32)  # of this lane's rows of sums
        columns_scales = self.columns_scales()
        looks_ahead = const_expr(dealt or not self.pingpong)
        end = self.end_of(routing, place)
        if const_expr(looks_ahead):
            if number < end:
                self.look_up(ahead, routing, place, number, thread, consumer, elements)
        while number < end:
            after, at_column, handed = number + every, next_column, next_expert
            if const_expr(self.in_expert_order):
                after, next_column, next_expert = self.take(storage, entry)
                entry += 1
            if const_expr(looks_ahead):
                self.bound(facts, ahead, routing, elements)
            else:
                self.look_up(facts, routing, place, number, thread, consumer, elements)
                self.bound(facts, facts, routing, elements)
            block = self.block_of(number, place)
            column = self.column_of(number, at_column, place)
            expert = facts[0]
            if const_expr(self.in_expert_order):
                expert = handed
            steps = k_tiles if expert >= 0 else Int32(0)
            real = facts[2] < elements
            for i in cutlass.range_constexpr(1, self.wg_rows // 32):
                real = real | (facts[2 + i] < elements)
            any_real = cute.arch.vote_any_sync(real)
            multiplies = any_real & (expert >= 0)
            # Zeros of experts that are elsewhere meet no scale or weight, which might be infinite.
            w_scale_at = w_scale + Int64(cutlass.max(expert, 0)) * w_scale_expert
            of_columns = (w_scale_at, w_scale_step, rows if expert >= 0 else Int32(0))
            ahead_of = (ahead, routing, place, after, thread, consumer, elements)
            of_rows = (scales, facts, factors, elements if expert >= 0 else Int32(0))
            first_column = column * self.width
            of_chunk = (columns_scales, of_columns, first_column, second, thread)
            if const_expr(not looks_ahead):
                self.scales_of_rows(*of_rows)
                self.scales_of_columns(*of_chunk)
            elif const_expr(self.looks_late):
                self.scales_of_rows(*of_rows)
            elif const_expr(not self.begins):
                self.prepare(ahead_of, of_rows, of_chunk)
            if const_expr(self.block_scaled):
                row = thread % WARPGROUP // 32 * 16 + lane // 4
                if const_expr(not self.pingpong):
                    row += consumer * EPI
            sums.fill(0.0)
            theirs = Int32(0)  # steps of the tile of the other warpgroup's turn
            if const_expr(dealt):
                if number + grid < tiles:
                    theirs = self.steps_of(routing, (number + grid) // columns + rank)
            if const_expr(self.pingpong):
                sync(_TURN + consumer, 2 * WARPGROUP)
            if multiplies:
                if const_expr(self.block_scaled):
                    index, phase = self.multiply_blocks(
                        *(mmas, (accs, sums, rx, rw), (full, empty, index, phase, steps)),
                        *(storage, row, scales),
                    )
                else:
                    for step in cutlass.range(steps, unroll=1):
                        cute.arch.mbarrier_wait(full + index, phase)
                        if const_expr(not self.by_boxes):  # then not all is the copy engine's
                            cute.arch.fence_proxy("async.shared", space="cta")
                        warpgroup.fence()
                        for at_k in cutlass.range_constexpr(cute.size(rx, mode=[2])):
                            at = (None, None, at_k, index)
                            cute.gemm(mma, acc, rx[at], rw[at], acc)
                        warpgroup.commit_group()
                        if const_expr(self.begins):
                            if step == 0:  # while its products are made
                                self.prepare(ahead_of, of_rows, of_chunk)
                        warpgroup.wait_group(1)
                        if step > 0:
                            self.release(empty, index - 1 if index > 0 else self.stages - 1)
                        index, phase = self.next(index, phase)
            else:
                if const_expr(self.begins):
                    self.prepare(ahead_of, of_rows, of_chunk)
                for _ in cutlass.range(steps, unroll=1):
                    cute.arch.mbarrier_wait(full + index, phase)
                    self.release(empty, index)
                    index, phase = self.next(index, phase)
            if const_expr(self.pingpong):
                arrive(_TURN + 1 - consumer)
            warpgroup.wait_group(0)
            if const_expr(not self.block_scaled):
                if multiplies:
                    self.release(empty, index - 1 if index > 0 else self.stages - 1)
            if const_expr(self.pingpong):
                if const_expr(self.by_turns):
                    after, _, _ = self.take(storage, entry)
                    entry += 1
                    if after < tiles:
                        theirs = self.steps_of(routing, after // columns + rank)
                index, phase = self.skip(index, phase, theirs)
                # A warp without real rows has nothing to store.
                at = 2 + self.wg_rows // 32
                mine_real = (facts[at] < elements) | (facts[at + 1] < elements)
                any_real = any_real & cute.arch.vote_any_sync(mine_real)
            if const_expr(self.looks_late):
                self.look_up(*ahead_of)
            if any_real:
                slots_of = block if to_slots > 0 else Int32(-1)
                wanted = (thread, consumer, storage, sums, facts)
                of_both = (scales, columns_scales, of_columns, first_column, elements, rows, second)
                if const_expr(self.quantizes):
                    if outs[1].toint() != 0:
                        self.put_out_quantized(
                            *(*wanted, first_column, rows, outs, slots_of, elements)
                        )
                    else:
                        self.put_out(*wanted, *of_both, outs[0], slots_of)
                else:
                    self.put_out(*wanted, *of_both, outs[0], slots_of)
            if const_expr(self.counts):
                if expert >= 0:
                    self.say_stored(storage)
            if const_expr(not looks_ahead):
                if after < tiles:  # so far the other warpgroup's
                    after, _, _ = self.take(storage, entry)
                    entry += 1
            number = after

    @cute.jit
    def prepare(self, ahead_of, of_rows, of_chunk):
        """What the next tile and this one's end need to know."""
        self.look_up(*ahead_of)
        self.scales_of_rows(*of_rows)
        self.scales_of_columns(*of_chunk)

    def facts(self):
        """Of a tile: its expert where that is not handed on, a word that nobody reads, whether rows
        are real (32 at a time, a lane each), elements of this lane's rows of sums."""
        return cute.make_rmem_tensor(2 + self.wg_rows // 32 + self.wg_rows // EPI * 2, Int32)

    @cute.jit
    def bound(self, facts, found, routing, elements):
        """Clamps what the lists say to valid experts and elements."""
        if const_expr(not self.in_expert_order):
            facts[0] = self.real_expert(routing, found[0])
        for i in cutlass.range_constexpr(2, cute.size(facts)):
            facts[i] = within(found[i], elements)

    @cute.jit
    def look_up(self, facts, routing, place, number, thread, consumer, elements):
        lane, warp_row = thread % 32, thread % WARPGROUP // 32 * 16
        block = cutlass.min(self.block_of(number, place), routing[2] - 1)
        if const_expr(not self.in_expert_order):
            facts[0] = self.listed_expert(routing, block)
        rows = self.rows_of(routing, block)
        mine = 0 if const_expr(self.pingpong) else consumer * EPI
        at = 2
        for i in cutlass.range_constexpr(self.wg_rows // 32):
            facts[at + i] = self.element_of(routing, rows, mine + lane + i * 32, elements)
        at += self.wg_rows // 32
        for half in cutlass.range_constexpr(self.wg_rows // EPI):
            row = mine + half * EPI + warp_row
            for i in cutlass.range_constexpr(2):
                of_row = row + lane // 4 + i * 8
                facts[at + half * 2 + i] = self.element_of(routing, rows, of_row, elements)


def arrive(barrier):
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP)
