# SPDX-License-Identifier: Apache-2.0
"""Routing tables: the expert of each block of rows, and the elements of its rows.

moe_align_block_size makes these lists. For few ids each thread block makes its own in shared memory
instead: a launch that makes them takes longer, and the next one would wait for it.

The lists may hold anything: an invalid expert counts as -1, an invalid element as padding. A
prefetched value is clamped only when it is used, so that nothing waits for its load before.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from moe_variant_cute import ROUTED_BLOCKS, ROUTED_IDS, TURNS


@cute.jit
def expert_of(v, routing, block):
    """-1 where there is none."""
    return real_expert(routing, listed_expert(v, routing, block))


@cute.jit
def listed_expert(v, routing, block):
    """The list's value, which may be anything."""
    if const_expr(v.pingpong):
        return _load("", routing.experts + Int64(block) * 4)
    return (routing.experts + block).load()


@cute.jit
def real_expert(routing, expert):
    return expert if Uint32(expert) < Uint32(routing.expert_count) else Int32(-1)


@cute.jit
def steps_of(v, routing, block):
    """K steps of a tile; 0 if its expert is on another rank."""
    return routing.steps if expert_of(v, routing, block) >= 0 else Int32(0)


@cute.jit
def rows_of(v, routing, block):
    """A block's first slot, and how many of its rows are not padding."""
    first, count = block * v.tile_m, Int32(v.tile_m)
    if const_expr(v.pingpong):
        if routing.places != 0:
            place = _load(".shared", routing.places + block * 4)
            first, count = place & 0xFFFF, place >> 16
    return first, count


@cute.jit
def element_of(v, routing, rows, row, elements):
    """The list's value, which may be anything."""
    first, count = rows
    if const_expr(v.pingpong):
        at = first + cutlass.min(row, count - 1)
        element = _load("", routing.ids + Int64(at) * 4)
        return element if row < count else elements
    return (routing.ids + (first + row)).load()


@cute.jit
def prepare_routing(v, p, storage, thread):
    """The part that need not wait for the previous grid."""
    if thread * 32 < p.elements * p.id_words:  # one L2 line per thread
        cute.arch.inline_ptx(
            "prefetch.global.L2 [{$r0}];", read_only_args=[(p.ids + thread * 32).toint()]
        )
    counts = storage.y.data_ptr().toint()  # before results go there
    for pair in cutlass.range(thread, v.threads // 32 * p.experts // 2, v.threads, unroll=1):
        _store(counts + pair * 4, Int32(0))


@cute.jit
def route(v, p, storage, thread):
    """Sorts the elements by expert, in the same order in every thread block. Returns the addresses
    of the lists of elements, of blocks' experts and of blocks' places, and the number of blocks."""
    lists = (storage.words.data_ptr() + TURNS * v.turn_words).toint()
    of_blocks = lists + ROUTED_IDS * 4
    places = of_blocks + ROUTED_BLOCKS * 4
    used = places + ROUTED_BLOCKS * 4
    to = (lists, of_blocks, places, used)
    if p.elements <= 32:
        if thread < 32:
            _route_warp(p, thread, to)
        cute.arch.sync_threads()
    else:
        _route_block(v, p, storage, thread, to)
    return _generic(lists), _generic(of_blocks), places, _load(".shared", used)


@cute.jit
def _expert_at(p, at):
    """-1 where there is none."""
    expert = Int32(-1)
    if at < p.elements:
        low, high = (p.ids + at * p.id_words).load(), Int32(0)
        if p.id_words == 2:
            high = (p.ids + (at * 2 + 1)).load()
        if (low >= 0) & (low < p.experts) & (high == 0):
            expert = low
    return expert


@cute.jit
def _route_warp(p, lane, to):
    """Up to 32 elements: a block per expert, in the order of their first elements."""
    lists, of_blocks, places, used = to
    expert = _expert_at(p, lane)
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
def _route_block(v, p, storage, thread, to):
    """A counting sort: counts per warp and expert, their prefix sums, then each element's place."""
    experts = p.experts
    warps = v.threads // 32
    counts = storage.y.data_ptr().toint()  # [warps, experts], 16 bits each
    totals = counts + warps * experts * 2
    lane, warp = thread % 32, thread // 32
    of_warp = counts + warp * experts * 2
    most = -(-ROUTED_IDS // v.threads)
    share = cute.ceil_div(p.elements, v.threads)
    expert, rank = cute.make_rmem_tensor(most, Int32), cute.make_rmem_tensor(most, Int32)
    for i in cutlass.range_constexpr(most):
        at = (warp * share + i) * 32 + lane
        if i >= share:
            at = p.elements
        expert[i] = _expert_at(p, at)
    cute.arch.sync_threads()  # the counts are cleared
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
    for e in cutlass.range(thread, experts, v.threads, unroll=1):
        for w in cutlass.range_constexpr(warps):
            of_warps[w] = _load(".shared", counts + (w * experts + e) * 2, "u16")
        total = Int32(0)
        for w in cutlass.range_constexpr(warps):
            _store(counts + (w * experts + e) * 2, total, "u16")
            total += of_warps[w]
        _store(totals + e * 4, total)
    cute.arch.sync_threads()
    if thread < 32:
        _place_experts(v, lane, totals, experts, to)
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(most):
        if expert[i] >= 0:
            first = _load(".shared", totals + expert[i] * 4)
            first += _load(".shared", of_warp + expert[i] * 2, "u16")
            _store(to[0] + (first + rank[i]) * 4, (warp * share + i) * 32 + lane)
    cute.arch.sync_threads()


@cute.jit
def _place_experts(v, lane, totals, experts, to):
    """One warp turns each expert's count of elements into its first place, and lists its blocks."""
    _, of_blocks, places, used = to
    share = cute.ceil_div(experts, 32)
    begin = cutlass.min(lane * share, experts)
    end = cutlass.min(begin + share, experts)
    mine = Int32(0)  # elements in the low half, blocks in the high half
    for e in cutlass.range(begin, end, unroll=1):
        count = _load(".shared", totals + e * 4)
        mine += count + ((count + v.tile_m - 1) // v.tile_m << 16)
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
        for row in cutlass.range(0, count, v.tile_m, unroll=1):
            rows = cutlass.min(count - row, v.tile_m)
            _store(of_blocks + block * 4, e)
            _store(places + block * 4, first + row | rows << 16)
            block += 1
        first += count


def within(number, end):
    """`number` if it is within 0 to `end`, else `end`."""
    return Int32(cutlass.min(Uint32(number), Uint32(end)))


def _load(space, address, kind="s32"):
    return cute.arch.inline_ptx(
        f"ld{space}.{kind} {{$w0}}, [{{$r0}}];", write_only_types=[Int32], read_only_args=[address]
    )


def _store(address, value, kind="s32"):
    cute.arch.inline_ptx(f"st.shared.{kind} [{{$r0}}], {{$r1}};", read_only_args=[address, value])


def _generic(address):
    """The generic address of a shared memory address."""
    return cute.arch.inline_ptx(
        "{ .reg .u64 wide; cvt.u64.u32 wide, {$r0}; cvta.shared.u64 {$w0}, wide; }",
        write_only_types=[Int64],
        read_only_args=[address],
    )
