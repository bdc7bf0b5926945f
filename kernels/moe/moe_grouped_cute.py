# SPDX-License-Identifier: Apache-2.0
"""moe_up and moe_down: blocks of routed rows times their experts' weights.

A tile is one block of the routing (64 or 128 rows) times tile_n rows of its expert's weights. For
`up` one half of these are gates and the other their partners, which meet in the activation; for
`down` they are neighbours. Thread blocks are persistent: they take tiles until none is left.

For many tokens the products bind it: at T = 4096, k = 8, E = 64, H = 2048, I = 1024 they are 412
GFLOP, 0.6 ms at the rate of the best GEMM. Gathering rows beforehand would move 134 MB twice, so
they are gathered on the way to shared memory. The copy engine cannot do that: threads copy 16 bytes
each, rows by the routing's ids, beside the engine's tiles of weights. Results go straight to their
elements' rows. For few tokens the weights' bytes bind it: the ring of stages keeps enough of them
in flight, and `down` begins to load its own before `up` has ended.

The warps:

  warp    tiles of 64 rows         tiles of 128 rows             tiles of 128, x by boxes
  0       weights, takes tiles     weights, takes tiles          weights and x, takes tiles
  1       rows of x                rows of x, block scales       block scales
  2       rows of x                rows of x                     -
  3       -                        rows of x, counts stored      waits for the previous grid
  4-7     multiply and store       multiply and store rows       multiply and store rows
          every other tile         0-63 of every tile            0-63 of every tile
  8-11    the other tiles          rows 64-127                   rows 64-127

In tiles of 64 rows, warps 1 and 2 copy block scales, too. Warp 3 of `down` also writes zeros to the
rows of ids that name no expert.

The barriers:

  full[stage]     the loaders to the multipliers: one arrival per copying thread, one for the bytes
                  of the copy engine
  empty[stage]    back: one arrival per multiplying warp (4 where tiles are not shared, else 8)
  turns           warp 0 to all others: the next tile, at most TURNS ahead (moe_schedule_cute.py)
  stored          the multipliers of `up` to warp 3, which counts stored columns for `down`
  named 3 and 4   tiles of 64 rows: the warpgroups take turns multiplying, so that one stores while
                  the other keeps the tensor cores busy. float8 tiles of 128: a list of scales

A warpgroup whose rows are all padding multiplies nothing. float8 rows and weights have scales,
which meet the sums before the activation (moe_scales_cute.py), or each step's products
(moe_block_scales_cute.py).

If tiles of 128 rows are gathered, a step's products take about a thousand cycles, and the ring
has room for four steps. A loading warp has to need less per step, and its instructions wait for
each other, some five cycles each. A warp that copied a fourth of the rows and the weights took 1330
cycles, so that a step took 1550 (H200). So the weights have a warp of their own and the rows three,
which compute addresses once per tile, and look up the next tile's rows while this one is loaded.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from gemm_parts_cute import (
    box_copies,
    group_places,
    next_stage,
    release,
    sync,
    tensor_in,
    tiled_mma,
)
from linear_layouts_cute import EPI, ROW, WARPGROUP, coordinates
from moe_arguments_cute import Arguments, Ring, Routing, Tiles, address
from moe_block_scales_cute import (
    copy_scale,
    copy_step_scales,
    multiply_steps,
    scale_of_half,
    stage_scales,
)
from moe_routing_cute import (
    element_of,
    expert_of,
    listed_expert,
    prepare_routing,
    real_expert,
    route,
    rows_of,
    steps_of,
    within,
)
from moe_scales_cute import (
    read_column_scales,
    read_row_scales,
    scales_of_columns,
)
from moe_schedule_cute import (
    block_of,
    claim,
    claim_next,
    column_of,
    count_tile,
    end_of,
    in_order,
    init_stored,
    init_turns,
    publish,
    say_stored,
    take,
    wait_for_rows,
)
from moe_store_cute import put_out, put_out_float8
from moe_variant_cute import CONSUMERS, tile_layout

_TURN = 3  # named barriers 3 and 4: which warpgroup may multiply
_LOADER_REGISTERS, _REGISTERS = 56, 224  # per thread that loads, that multiplies
# L2 policies as createpolicy.fractional.L2 makes them, for all bytes.
_EVICT_NORMAL, _EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000
_NARROW_ROWS = 64 // 8  # rows that the 64 gathering threads of a tile of 64 rows copy at a time
_WIDE_ROWS = 96 // 8  # rows that the 96 of a tile of 128 rows copy at a time
_PASSES = -(-128 // _WIDE_ROWS)
_SECOND_LANES = (_PASSES - 8) * 4  # lanes of a warp that look up a second row


class MoeGrouped:
    def __init__(self, variant):
        self.v = variant

    @cute.jit
    def __call__(self, w, *arguments):
        v = self.v
        *values, blocks, stream = arguments
        p = Arguments(*values)
        k16 = cute.assume(p.k, divby=128 // v.dtype.width)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_w, _ = cpasync.make_tiled_tma_atom(
            load,
            cute.make_tensor(
                w, cute.make_layout((p.w_rows, k16, p.experts), stride=(k16, 1, p.w_rows * k16))
            ),
            cute.slice_(tile_layout(v.dtype, v.half, 1), (None, None, 0)),
            (v.half, v.tile_k),
        )
        tma_x = None
        if const_expr(v.by_boxes):
            tma_x, _ = cpasync.make_tiled_tma_atom(
                load,
                cute.make_tensor(p.x, cute.make_layout((p.x_rows, k16), stride=(k16, 1))),
                cute.slice_(tile_layout(v.dtype, v.tile_m, 1), (None, None, 0)),
                (v.tile_m, v.tile_k),
            )
        self.kernel.set_name_prefix(v.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(tma_w, tma_x, p).launch(
            grid=(blocks, 1, 1),
            block=(v.threads, 1, 1),
            cluster=(1, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tma_w: cute.CopyAtom, tma_x: cute.CopyAtom | None, p: Arguments):
        v = self.v
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        storage = cutlass.utils.SmemAllocator().allocate(v.storage())
        full = storage.barriers.data_ptr()
        empty = full + v.stages
        ring = Ring(storage, full, empty)
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_w)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(v.stages):
                    cute.arch.mbarrier_init(full + i, v.gatherers + 1)
                    cute.arch.mbarrier_init(empty + i, 4 * v.sharing)
                init_turns(v, storage)
                init_stored(v, storage)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        columns = cute.ceil_div(p.rows, v.width)
        k_tiles = cute.ceil_div(p.k, v.tile_k)
        # Always 0. Without it ptxas generates other code, which was not measured.
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        first = cute.arch.block_idx()[0]
        grid = cute.arch.grid_dim()[0]
        lists = (p.sorted_ids, p.expert_ids)
        blocks, places = Int32(0), Int32(0)
        if const_expr(v.pingpong):
            lists = (p.sorted_ids.toint(), p.expert_ids.toint())
            if lists[0] == 0:
                prepare_routing(v, p, storage, thread)
                if p.early == 0:
                    cute.arch.griddepcontrol_wait()
                made = route(v, p, storage, thread)
                lists, places, blocks = made[:2], made[2], made[3]
        if const_expr(v.by_boxes):
            if p.progress.toint() == 0:
                cute.arch.griddepcontrol_wait()
        elif warp_index > 0 or p.early == 0:
            cute.arch.griddepcontrol_wait()
        if warp_index > 0:
            cute.arch.griddepcontrol_launch_dependents()
        if places == 0:
            blocks = cutlass.min(cutlass.max(p.used.load(), 0) // v.tile_m, p.listed)
        routing = Routing(*lists, blocks, k_tiles, places, p.experts)
        tiles = Tiles(rank, first, grid, blocks * columns, columns)

        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(_LOADER_REGISTERS)
            pieces = p.k * v.dtype.width // 128  # of 16 bytes, in a row
            policy = self.weights_policy(p)
            if warp_index == 0:
                self.load_weights(p, ring, routing, tiles, policy, tma_w, tma_x)
            elif const_expr(v.pingpong):
                if warp_index < 1 + v.gatherers // 32:
                    self.gather_rows(p, ring, routing, tiles, pieces, thread - 32)
            elif const_expr(not v.by_boxes):
                self.load_rows(p, ring, routing, tiles, pieces, thread - 32)
            if const_expr(v.by_boxes and v.block_scaled):
                if warp_index == 1:
                    self.load_scales(p, ring, routing, tiles, thread - 32)
            if const_expr(not v.up):
                if (warp_index == 3) & (address(p.ids) != 0):
                    self.clear_rows_of_none(p)
            if const_expr(v.by_boxes):
                if warp_index == 3:  # a grid waiting for this one waits for the previous one, too
                    cute.arch.griddepcontrol_wait()
        else:
            cute.arch.setmaxregister_increase(_REGISTERS)
            self.multiply(p, ring, routing, tiles, thread, warpgroup_index - 1)

    # -- loading -----------------------------------------------------------------------------------

    @cute.jit
    def load_weights(self, p, ring, routing, tiles, policy, tma_w, tma_x):
        """Warp 0: both halves of each step's tile of weights, and the rows of x that come by boxes.
        It also takes tiles and publishes them."""
        v = self.v
        storage, full, empty = ring
        parts = (*self.parts_of_weights(p, storage, tma_w), policy)
        if const_expr(v.by_boxes):
            layout = tile_layout(v.dtype, v.tile_m, v.stages)
            sx = tensor_in(storage.x, layout)
            to_x, from_x = box_copies(tma_x, sx, coordinates(p.x_rows, p.k), (v.tile_m, v.tile_k))
        step_columns = v.width // v.half  # in halves
        index, phase = Int32(0), Int32(1)
        number, turn, entry = tiles.first, tiles.first, Int32(0)
        at_column, handed = Int32(0), Int32(0)
        given = Int32(0)  # steps of the first tile whose weights are in flight
        if const_expr(not v.pingpong):
            number, at_column, handed = in_order(v, routing, tiles, tiles.first)
            if const_expr(not v.by_boxes):  # before any other load for the first tile
                begun = (number, at_column * step_columns, handed)
                given = self.begin_weights(tma_w, parts, full, routing, begun)
                cute.arch.griddepcontrol_wait()
            publish(v, storage, entry, *in_order(v, routing, tiles, tiles.first + tiles.grid))
            turn = claim(p, tiles.first + tiles.grid, tiles.grid)
        while number < end_of(v, routing, tiles):
            block = block_of(v, tiles, number)
            column = column_of(v, tiles, number, at_column) * step_columns
            expert = handed
            if const_expr(v.pingpong):
                expert = expert_of(v, routing, block)
            steps = routing.steps if expert >= 0 else 0
            if const_expr(v.by_boxes):
                if (address(p.progress) != 0) & (steps > 0):
                    wait_for_rows(v, p, block)
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                if step >= given:
                    self.copy_weights(tma_w, parts, (column, step, expert), full, index)
                if const_expr(v.by_boxes):
                    _copy(tma_x, from_x[None, (block, step)], to_x[None, index], full + index)
                index, phase = next_stage(v.stages, index, phase)
            given = Int32(0)
            if const_expr(not v.pingpong):
                number, at_column, handed = take(v, storage, entry)
                entry += 1
                turn = cute.arch.shuffle_sync(turn, 0)
                publish(v, storage, entry, *in_order(v, routing, tiles, turn))
                turn = claim(p, turn, tiles.grid)
            elif const_expr(not v.dynamic):
                number += tiles.grid
            else:
                # Weights need no waiting, the counter does. The ring is full meanwhile.
                cute.arch.griddepcontrol_wait()
                number = claim_next(p, tiles, number)
                publish(v, storage, entry, number)
                entry += 1

    @cute.jit
    def begin_weights(self, tma_w, parts, full, routing, tile):
        """Loads as many steps of the first tile as the ring has room for; returns how many."""
        block, column, expert = tile
        given = Int32(0)
        if (block < routing.blocks) & (expert >= 0):
            given = cutlass.min(routing.steps, self.v.stages)
            for step in cutlass.range(given, unroll=1):
                self.copy_weights(tma_w, parts, (column, step, expert), full, step)
        return given

    @cute.jit
    def weights_policy(self, p):
        """If experts have few rows, most weights are read once. They leave L2 first, before rows
        of x and the rows between `up` and `down`, which are read again."""
        policy = None  # for 16-bit tiles of 128 rows it was up to 1 % slower (H200)
        if const_expr(self.v.dtype.width == 8 or self.v.pingpong):
            few = p.elements <= p.experts * EPI
            policy = Int64(_EVICT_FIRST) if few else Int64(_EVICT_NORMAL)
        return policy

    def parts_of_weights(self, p, storage, tma_w):
        """The ring's tiles of weights and the two halves in memory."""
        v = self.v
        sw = tensor_in(storage.w, tile_layout(v.dtype, v.half, 2 * v.stages))
        places, box = group_places(p.experts, p.w_rows, p.k), (v.half, v.tile_k)
        other = cute.domain_offset((p.second, 0, 0), places)
        to_w, from_first = box_copies(tma_w, sw, places, box)
        return to_w, from_first, box_copies(tma_w, sw, other, box)[1]

    @cute.jit
    def copy_weights(self, tma_w, parts, at, full, index):
        """Both halves of a step's tile, by a warp."""
        v = self.v
        to_w, from_first, from_second, policy = parts
        barrier, to = full + index, 2 * index
        with cute.arch.elect_one():
            rows = v.tile_n + (v.tile_m if const_expr(v.by_boxes) else 0)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, rows * ROW)
        _copy(tma_w, from_first[None, at], to_w[None, to], barrier, policy)
        _copy(tma_w, from_second[None, at], to_w[None, to + 1], barrier, policy)

    @cute.jit
    def gather_rows(self, p, ring, routing, tiles, pieces, thread):
        """Tiles of 64 rows: a thread copies a 16-byte piece of every eighth row, and the block
        scale of a row and of a half."""
        v = self.v
        storage, full, empty = ring
        row, piece = thread // 8, thread % 8
        to_x = storage.x.data_ptr().toint() + row * ROW + (piece ^ row) * 16
        sources = cute.make_rmem_tensor(v.tile_m // _NARROW_ROWS, Int32)  # in 16-byte pieces
        index, phase = Int32(0), Int32(1)
        number, entry = tiles.first, Int32(0)
        while number < tiles.count:
            block = block_of(v, tiles, number)
            steps = steps_of(v, routing, block)
            rows = rows_of(v, routing, block)
            for i in cutlass.range_constexpr(v.tile_m // _NARROW_ROWS):
                element = element_of(v, routing, rows, row + i * _NARROW_ROWS, p.elements)
                element = within(element, p.elements)
                sources[i] = Int32(-1)
                if element < p.elements:
                    sources[i] = element // p.divide * p.x_pieces + piece
            of_row, of_half = Int32(-1), Int32(0)
            if const_expr(v.block_scaled):
                element = within(element_of(v, routing, rows, thread, p.elements), p.elements)
                if element < p.elements:
                    of_row = element // p.divide * p.x_scale_step
                expert = expert_of(v, routing, block)
                of_half = scale_of_half(v, p, expert, number % tiles.columns, thread)
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                inside = step * (ROW // 16) + piece < pieces
                to = to_x + index * (v.tile_m * ROW)
                for i in cutlass.range_constexpr(v.tile_m // _NARROW_ROWS):
                    # Pieces of the last step beyond a row's end are zeros and read nothing.
                    at = sources[i] + (step * (ROW // 16) if inside else 0)
                    source = address(p.x) + Int64(at) * 16
                    size = 16 if inside else 0
                    _copy_16(to + i * (_NARROW_ROWS * ROW), source, size, sources[i] >= 0)
                if const_expr(v.block_scaled):
                    at_row = of_row + step if of_row >= 0 else Int32(-1)
                    copy_step_scales(v, p, storage, index, thread, at_row, of_half + step)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
                index, phase = next_stage(v.stages, index, phase)
            if const_expr(v.dynamic):
                number, _, _ = take(v, storage, entry)
                entry += 1
            else:
                number += tiles.grid

    @cute.jit
    def load_rows(self, p, ring, routing, tiles, pieces, thread):
        """Tiles of 128 rows: a thread copies a 16-byte piece of every twelfth row, and one or two
        block scales. One warp counts the tiles of `up` that are stored."""
        v = self.v
        storage, full, empty = ring
        elements = p.elements
        lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        row, piece = warp * 4 + lane // 8, lane % 8
        # _WIDE_ROWS rows on, the swizzle has another bit.
        to_x = storage.x.data_ptr().toint() + row * ROW
        to_even = to_x + (piece ^ row % 8) * 16
        to_odd = to_x + (piece ^ row % 8 ^ 4) * 16
        sources = cute.make_rmem_tensor(_PASSES, Int32)  # in 16-byte pieces, -1 for padding
        # A warp copies 44 rows: each lane looks up one or two of them for all lanes.
        mine = warp * 4 + lane % 4 + lane // 4 * _WIDE_ROWS
        second = mine + 8 * _WIDE_ROWS
        if lane >= _SECOND_LANES:
            second = Int32(v.tile_m)
        block, at_column, expert = in_order(v, routing, tiles, tiles.first)
        entry = Int32(0)
        ahead = self.read_id(routing, block, mine, elements)
        ahead_second = self.read_id(routing, block, second, elements)
        index, phase = Int32(0), Int32(1)
        before, loaded = (Int32(0), Int32(0)), Int32(0)  # the tile to count next; tiles loaded
        while block < routing.blocks:
            steps = routing.steps if expert >= 0 else 0
            ahead, ahead_second = within(ahead, elements), within(ahead_second, elements)
            token, second_token = ahead // p.divide, ahead_second // p.divide
            is_real, is_second = ahead < elements, ahead_second < elements
            from_row = token * p.x_pieces if is_real else Int32(-1)
            from_second = second_token * p.x_pieces if is_second else Int32(-1)
            for i in cutlass.range_constexpr(_PASSES):
                found = from_row if const_expr(i < 8) else from_second
                sources[i] = cute.arch.shuffle_sync(found, lane // 8 + i % 8 * 4)
            scale, second_scale = Int64(0), Int64(0)
            if const_expr(v.block_scaled):
                # Two lanes without a second row copy the scales of the weights' halves.
                scale = address(p.x_scale) + Int64(token * p.x_scale_step if is_real else 0) * 4
                at_scale = second_token * p.x_scale_step if is_second else Int32(0)
                second_scale = address(p.x_scale) + Int64(at_scale) * 4
                if lane >= _SECOND_LANES:
                    half = cutlass.min(lane - _SECOND_LANES, 1)
                    of_half = scale_of_half(v, p, expert, at_column, half)
                    second_scale = address(p.w_scale) + Int64(of_half) * 4
            following, next_column, next_for = take(v, storage, entry)
            entry += 1
            ahead = self.read_id(routing, following, mine, elements)
            ahead_second = self.read_id(routing, following, second, elements)
            if const_expr(v.counts):
                if (steps > 0) & (steps <= v.stages):
                    count_tile(v, p, storage, warp, before, loaded)
            source = address(p.x) + piece * 16
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                size = Int32(16)
                if const_expr(not v.block_scaled):
                    # Pieces of the last step beyond a row's end are zeros.
                    size = Int32(16) if step * (ROW // 16) + piece < pieces else Int32(0)
                at = source if size > 0 else address(p.x)
                for i in cutlass.range_constexpr(_PASSES):
                    to = to_even if const_expr(i % 2 == 0) else to_odd
                    to += index * (v.tile_m * ROW) + i * (_WIDE_ROWS * ROW)
                    _copy_16(to, at + Int64(sources[i]) * 16, size, sources[i] >= 0)
                source += ROW
                if const_expr(v.block_scaled):
                    to_scales = stage_scales(v, storage, index).toint()
                    copy_scale(to_scales + mine * 4, scale)
                    to_second = second
                    if lane >= _SECOND_LANES:
                        to_second = v.tile_m + lane - _SECOND_LANES
                    is_half = (warp == 0) & (lane >= _SECOND_LANES) & (lane < _SECOND_LANES + 2)
                    is_row = second < v.tile_m
                    copy_scale(to_scales + to_second * 4, second_scale, is_row | is_half)
                    scale, second_scale = scale + 4, second_scale + 4
                cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
                if const_expr(v.counts):  # the multipliers are at this tile: the last is stored
                    if step == v.stages:
                        count_tile(v, p, storage, warp, before, loaded)
                index, phase = next_stage(v.stages, index, phase)
            # Nobody waits for the rows of experts on other ranks.
            is_here = steps > 0
            before = (block if is_here else before[0], at_column if is_here else before[1])
            loaded += 1 if is_here else 0
            block, at_column, expert = following, next_column, next_for
        if const_expr(v.counts):
            count_tile(v, p, storage, warp, before, loaded)

    @cute.jit
    def read_id(self, routing, block, row, elements):
        """The list's value for a row of a tile of 128; `elements` beyond the tile's rows and the
        last tile."""
        element = elements
        if (block < routing.blocks) & (row < self.v.tile_m):
            element = (routing.ids + (block * self.v.tile_m + row)).load()
        return element

    @cute.jit
    def load_scales(self, p, ring, routing, tiles, lane):
        """Warp 1, where x comes by boxes: the block scales of its rows and of the weights. It waits
        for the rows itself, which drops lines of L1, through which these copies read."""
        v = self.v
        storage, full, empty = ring
        block, column, expert = in_order(v, routing, tiles, tiles.first)
        entry = Int32(0)
        index, phase = Int32(0), Int32(1)
        while block < routing.blocks:
            steps = routing.steps if expert >= 0 else Int32(0)
            if (address(p.progress) != 0) & (steps > 0):
                wait_for_rows(v, p, block)
            of_row = (block * v.tile_m + lane) * p.x_scale_step
            of_half = scale_of_half(v, p, expert, column, lane)
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                to = stage_scales(v, storage, index).toint()
                for i in cutlass.range_constexpr(v.tile_m // 32):
                    at = of_row + i * 32 * p.x_scale_step + step
                    copy_scale(to + (lane + i * 32) * 4, address(p.x_scale) + Int64(at) * 4)
                at = address(p.w_scale) + Int64(of_half + step) * 4
                copy_scale(to + (v.tile_m + lane) * 4, at, lane < 2)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + index)
                index, phase = next_stage(v.stages, index, phase)
            block, column, expert = take(v, storage, entry)
            entry += 1

    @cute.jit
    def clear_rows_of_none(self, p):
        """Warp 3 of `down`: zeros for ids that name no expert, which are in no block."""
        lane = cute.arch.lane_idx()
        zeros = cute.make_rmem_tensor(8, self.v.out_dtype)
        zeros.fill(0.0)
        start = cute.arch.block_idx()[0] * 32
        for group in cutlass.range(start, p.elements, cute.arch.grid_dim()[0] * 32, unroll=1):
            mine = group + lane
            none = False
            if mine < p.elements:
                low = (p.ids + mine * p.id_words).load()
                none = (low < 0) | (low >= p.bound)
                if p.id_words == 2:
                    none = none | ((p.ids + (mine * 2 + 1)).load() != 0)
            if none:
                for at in cutlass.range(0, p.rows, 8, unroll=1):
                    to = p.out + (Int64(mine) * p.rows + at)
                    cute.make_tensor(to.align(16), cute.make_layout(8)).store(zeros.load())

    # -- multiplying -------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, p, ring, routing, tiles, thread, consumer):
        """A warpgroup: its tiles, or its rows of each tile, from the ring to the result."""
        v = self.v
        storage, full, empty = ring
        elements = p.elements
        lane = thread % 32
        wide = v.half if const_expr(v.block_scaled) else v.tile_n
        mma = tiled_mma(v.dtype, v.sharing, wide)
        part = mma.get_slice(0 if const_expr(v.pingpong) else consumer * WARPGROUP)
        sx = tensor_in(storage.x, tile_layout(v.dtype, v.tile_m, v.stages))
        sw = tensor_in(storage.w, tile_layout(v.dtype, wide, v.stages * (v.tile_n // wide)))
        rx = mma.make_fragment_A(part.partition_A(sx))
        rw = mma.make_fragment_B(part.partition_B(sw))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((v.tile_m, wide)), Float32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        mmas, accs, sums = mma, acc, acc
        if const_expr(v.block_scaled):
            start = tiled_mma(v.dtype, v.sharing, wide)
            start.set(warpgroup.Field.ACCUMULATE, False)
            mmas, accs = (start, mma), (acc, acc)
            if const_expr(not v.halves_in_turn):
                accs = (acc, cute.make_rmem_tensor(acc.shape, Float32))
            sums = cute.make_rmem_tensor(2 * cute.size(acc), Float32)

        index, phase = Int32(0), Int32(0)
        number, every, entry = tiles.first, tiles.grid, Int32(0)
        at_column, next_column, handed, next_expert = Int32(0), Int32(0), Int32(0), Int32(0)
        if const_expr(not v.dynamic):
            number, every = tiles.first + consumer * tiles.grid, CONSUMERS * tiles.grid
        if const_expr(v.pingpong):
            if consumer == 1:
                _arrive(_TURN + 0)
                if tiles.first < tiles.count:
                    steps = steps_of(v, routing, block_of(v, tiles, tiles.first))
                    index, phase = _skip(v.stages, index, phase, steps)
                    if const_expr(v.dynamic):
                        number, _, _ = take(v, storage, entry)
                        entry += 1
        else:
            number, next_column, next_expert = in_order(v, routing, tiles, tiles.first)
        facts, ahead = cute.make_rmem_tensor(5, Int32), cute.make_rmem_tensor(5, Int32)
        scales = cute.make_rmem_tensor(2, Float32)  # of this lane's two rows of sums
        columns_scales = scales_of_columns(v)
        end = end_of(v, routing, tiles)
        if const_expr(v.looks_ahead):
            if number < end:
                self.look_up(ahead, p, routing, tiles, number, thread, consumer)
        while number < end:
            after, at_column, handed = number + every, next_column, next_expert
            if const_expr(not v.pingpong):
                after, next_column, next_expert = take(v, storage, entry)
                entry += 1
            if const_expr(v.looks_ahead):
                self.clamp(facts, ahead, routing, elements)
            else:
                self.look_up(facts, p, routing, tiles, number, thread, consumer)
                self.clamp(facts, facts, routing, elements)
            block = block_of(v, tiles, number)
            column = column_of(v, tiles, number, at_column)
            expert = facts[0] if const_expr(v.pingpong) else handed
            steps = routing.steps if expert >= 0 else Int32(0)
            real = (facts[1] < elements) | (facts[2] < elements)
            any_real = cute.arch.vote_any_sync(real)
            multiplies = any_real & (expert >= 0)
            # A tile of an expert on another rank stores zeros. It reads no scale or weight: these
            # might be infinite.
            w_scale = p.w_scale + Int64(cutlass.max(expert, 0)) * p.w_scale_expert
            of_columns = (w_scale, p.rows if expert >= 0 else Int32(0))
            ahead_of = (ahead, p, routing, tiles, after, thread, consumer)
            of_rows = (scales, facts, elements if expert >= 0 else Int32(0))
            first_column = column * v.width
            of_chunk = (columns_scales, *of_columns, first_column, thread)
            if const_expr(not v.looks_ahead):
                read_row_scales(v, p, *of_rows)
                read_column_scales(v, p, *of_chunk)
            elif const_expr(v.halves_in_turn):
                read_row_scales(v, p, *of_rows)
            elif const_expr(not v.looks_after_first):
                self.prepare(p, ahead_of, of_rows, of_chunk)
            if const_expr(v.block_scaled):
                row = thread % WARPGROUP // 32 * 16 + lane // 4
                if const_expr(not v.pingpong):
                    row += consumer * EPI
            sums.fill(0.0)
            theirs = Int32(0)  # steps of the other warpgroup's tile after this one
            if const_expr(not v.dynamic):
                if number + tiles.grid < tiles.count:
                    theirs = steps_of(v, routing, block_of(v, tiles, number + tiles.grid))
            if const_expr(v.pingpong):
                sync(_TURN + consumer, 2 * WARPGROUP)
            if multiplies:
                if const_expr(v.block_scaled):
                    index, phase = multiply_steps(
                        *(v, mmas, (accs, sums, rx, rw), ring, (index, phase), steps),
                        *(row, scales),
                    )
                else:
                    for step in cutlass.range(steps, unroll=1):
                        cute.arch.mbarrier_wait(full + index, phase)
                        if const_expr(not v.by_boxes):  # threads wrote to the stage, too
                            cute.arch.fence_proxy("async.shared", space="cta")
                        warpgroup.fence()
                        for at_k in cutlass.range_constexpr(cute.size(rx, mode=[2])):
                            at = (None, None, at_k, index)
                            cute.gemm(mma, acc, rx[at], rw[at], acc)
                        warpgroup.commit_group()
                        if const_expr(v.looks_after_first):
                            if step == 0:  # while its products are computed
                                self.prepare(p, ahead_of, of_rows, of_chunk)
                        warpgroup.wait_group(1)
                        if step > 0:
                            release(empty, index - 1 if index > 0 else v.stages - 1)
                        index, phase = next_stage(v.stages, index, phase)
            else:
                if const_expr(v.looks_after_first):
                    self.prepare(p, ahead_of, of_rows, of_chunk)
                for _ in cutlass.range(steps, unroll=1):
                    cute.arch.mbarrier_wait(full + index, phase)
                    release(empty, index)
                    index, phase = next_stage(v.stages, index, phase)
            if const_expr(v.pingpong):
                _arrive(_TURN + 1 - consumer)
            warpgroup.wait_group(0)
            if const_expr(not v.block_scaled):
                if multiplies:
                    release(empty, index - 1 if index > 0 else v.stages - 1)
            if const_expr(v.pingpong):
                if const_expr(v.dynamic):
                    after, _, _ = take(v, storage, entry)
                    entry += 1
                    if after < tiles.count:
                        theirs = steps_of(v, routing, block_of(v, tiles, after))
                index, phase = _skip(v.stages, index, phase, theirs)
                # A warp without real rows has nothing to store.
                mine_real = (facts[3] < elements) | (facts[4] < elements)
                any_real = any_real & cute.arch.vote_any_sync(mine_real)
            if const_expr(v.halves_in_turn):
                # Earlier, a fence for gathered rows, or the tile's first step, would wait for it.
                self.look_up(*ahead_of)
            if any_real:
                slots_of = block if p.to_slots > 0 else Int32(-1)
                sums_of = (v, p, storage, thread, consumer, sums, facts, first_column, slots_of)
                of_sums = (scales, columns_scales, of_columns)
                if const_expr(v.quantizes):
                    if address(p.out_scale) != 0:
                        put_out_float8(*sums_of)
                    else:
                        put_out(*sums_of, of_sums)
                else:
                    put_out(*sums_of, of_sums)
            if const_expr(v.counts):
                if expert >= 0:
                    say_stored(v, storage)
            if const_expr(not v.looks_ahead):
                if after < tiles.count:  # `after` is the other warpgroup's tile so far
                    after, _, _ = take(v, storage, entry)
                    entry += 1
            number = after

    @cute.jit
    def prepare(self, p, ahead_of, of_rows, of_chunk):
        """Reads the next tile's facts and this one's scales."""
        self.look_up(*ahead_of)
        read_row_scales(self.v, p, *of_rows)
        read_column_scales(self.v, p, *of_chunk)

    @cute.jit
    def look_up(self, facts, p, routing, tiles, number, thread, consumer):
        """A tile's facts, as the lists have them: [0] its expert if it was not handed over, [1] and
        [2] elements of rows lane and lane + 32, [3] and [4] of this lane's two rows of sums."""
        v = self.v
        lane, warp_row = thread % 32, thread % WARPGROUP // 32 * 16
        block = cutlass.min(block_of(v, tiles, number), routing.blocks - 1)
        if const_expr(v.pingpong):
            facts[0] = listed_expert(v, routing, block)
        rows = rows_of(v, routing, block)
        mine = 0 if const_expr(v.pingpong) else consumer * EPI
        for i in cutlass.range_constexpr(2):
            facts[1 + i] = element_of(v, routing, rows, mine + lane + i * 32, p.elements)
        row = mine + warp_row
        for i in cutlass.range_constexpr(2):
            of_row = row + lane // 4 + i * 8
            facts[3 + i] = element_of(v, routing, rows, of_row, p.elements)

    @cute.jit
    def clamp(self, facts, found, routing, elements):
        """Turns the lists' values into valid experts and elements."""
        if const_expr(self.v.pingpong):
            facts[0] = real_expert(routing, found[0])
        for i in cutlass.range_constexpr(1, 5):
            facts[i] = within(found[i], elements)


def _arrive(barrier):
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP)


@cute.jit
def _skip(stages, index, phase, steps):
    """The stage `steps` further on."""
    total = index + steps
    rounds = total // stages
    return total - rounds * stages, phase ^ (rounds & 1)


def _copy(tma, source, to, barrier, policy=None):
    cute.copy(tma, source, to, tma_bar_ptr=barrier, cache_policy=policy)


def _copy_16(to, source, size, real):
    """16 bytes to shared memory; bytes from `size` on are zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[to, source, size],
        predicate=real,
    )
