# SPDX-License-Identifier: Apache-2.0
"""Which expert a block of rows is for, and which rows these are.

moe_align_block_size made lists of it; for few ids each block of threads makes its own, in shared
memory: the launch that would make them takes longer, and what comes after it waits.

Lists may hold anything: what is no expert counts as -1, and what is no element as padding. What is
read ahead is made so when it is used, so that nothing waits for it before.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from moe_layouts_cute import ROUTED_BLOCKS, ROUTED_IDS, TURNS, MoeLayouts


class MoeRouting(MoeLayouts):
    @cute.jit
    def expert_of(self, routing, block):
        """-1 where there is none."""
        return self.real_expert(routing, self.listed_expert(routing, block))

    @cute.jit
    def listed_expert(self, routing, block):
        """The list's value, which may be anything."""
        experts = routing[1]
        if const_expr(self.routes):
            return _load("", experts + Int64(block) * 4)
        return (experts + block).load()

    @cute.jit
    def real_expert(self, routing, expert):
        return expert if Uint32(expert) < Uint32(routing[5]) else Int32(-1)

    @cute.jit
    def steps_of(self, routing, block):
        """Of a tile; experts that are elsewhere take none."""
        return routing[3] if self.expert_of(routing, block) >= 0 else Int32(0)

    @cute.jit
    def rows_of(self, routing, block):
        """Of a block's first row: where its element is; and how many rows are not padding."""
        places = routing[4]
        first, count = block * self.tile_m, Int32(self.tile_m)
        if const_expr(self.routes):
            if places != 0:
                place = _load(".shared", places + block * 4)
                first, count = place & 0xFFFF, place >> 16
        return first, count

    @cute.jit
    def element_of(self, routing, rows, row, elements):
        """The list's value, which may be anything."""
        first, count = rows
        if const_expr(self.routes):
            at = first + cutlass.min(row, count - 1)
            element = _load("", routing[0] + Int64(at) * 4)
            return element if row < count else elements
        return (routing[0] + (first + row)).load()

    @cute.jit
    def prepare_routing(self, thread, storage, ids, id_words, experts, elements):
        """What does not need the grid before this one to have ended."""
        if thread * 32 < elements * id_words:  # a line of the L2 each
            cute.arch.inline_ptx(
                "prefetch.global.L2 [{$r0}];", read_only_args=[(ids + thread * 32).toint()]
            )
        counts = storage.y.data_ptr().toint()  # before results go there
        for pair in cutlass.range(
            thread, self.threads // 32 * experts // 2, self.threads, unroll=1
        ):
            _store(counts + pair * 4, Int32(0))

    @cute.jit
    def route(self, thread, storage, ids, id_words, experts, elements):
        """Sorts the elements' numbers by expert; the lists, and how many blocks there are. All
        blocks of threads come to the same order."""
        lists = (storage.routing.data_ptr() + TURNS * self.by_turns).toint()
        of_blocks = lists + ROUTED_IDS * 4
        places = of_blocks + ROUTED_BLOCKS * 4
        used = places + ROUTED_BLOCKS * 4
        to = (lists, of_blocks, places, used)
        if elements <= 32:
            if thread < 32:
                self.route_warp(thread, ids, id_words, experts, elements, to)
            cute.arch.sync_threads()
        else:
            self.route_block(thread, storage, ids, id_words, experts, elements, to)
        return _generic(lists), _generic(of_blocks), places, _load(".shared", used)

    @cute.jit
    def expert_at(self, ids, id_words, experts, elements, at):
        """-1 where there is none."""
        expert = Int32(-1)
        if at < elements:
            low, high = (ids + at * id_words).load(), Int32(0)
            if id_words == 2:
                high = (ids + (at * 2 + 1)).load()
            if (low >= 0) & (low < experts) & (high == 0):
                expert = low
        return expert

    @cute.jit
    def route_warp(self, lane, ids, id_words, experts, elements, to):
        """Up to 32 elements: a block each expert, in the order of their first elements."""
        lists, of_blocks, places, used = to
        expert = self.expert_at(ids, id_words, experts, elements, lane)
        alike = Int32(cute.arch.match_sync(-1, expert))
        rank = cute.arch.popc(alike & Int32(cute.arch.lanemask_lt()))
        leads = (rank == 0) & (expert >= 0)
        leaders = Int32(cute.arch.vote_ballot_sync(leads))
        block = cute.arch.popc(leaders & ((alike & -alike) - 1))
        if expert >= 0:
            _store(lists + (block * 32 + rank) * 4, lane)
        if leads:
            _store(of_blocks + block * 4, expert)
            _store(places + block * 4, block * 32 | cute.arch.popc(alike) << 16)
        if lane == 0:
            _store(used, cute.arch.popc(leaders))

    @cute.jit
    def route_block(self, thread, storage, ids, id_words, experts, elements, to):
        warps = self.threads // 32
        counts = storage.y.data_ptr().toint()  # [warps, experts] of 16 bits
        totals = counts + warps * experts * 2
        lane, warp = thread % 32, thread // 32
        of_warp = counts + warp * experts * 2
        most = -(-ROUTED_IDS // self.threads)
        share = cute.ceil_div(elements, self.threads)
        expert, rank = cute.make_rmem_tensor(most, Int32), cute.make_rmem_tensor(most, Int32)
        for i in cutlass.range_constexpr(most):
            at = (warp * share + i) * 32 + lane
            if i >= share:
                at = elements
            expert[i] = self.expert_at(ids, id_words, experts, elements, at)
        cute.arch.sync_threads()  # counts are cleared
        for i in cutlass.range_constexpr(most):
            alike = Int32(cute.arch.match_sync(-1, expert[i]))
            rank[i] = cute.arch.popc(alike & Int32(cute.arch.lanemask_lt()))
            count = of_warp + cutlass.max(expert[i], 0) * 2
            before = _load(".shared", count, "u16")
            cute.arch.sync_warp()
            if (rank[i] == 0) & (expert[i] >= 0):
                _store(count, before + cute.arch.popc(alike), "u16")
            cute.arch.sync_warp()
            rank[i] += before
        cute.arch.sync_threads()
        of_warps = cute.make_rmem_tensor(warps, Int32)
        for e in cutlass.range(thread, experts, self.threads, unroll=1):
            for w in cutlass.range_constexpr(warps):
                of_warps[w] = _load(".shared", counts + (w * experts + e) * 2, "u16")
            total = Int32(0)
            for w in cutlass.range_constexpr(warps):
                _store(counts + (w * experts + e) * 2, total, "u16")
                total += of_warps[w]
            _store(totals + e * 4, total)
        cute.arch.sync_threads()
        if thread < 32:
            self.place_experts(lane, totals, experts, to)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(most):
            if expert[i] >= 0:
                first = _load(".shared", totals + expert[i] * 4)
                first += _load(".shared", of_warp + expert[i] * 2, "u16")
                _store(to[0] + (first + rank[i]) * 4, (warp * share + i) * 32 + lane)
        cute.arch.sync_threads()

    @cute.jit
    def place_experts(self, lane, totals, experts, to):
        """By one warp: where each expert's elements and blocks begin, from how many they are."""
        _, of_blocks, places, used = to
        share = cute.ceil_div(experts, 32)
        begin = cutlass.min(lane * share, experts)
        end = cutlass.min(begin + share, experts)
        mine = Int32(0)  # elements, and above them blocks
        for e in cutlass.range(begin, end, unroll=1):
            count = _load(".shared", totals + e * 4)
            mine += count + ((count + self.tile_m - 1) // self.tile_m << 16)
        sums = mine
        for step in (1, 2, 4, 8, 16):
            before = cute.arch.inline_ptx(
                f"shfl.sync.up.b32 {{$w0}}, {{$r0}}, {step}, 0, -1;",
                write_only_types=[Int32],
                read_only_args=[sums],
            )
            if lane >= step:
                sums += before
        if lane == 31:
            _store(used, sums >> 16)
        first, block = (sums - mine) & 0xFFFF, sums - mine >> 16
        for e in cutlass.range(begin, end, unroll=1):
            count = _load(".shared", totals + e * 4)
            _store(totals + e * 4, first)
            for row in cutlass.range(0, count, self.tile_m, unroll=1):
                rows = cutlass.min(count - row, self.tile_m)
                _store(of_blocks + block * 4, e)
                _store(places + block * 4, first + row | rows << 16)
                block += 1
            first += count


def within(number, end):
    """`end` instead of what is not from 0 to it."""
    return Int32(cutlass.min(Uint32(number), Uint32(end)))


def _load(space, address, kind="s32"):
    return cute.arch.inline_ptx(
        f"ld{space}.{kind} {{$w0}}, [{{$r0}}];", write_only_types=[Int32], read_only_args=[address]
    )


def _store(address, value, kind="s32"):
    cute.arch.inline_ptx(f"st.shared.{kind} [{{$r0}}], {{$r1}};", read_only_args=[address, value])


def _generic(address):
    """Of an address in shared memory."""
    return cute.arch.inline_ptx(
        "{ .reg .u64 wide; cvt.u64.u32 wide, {$r0}; cvta.shared.u64 {$w0}, wide; }",
        write_only_types=[Int64],
        read_only_args=[address],
    )
