# SPDX-License-Identifier: Apache-2.0
"""The forward kernel over a paged cache, for sequences with any number of new tokens.

It multiplies like forward/kernel.py. The differences:

- The rows of a warpgroup are the query heads of one key head, times as many queries as fit into 64
  rows: keys are read once for all of them. Row r is query r % queries of head r // queries.
- Warps 0 and 1 copy values, warps 2 and 3 keys; they read the page table a block ahead. The copy
  engine takes 64 columns of the rows of a page, or of a block of keys if that is less. Its map ends
  with the sequence, so rows after the last key arrive as zeros, whatever the page holds. Rows of
  small pages are copied by lanes, 16 bytes each, because issuing a copy takes as long for few rows
  as for many.
- Rows of float8 caches are copied by lanes too. All four warps copy and convert a part of each
  block, of keys and values in turn, so that copies arrive while the previous block is converted. Or
  the sequence's pages are converted beforehand (copies.py).
- Tiles are numbered over all sequences: with T queries a tile, sequence b begins at (starts[b] +
  b * (T - 1)) // T. So each gets at least as many numbers as its queries need, and a search over
  the starts finds a number's sequence: nothing is planned on the host. Or paged_mixed.cu has
  numbered the tiles of sequences with many new tokens before, and the others have none.
- A head's sink is an additional score in the softmax's denominator.
- A tile's keys may be split among blocks. Part p of head h writes head p * heads + h of a
  workspace, and paged_combine.cu combines the parts.
- In the batch-invariant mode a part is `part_blocks` blocks of keys, and begins at a multiple of
  those, so that a row's sums depend on its own keys alone. With GROWING the first parts are
  shorter. A launch then has as many parts as its longest sequence needs.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from kernels.attention.common.layouts import (
    PIECE,
    ROWS,
    outer_coordinates,
    sequence_coordinates,
    staged_layout,
)
from kernels.attention.common.packed import load_at, rows_between
from kernels.attention.common.pipelines import sync, writer
from kernels.attention.common.softmax import hide_outside, inverse, join_sink, largest
from kernels.attention.common.tiles import free_blocks, key_blocks, place
from kernels.attention.forward.kernel import AttentionForward
from kernels.attention.paged.copies import claim, find, first_copy, publish, wait_for, widen_rows

_LN2 = 0.6931471805599453

# The fewest rows of a copy that shared memory's swizzle describes. The launch in C++ replaces the
# boxes of all maps.
COPY_ROWS = 8

LOADERS = 4  # warps
_LOADERS = 8  # their named barrier

# Who fills stages: the copy engine, page by page; lanes, 16 bytes at once; lanes that widen float8;
# the engine from copies of float8 pages.
BY_ENGINE, BY_LANES, BY_WIDENING, FROM_COPIES = range(4)

_PAGE = 128  # keys of a page of the copies; wide heads have two blocks of it
_CHUNKS = 8  # of 8 float8, that a lane loads at once for copies

# Row numbers of no sequence; sums with lengths and windows fit 32 bits.
_NO_ROW = 1 << 28
_NO_TILE = 1 << 22

# In place of a number of blocks: parts of a causal mask that grow, as (first part, first block,
# log2 of their blocks). paged_growing_parts in combine.h counts them.
GROWING = -1
PHASES = ((0, 0, 2), (8, 32, 3), (12, 64, 4))

_PART = 23  # a row of tiles has the number of its part of the keys from this bit on


class Paged(NamedTuple):
    """The parameters beside the maps and the Problem; PagedArguments in kernels.h."""

    starts_q: cute.Pointer
    lengths: cute.Pointer
    table: cute.Pointer
    sinks: cute.Pointer  # or null
    k_data: cute.Pointer  # of the maps
    v_data: cute.Pointer
    tile_starts: cute.Pointer  # starts_q, or the number of each sequence's first tile
    copied: cute.Pointer  # each sequence's first page of copies in 16 bits, -1: none; or null
    k_copies: cute.Pointer  # [pages, key heads, tile_n, columns]
    v_copies: cute.Pointer
    states: cute.Pointer  # [pages, 2, key heads]: of a page's copies of keys, and of values
    o: cute.Pointer
    total_q: Int32  # rows of q
    step_q: Int32  # from one of the starts to the next, in bytes
    length_step: Int32
    table_step: Int32
    table_row: Int32  # from a sequence's pages to the next one's, in 4 bytes
    row_step: Int32  # of o, in 16 bytes
    head_step: Int32
    columns: Int32  # of o
    capacity: Int32  # keys that the page table has room for
    page_bits: Int32  # log2 of a page's keys
    page_rows: Int32  # rows of the maps from a page to the next
    last_page: Int32
    # Blocks of keys of a part, a power of two; GROWING; 0: even shares of `parts`.
    part_blocks: Int32
    least_parts: Int32  # the fewest that give each block of threads a tile; `parts` is the most
    copy_rows: Int32
    copies: Int32  # of a block of keys
    group: Int32  # query heads of a key head
    queries: Int32  # of a warpgroup
    tiles: Int32  # of a key head
    halvings: Int32  # of the batch, until one sequence is left
    parts: Int32  # of a tile's keys
    mixed: Int32  # 1: tiles come from both ends of the batch in turn
    loader: Int32  # BY_ENGINE, ...
    k_row: Int32  # from a row of the maps to the next, in bytes
    v_row: Int32
    k_head: Int32  # from a head to the next, in 16 bytes
    v_head: Int32
    # Sequence b's first tile is (tile_starts[b] + b * tile_extra) // tile_divisor.
    tile_step: Int32  # of tile_starts, in bytes
    tile_extra: Int32
    tile_divisor: Int32
    least_tiles: Int32  # the fewest that give each block of threads one, if they are counted; or 0


POINTERS = Paged._fields[:11]
SIZES = Paged._fields[12:]


class PagedAttention(AttentionForward):
    def __init__(self, name, operands, variant):
        super().__init__(name, operands, variant)
        self.loader_registers, self.registers = 56, 224  # to widen needs more
        self.widens = operands.widens
        self.page_blocks = _PAGE // variant.tile_n

    # Maps and shared memory.

    def map_kinds(self, problem):
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        matrix, dtype = (problem.seq_q, self.d), self.operands.dtype
        q_piece, k_piece = (staged_layout(dtype, rows, PIECE, 1) for rows in (ROWS, COPY_ROWS))
        k_kind = (load, k_piece, (COPY_ROWS, PIECE), matrix, problem.kv_heads, True)
        return (
            (load, q_piece, (ROWS, PIECE), matrix, problem.heads, True),
            k_kind,
            k_kind,
            (store, self.smem_layouts()[3], (ROWS, PIECE), matrix, problem.heads, True),
        )

    def packed_rows(self, starts, sizes):
        return Paged(*starts, *sizes)

    def piece(self, smem, rows, size, stage, row, column):
        """Rows of shared memory from `row` on, in 64 columns; a stage has `size` rows."""
        layout = staged_layout(self.operands.dtype, rows, PIECE, 1)
        at = stage * (size * self.d) + column * (size * PIECE) + row * PIECE
        start = (smem.iterator + at).align(128)
        return cute.make_tensor(start, cute.slice_(layout.outer, (None, None, 0)))

    def copy(self, tma, barrier, piece, rows, hidden, outer, column):
        """Starts a copy of 64 columns; `hidden` of the map's rows come before the first one."""
        places = sequence_coordinates(rows, self.d, 1, 1, hidden)
        tile = (cute.size(piece, mode=[0]), PIECE)
        tiles = cute.zipped_divide(places, tile)
        to, source = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(piece, 0, 2), tiles
        )
        cute.copy(tma, source[None, (0, column, *outer)], to, tma_bar_ptr=barrier)

    # Tiles, sequences and masks.

    def measured(self, paged, problem):
        tiles, parts = self.used_tiles(paged, problem), self.used_parts(paged, problem)
        return paged._replace(tiles=tiles, parts=parts)

    @cute.jit
    def used_tiles(self, paged, problem):
        """The tiles of a key head."""
        tiles = paged.tiles
        if paged.least_tiles != 0:
            counted = load_at(paged.tile_starts, paged.tile_step, problem.batch)
            tiles = cutlass.min(cutlass.max(counted, paged.least_tiles), tiles)
        return cute.arch.make_warp_uniform(tiles)

    @cute.jit
    def used_parts(self, paged, problem):
        """The parts of the longest sequence, if a part is a number of blocks."""
        parts = paged.parts
        if paged.part_blocks != 0:
            longest = Int32(0)
            for entry in cutlass.range(cute.arch.lane_idx(), problem.batch, 32, unroll=1):
                keys = load_at(paged.lengths, paged.length_step, entry)
                longest = cutlass.max(longest, keys)
            longest = cute.arch.warp_redux_sync(longest, "max")
            longest = cutlass.min(longest, paged.capacity)
            own = cute.ceil_div(longest, self.tile_n * cutlass.max(paged.part_blocks, 1))
            if paged.part_blocks == GROWING:
                own = growing_parts(own)
            parts = cutlass.min(cutlass.max(own, paged.least_parts), parts)
        return cute.arch.make_warp_uniform(parts)

    def tiles(self, paged, problem):
        return paged.tiles, paged.tiles * problem.kv_heads * paged.parts

    def tile_queries(self, paged):
        return self.variant.warpgroups * paged.queries

    def first_tile(self, paged, entry):
        """The number of a sequence's first tile."""
        start = load_at(paged.tile_starts, paged.tile_step, entry)
        start = cutlass.min(cutlass.max(start, 0), paged.total_q)
        return (start + entry * paged.tile_extra) // paged.tile_divisor

    @cute.jit
    def tile(self, turn, q_tiles, paged, problem):
        """This block's tile in a round: row of tiles and part, first head of the result and
        sequence. The last tiles of the last sequences come first. In a mixed batch the first ones
        of the first sequences alternate with them, so that some blocks multiply chunks while others
        wait for the keys of decoding sequences."""
        at = place(turn, self.masked)
        if paged.mixed == 1:
            half = at // 2
            if at % 2 == 1:
                half = cutlass.max(self.tiles(paged, problem)[1] - 1 - half, 0)
            at = half
        whole = at // paged.parts
        part = at - whole * paged.parts
        slot = whole // problem.kv_heads
        head = (whole - slot * problem.kv_heads) * paged.group + part * problem.heads
        slot = cutlass.max(q_tiles - 1 - slot, 0)
        entry, end = Int32(0), problem.batch
        for _ in cutlass.range(paged.halvings, unroll=1):
            middle = (entry + end) // 2
            if self.first_tile(paged, middle) <= slot:
                entry = middle
            else:
                end = middle
        row = slot - self.first_tile(paged, entry)
        if row < 0:
            row = Int32(_NO_TILE)
        return row + (part << _PART), head, entry

    def row_and_part(self, row):
        part = row >> _PART
        return row - (part << _PART), part

    def sequence(self, paged, entry, problem):
        first, end = rows_between(paged.starts_q, paged.step_q, paged.total_q, entry, entry + 1)
        keys = load_at(paged.lengths, paged.length_step, entry)
        keys = cutlass.min(cutlass.max(keys, 0), paged.capacity)
        return end - first, keys, end, entry, first

    def own_row(self, wg, of_warp, of_lane, paged):
        """Of both rows of a thread: its query in a tile, and its head among the key head's."""
        found, row = [], of_warp + of_lane
        for at in (row, row + 8):
            head = at // paged.queries
            query = at - head * paged.queries + wg * paged.queries
            last = paged.group - 1
            found.append((query + _NO_ROW * cutlass.min(cutlass.max(head - last, 0), 1), head))
        return found

    def row_of(self, tile, own, paged):
        first = self.row_and_part(tile)[0] * self.tile_queries(paged)
        return [(first + query, head) for query, head in own]

    def keys_of(self, rows, keys, queries):
        return self.moved(rows, keys - queries)

    def moved(self, rows, offset):
        return [row + offset for row, _ in rows]

    def hidden_results(self, queries, row, wg, paged):
        first = (self.row_and_part(row)[0] * self.variant.warpgroups + wg) * paged.queries
        return self.hidden(queries) + first

    def result_tile(self, row, wg):
        return 0

    def free_blocks(self, row, offset, low, last, paged, problem):
        queries = self.tile_queries(paged)
        return free_blocks(
            self.own_key(self.row_and_part(row)[0] * queries + offset, problem),
            *(queries, self.tile_n, low, last, problem.left, problem.right, self.mask),
        )

    def own_key(self, own, problem):
        """The key of a query, which limits the keys that it sees."""
        return own

    def least_blocks(self):
        """The fewest blocks of keys of a tile with queries."""
        return 1

    @cute.jit
    def key_blocks(self, row, queries, keys, paged, problem):
        """This part's blocks of keys: the tile's, divided into `parts` even shares, or at multiples
        of a fixed size, where the last part has the rest."""
        rows = self.tile_queries(paged)
        row, part = self.row_and_part(row)
        low, last = key_blocks(
            *(row * rows + keys - queries, rows, self.tile_n, keys),
            *(problem.left, problem.right, self.mask),
        )
        # A tile without queries: one block, of which nothing is read.
        last = cutlass.max(last, self.least_blocks())
        last = last if row * rows < queries else Int32(1)
        low = cutlass.min(low, last - 1)
        first, each = low, cute.ceil_div(last - low, paged.parts)
        if paged.part_blocks > 0:
            each = paged.part_blocks
            first = low & -each
        first += part * each
        end = first + each
        if paged.part_blocks == GROWING:
            first, end = growing_start(part), growing_start(part + 1)
        low = cutlass.max(first, low)
        if part < paged.parts - 1:
            last = cutlass.min(end, last)
        # An empty part: a block behind all keys, of which nothing is read.
        if low >= last:
            low = problem.seq_k // self.tile_n + 1
            last = low + 1
        return low, last

    @cute.jit
    def blocks_to_pass(self, row, wg, queries, low, last, paged):
        """All but the last block, whose products start with the next tile's first ones."""
        first = (self.row_and_part(row)[0] * self.variant.warpgroups + wg) * paged.queries
        blocks = Int32(0)
        if first >= queries:
            blocks = last - 1 - low
        return blocks

    def hide(self, s, column, own, keys, problem):
        own = [self.own_key(x, problem) for x in own]
        begin, end = None, [cutlass.min(keys - column, x + problem.right + 1 - column) for x in own]
        if self.mask == "window":
            begin = [x - problem.left - column for x in own]
        hide_outside(s, begin, end)

    # The copies.

    @cute.jit
    def produce(self, q, k, v, paged, problem, q_tiles, rounds, lse, thread, warp_index):
        """Two warps share the copies of values, two those of keys: one takes longer to start them
        than the others to multiply. A copy may arrive before the first of the two announces the
        block's bytes: the barrier still waits for the announcement."""
        q_write = writer(self.variant.q_stages)
        k += (paged.k_data, paged.k_row, paged.k_head)
        v += (paged.v_data, paged.v_row, paged.v_head)
        blocks, pending, before = Int32(0), (Int32(0), Int32(0)), Int32(BY_ENGINE)
        for turn in cutlass.range(rounds, unroll=1):
            row, head, entry = self.tile(turn, q_tiles, paged, problem)
            queries, keys, q_at, _, _ = self.sequence(paged, entry, problem)
            low, last = self.key_blocks(row, queries, keys, paged, problem)
            head, keys = self.stored(row, head, queries, keys, paged, problem)
            table = paged.table.toint() + Int64(entry) * paged.table_row * 4
            of_keys = (blocks, low, last, paged, table, keys, head // paged.group, warp_index)
            loader = paged.loader
            if const_expr(self.widens):
                first_page = first_copy(paged, entry)
                loader = Int32(FROM_COPIES) if first_page >= 0 else loader
            if warp_index == 0:
                self.load_queries(q, q_write, row, head, queries, q_at, paged, problem)
            q_write.advance()
            if loader == BY_ENGINE:
                if warp_index < 2:
                    self.load_pages(v, *of_keys)
                else:
                    self.load_pages(k, *of_keys)
            if loader == BY_LANES:
                self.load_rows(k, v, *of_keys)
            if const_expr(self.widens):
                if loader == BY_WIDENING:
                    # Warps that made copies waited for no stage: they might be turns ahead.
                    if before == FROM_COPIES:
                        sync(_LOADERS, 32 * LOADERS)
                    pending = self.load_float8(k, v, pending, *of_keys)
                if loader == FROM_COPIES:
                    pending = self.widen_pending(pending)
                    self.load_copies(k, v, first_page, problem.kv_heads, *of_keys)
            blocks += last - low
            before = loader
        if const_expr(self.widens):
            self.widen_pending(pending)
        if warp_index > 0:
            self.clear(paged, problem, lse, Int32(_NO_ROW), thread)

    @cute.jit
    def widen_pending(self, pending):
        """Widens the last block of float8; returns that there is none."""
        if pending[0] != 0:
            cute.arch.inline_ptx("cp.async.wait_group 0;")
            self.widen(*pending)
        return Int32(0), Int32(0)

    @cute.jit
    def stored(self, row, head, queries, keys, paged, problem):
        """The first query head of a tile's keys, and how many keys it reads: no queries, none."""
        at_row, part = self.row_and_part(row)
        if at_row * self.tile_queries(paged) >= queries:
            keys = Int32(0)
        return head - part * problem.heads, keys

    @cute.jit
    def load_queries(self, q, state, row, head, queries, q_at, paged, problem):
        """One warp: a tile's queries, once their stage is free."""
        tma_q, sq, ring = q
        warpgroups = self.variant.warpgroups
        # Copies of queries may write less than a stage.
        ring.sync_object_empty.wait(state.index, state.phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                ring.producer_get_barrier(state),
                2 * warpgroups * self.d * paged.queries * paged.group,
            )
        for wg in cutlass.range_constexpr(warpgroups):
            hidden = self.hidden_results(queries, row, wg, paged)
            for column in cutlass.range_constexpr(self.d // PIECE):
                to = self.piece(sq, ROWS, self.tile_m, state.index, wg * ROWS, column)
                outer = (head, *outer_coordinates(q_at, True))
                barrier = ring.producer_get_barrier(state)
                self.copy(tma_q, barrier, to, problem.seq_q, hidden, outer, column)

    @cute.jit
    def load_pages(self, to, blocks, low, last, paged, table, keys, head, warp_index):
        """A tile's keys or values by the copy engine, 64 columns of a page at once; `blocks` came
        before them. Each of two warps starts every other copy."""
        tma, smem, ring, _, _, _ = to
        columns, half = self.d // PIECE, warp_index % 2
        rows_before = cute.arch.lane_idx() * paged.copy_rows
        key = (last - 1) * self.tile_n + rows_before
        page = self.page_of(paged, table, keys, key)
        for step in cutlass.range(last - low, unroll=1):
            index, parity = self.stage_of(blocks + step)
            barrier = ring.sync_object_full.get_barrier(index)
            first = (last - 1 - step) * self.tile_n + rows_before
            seen = cutlass.min(cutlass.max(keys - first, 0), paged.copy_rows)
            end = self.place_of(paged, page, first) + seen
            page = self.page_of(paged, table, keys, first - self.tile_n)
            ring.sync_object_empty.wait(index, parity)
            if half == 0:
                self.expect(Int32(barrier.toint()))
            for own in cutlass.range(half, paged.copies * columns, 2, unroll=1):
                source, column = own // columns, own % columns
                row = source * paged.copy_rows
                hidden = self.hidden(cute.arch.shuffle_sync(seen, source))
                outer = outer_coordinates(cute.arch.shuffle_sync(end, source), True)
                piece = self.piece(smem, COPY_ROWS, self.tile_n, index, row, column)
                self.copy(tma, barrier, piece, keys, hidden, (head, *outer), column)

    @cute.jit
    def load_copies(
        self, k, v, first_page, kv_heads, blocks, low, last, paged, table, keys, head, warp_index
    ):
        """A tile's keys and values from copies of them in 16 bits. Warps 0 and 2 start the copies
        of those; the others widen pages that nobody has begun, so that all blocks find them
        complete."""
        k_state = paged.states.toint() + (Int64(first_page) * 2 * kv_heads + head) * 4
        v_state, step = k_state + Int64(kv_heads) * 4, kv_heads * 8
        of_tile = (low, last, keys, head)
        if warp_index == 0:
            self.read_copies(v, blocks, v_state, step, first_page, kv_heads, *of_tile)
        if warp_index == 2:
            self.read_copies(k, blocks, k_state, step, first_page, kv_heads, *of_tile)
        if warp_index % 2 == 1:
            page_bytes = _PAGE * paged.columns * 2
            at = (Int64(first_page) * kv_heads + head) * page_bytes
            source, row_bytes, _, _ = self.ring_of(k, head)
            state, target = k_state, paged.k_copies.toint() + at
            if warp_index == 1:
                source, row_bytes, _, _ = self.ring_of(v, head)
                state, target = v_state, paged.v_copies.toint() + at
            from_and_to = (source, row_bytes, target, Int64(kv_heads) * page_bytes)
            low, last = low // self.page_blocks, cute.ceil_div(last, self.page_blocks)
            self.make_copies(*from_and_to, state, step, low, last, paged, table, keys)

    @cute.jit
    def read_copies(
        self, to, blocks, state, state_step, first_page, kv_heads, low, last, keys, head
    ):
        tma, smem, ring, _, _, _ = to
        for step in cutlass.range(last - low, unroll=1):
            index, parity = self.stage_of(blocks + step)
            barrier = ring.sync_object_full.get_barrier(index)
            block = last - 1 - step
            seen = cutlass.min(cutlass.max(keys - block * self.tile_n, 0), self.tile_n)
            block = block if seen > 0 else Int32(0)
            page = block // self.page_blocks
            if seen > 0:
                wait_for(state + Int64(page) * state_step)
            end = (first_page + page) * (_PAGE * kv_heads) + seen
            end += (block - page * self.page_blocks) * self.tile_n
            ring.sync_object_empty.wait(index, parity)
            self.expect(Int32(barrier.toint()))
            for column in cutlass.range_constexpr(self.d // PIECE):
                outer = outer_coordinates(end, True)
                piece = self.piece(smem, COPY_ROWS, self.tile_n, index, 0, column)
                self.copy(tma, barrier, piece, keys, self.hidden(seen), (head, *outer), column)

    @cute.jit
    def make_copies(
        self, source, row_bytes, target, page_step, state, state_step, low, last, paged, table, keys
    ):
        """One warp: pages that the tile sees and nobody has begun to widen, the last ones first.
        They are those from `low` to `last`."""
        lane = cute.arch.lane_idx()
        own_row, chunk = lane // 8, lane % 8
        source += chunk * 8
        target += own_row * (paged.columns * 2) + chunk * 16
        # Pages from `at` on are begun.
        at = cutlass.min(last, cute.ceil_div(keys, _PAGE))
        while at > low:
            page = at - 1 - lane
            skipped = find(state + Int64(page) * state_step, page - low)
            at -= skipped
            if skipped < 32:
                at -= 1
                to_state = state + Int64(at) * state_step
                if claim(to_state) == 0:
                    to = target + at * page_step
                    self.widen_copy(source, row_bytes, to, paged, table, keys, at * _PAGE)
                    publish(to_state)

    @cute.jit
    def widen_copy(self, source, row_bytes, target, paged, table, keys, first):
        """One warp: a page of the copies, of which a lane has 8 columns of every fourth row."""
        lane = cute.arch.lane_idx()
        own_row, inside = lane // 8, paged.columns - lane % 8 * 8
        page = self.page_of(paged, table, keys, first + lane)
        place = Int32(0)
        count = min(_CHUNKS // (self.d // PIECE), 4)  # rows whose loads are in flight
        for part in cutlass.range(_PAGE // 16, unroll=1):
            row = first + part * 16
            if part % 2 == 0:
                place = self.place_of(paged, page, row + lane)
                page = self.page_of(paged, table, keys, row + 32 + lane)
            rows = []
            for i in cutlass.range_constexpr(4):
                at = cute.arch.shuffle_sync(place, part % 2 * 16 + i * 4 + own_row)
                rows.append(source + Int64(at) * row_bytes)
            to = target + Int64(part) * (paged.columns * 32)
            seen, step = keys - row - own_row, paged.columns * 8
            for i in cutlass.range_constexpr(0, 4, count):
                some = (rows[i : i + count], to + Int64(i) * step, step, seen - 4 * i)
                widen_rows(*some, inside, self.d, self.operands.dtype)

    def ring_of(self, to, head):
        """Addresses of a ring for lanes: a head's rows, bytes of a row, the first stage, and its
        barrier; those of free stages come after those of full ones."""
        _, smem, ring, data, row_bytes, head_step = to
        return (
            *(data.toint() + Int64(head) * head_step * 16, row_bytes),
            *(Int32(smem.iterator.toint()), Int32(ring.sync_object_full.get_barrier(0).toint())),
        )

    def stage_of(self, count):
        """The stage of a ring that is filled after `count` others, and the parity of its wait."""
        turn = count // self.variant.stages
        return count - turn * self.variant.stages, (turn & 1) ^ 1

    @cute.jit
    def load_rows(self, k, v, blocks, low, last, paged, table, keys, head, warp_index):
        """A tile's keys and values, 16 bytes a lane; `blocks` came before them. Two warps copy
        values, two keys: both wait for their own copies only. Eight lanes copy 64 columns of a
        row; a warp reads the page table a block ahead."""
        rows, pieces = self.tile_n // 2, self.d // PIECE  # of this warp; of a row
        half, lane = warp_index % 2, cute.arch.lane_idx()
        source, row_bytes, memory, full = self.ring_of(v, head)
        if warp_index >= 2:
            source, row_bytes, memory, full = self.ring_of(k, head)
        own_row, chunk = lane // 8, lane % 8
        source += chunk * 16
        memory += half * (rows * 2 * PIECE) + own_row * (2 * PIECE) + (chunk ^ own_row) * 16
        at_lane = half * rows + lane
        key = (last - 1) * self.tile_n + at_lane
        pages = cute.make_rmem_tensor(rows // 32, Int32)
        for i in cutlass.range_constexpr(rows // 32):
            pages[i] = self.page_of(paged, table, keys, key + 32 * i)
        for step in cutlass.range(last - low, unroll=1):
            index, parity = self.stage_of(blocks + step)
            barrier, stage = full + index * 8, memory + index * (self.tile_n * self.d * 2)
            first = (last - 1 - step) * self.tile_n
            seen = [keys - first - half * rows - own_row] * pieces
            for piece in cutlass.range_constexpr(pieces):
                inside = piece * PIECE + chunk * 8 < paged.columns
                seen[piece] = seen[piece] if inside else Int32(0)
            for i in cutlass.range_constexpr(rows // 32):
                pages[i] = self.place_of(paged, pages[i], first + at_lane + 32 * i)
            self.wait(barrier + self.variant.stages * 8, parity)
            for i in cutlass.range_constexpr(rows // 4):
                place = cute.arch.shuffle_sync(pages[i // 8], i % 8 * 4 + own_row)
                at_row, to = source + Int64(place) * row_bytes, stage ^ (i % 2 * 64)
                for piece in cutlass.range_constexpr(pieces):
                    offset = piece * (self.tile_n * 2 * PIECE) + i * (8 * PIECE)
                    self.copy_or_clear(*(to, offset, at_row, piece * 2 * PIECE, i * 4, seen[piece]))
            cute.arch.inline_ptx("cp.async.commit_group;")
            for i in cutlass.range_constexpr(rows // 32):
                key = first - self.tile_n + at_lane + 32 * i
                pages[i] = self.page_of(paged, table, keys, key)
            if half == 0:
                self.expect(barrier)
            cute.arch.inline_ptx("cp.async.wait_group 0;")
            self.announce(barrier, rows)

    @cute.jit
    def load_float8(self, k, v, pending, blocks, low, last, paged, table, keys, head, warp_index):
        """A tile's keys and values of float8; `blocks` came before them. Each warp copies its rows
        of a block and then widens those of the block of values or keys before it, `pending`: its
        barrier, 0 if there is none, and this lane's first place. A lane copies 16 bytes to where
        the second half of their 32 bytes will be."""
        rows, lane = self.tile_n // LOADERS, cute.arch.lane_idx()
        k_source, k_row, k_memory, k_full = self.ring_of(k, head)
        v_source, v_row, v_memory, v_full = self.ring_of(v, head)
        # Eight rows at once, 64 columns of each: chunks of 32 bytes, in shared memory's swizzle.
        own_row, chunk = lane // 4, lane % 4
        own = warp_index * (rows * 2 * PIECE) + own_row * (2 * PIECE) + ((2 * chunk) ^ own_row) * 16
        at_lane = warp_index * rows + lane
        page = self.page_of(paged, table, keys, (last - 1) * self.tile_n + at_lane)
        place_before, place = Int32(0), Int32(0)
        barrier_before, at_before = pending
        copies = 2 * (last - low)
        for copy in cutlass.range(copies, unroll=1):
            # Keys are a block ahead: k0 k1 v0 k2 v1 ... v.
            block = (copy + 1) // 2
            of_values = (copy > 0) & (copy % 2 == 0) | (copy == copies - 1)
            source, row_bytes, memory, full = k_source, k_row, k_memory, k_full
            if of_values:
                block -= 1
                source, row_bytes, memory, full = v_source, v_row, v_memory, v_full
            first = (last - 1 - block) * self.tile_n
            if not of_values:
                place_before = place
                place = self.place_of(paged, page, first + at_lane)
            of_copy = place_before if of_values & (copy < copies - 1) else place
            index, parity = self.stage_of(blocks + block)
            barrier, to = full + index * 8, memory + own + index * (self.tile_n * self.d * 2)
            seen = keys - first - warp_index * rows - own_row
            self.wait(barrier + self.variant.stages * 8, parity)
            for i in cutlass.range_constexpr(rows // 8):
                at_row = cute.arch.shuffle_sync(of_copy, i * 8 + own_row)
                at_row = source + Int64(at_row) * row_bytes + chunk * 16
                for piece in cutlass.range_constexpr(self.d // PIECE):
                    inside = piece * PIECE + chunk * 16 < paged.columns
                    visible = seen if inside else Int32(0)
                    offset = piece * (self.tile_n * 2 * PIECE) + i * (16 * PIECE)
                    self.copy_or_clear(to ^ 16, offset, at_row, piece * PIECE, i * 8, visible)
            cute.arch.inline_ptx("cp.async.commit_group;")
            # Here and not where it is used: the compiler waits for it at the loop's next branch.
            if not of_values:
                page = self.page_of(paged, table, keys, first - self.tile_n + at_lane)
            if warp_index == 0:
                self.expect(barrier)
            if barrier_before != 0:
                cute.arch.inline_ptx("cp.async.wait_group 1;")
                self.widen(barrier_before, at_before)
            barrier_before, at_before = barrier, to
        return barrier_before, at_before

    @cute.jit
    def widen(self, barrier, to):
        """This warp's rows of a block, which have arrived."""
        for piece in cutlass.range(self.d // PIECE, unroll=1):
            self.widen_chunks(to + piece * (self.tile_n * 2 * PIECE))
        self.announce(barrier, self.tile_n // LOADERS)

    def copy_or_clear(self, to, to_offset, source, offset, row, seen):
        """16 bytes of a row, or zeros for one that is not among the `seen` ones."""
        cute.arch.inline_ptx(
            f"{{ .reg .pred behind; setp.le.s32 behind, {{$r2}}, {row}; cp.async.cg.shared.global "
            f"[{{$r0}} + {to_offset}], [{{$r1}} + {offset}], 16, behind; }}",
            read_only_args=[to, source, seen],
        )

    @cute.jit
    def expect(self, barrier):
        """One warp: a stage's barrier waits for as many bytes as a block has."""
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};",
                read_only_args=[barrier, Int32(self.tile_n * self.d * 2)],
            )

    def wait(self, barrier, phase):
        cute.arch.inline_ptx(
            "{ .reg .pred free; "
            "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 free, [{$r0}], {$r1}; "
            "@!free bra AGAIN; }",
            read_only_args=[barrier, phase],
        )

    def widen_chunks(self, at):
        """A lane's chunks of several rows, 8 apart: loads first, since the compiler moves none
        across a store."""
        chunks = range(self.tile_n // LOADERS // 8)
        lines = [
            ".reg .b32 second, " + ", ".join(f"c{n}_{i}" for n in chunks for i in range(4)) + ";",
            ".reg .b32 w<8>; .reg .b16 low, high; .reg .f32 f<2>; xor.b32 second, {$r0}, 16;",
        ]
        for n in chunks:
            words = ", ".join(f"c{n}_{i}" for i in range(4))
            lines.append(f"ld.shared.v4.b32 {{{words}}}, [second + {n * 16 * PIECE}];")
        for n in chunks:
            for i in range(8):
                pair, half = f"c{n}_{i // 2}", ("low", "high")[i % 2]
                if i % 2 == 0:
                    lines.append(f"mov.b32 {{low, high}}, {pair};")
                lines.append(f"cvt.rn.f16x2.e4m3x2 w{i}, {half};")
            if self.operands.dtype is cutlass.BFloat16:
                for i in range(8):
                    lines += [
                        f"mov.b32 {{low, high}}, w{i};",
                        "cvt.f32.f16 f0, low; cvt.f32.f16 f1, high;",
                        f"cvt.rn.bf16x2.f32 w{i}, f1, f0;",
                    ]
            for at_words, words in (("{$r0}", range(4)), ("second", range(4, 8))):
                stored = ", ".join(f"w{i}" for i in words)
                lines.append(f"st.shared.v4.b32 [{at_words} + {n * 16 * PIECE}], {{{stored}}};")
        cute.arch.inline_ptx("{ " + " ".join(lines) + " }", read_only_args=[at])

    @cute.jit
    def announce(self, barrier, rows):
        """This warp's rows of a stage have arrived: they become visible to the products, and count
        as the bytes that a copy would bring."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            size = rows * self.d * 2
            cute.arch.inline_ptx(
                "fence.acq_rel.cta; "
                f"mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [{{$r0}}], {size};",
                read_only_args=[barrier],
            )

    def page_of(self, paged, table, keys, key):
        """A key's entry of the page table; the first or the last one for keys before or behind."""
        key = cutlass.max(cutlass.min(key, keys - 1), 0)
        address = table + Int64(key >> paged.page_bits) * paged.table_step
        return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4).load()

    @cute.jit
    def place_of(self, paged, page, key):
        """The maps' row of a key in a page. An entry that is no page counts as the last page, so no
        contents lead outside of the cache."""
        page = cutlass.min(page, paged.last_page) if page >= 0 else paged.last_page
        return page * paged.page_rows + (key & ((1 << paged.page_bits) - 1))

    # The results.

    @cute.jit
    def finish_rows(self, rows, scale, gain, lse, _, paged, place, at_row, queries, lane):
        row_max, row_sum, rescale = rows
        _, first_head, _, _, start = place
        for r in cutlass.range_constexpr(2):
            row, in_group = at_row[r]
            head = first_head + cutlass.min(in_group, paged.group - 1)
            total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            top = largest(row_max[r], self.operands.limited(scale))
            factor = inverse(total)
            if paged.sinks.toint() != 0:
                top, total, shrink = join_sink(top, total, (paged.sinks + head).load())
                factor = inverse(total) * shrink
            rescale[r] = factor if const_expr(gain is None) else factor * gain
            if lse.toint() != 0:
                if lane % 4 == 0 and row < queries:
                    to = lse + (Int64(head) * paged.total_q + start + row)
                    to.store((top + cute.math.log2(total)) * _LN2)


def growing_start(part):
    """The first block of one of the parts that grow."""
    start = Int32(0)
    for (first, _, bits), behind in zip(PHASES, (*PHASES[1:], None), strict=True):
        within = cutlass.max(part - first, 0)
        within = within if behind is None else cutlass.min(within, behind[0] - first)
        start += within << bits
    return start


def growing_parts(blocks):
    """Returns the number of growing parts that `blocks` blocks of keys make."""
    parts = Int32(0)
    for (_, first, bits), behind in zip(PHASES, (*PHASES[1:], None), strict=True):
        within = cutlass.max(blocks - first, 0)
        within = within if behind is None else cutlass.min(within, behind[1] - first)
        parts += (within + (1 << bits) - 1) >> bits
    return parts


@cute.jit
def begins_part(block):
    """True if one of the parts that grow begins at a block."""
    mask = Int32((1 << PHASES[0][2]) - 1)
    for _, first, bits in PHASES[1:]:
        mask = Int32((1 << bits) - 1) if block > first else mask
    return (block & mask) == 0
