# SPDX-License-Identifier: Apache-2.0
"""The order of tiles of a thread block, and `up`'s progress, which `down` waits for.

Tiles of 64 rows are numbered by block of the routing, then by column. 16-bit kernels step by the
grid size; float8 kernels take tiles in this order from a counter in memory.

Tiles of 128 rows are taken in an order by expert: all blocks of an expert for one column, then for
the next, so that tiles with the same weights are loaded from L2 at about the same time. They are
taken from a counter, too: tiles with few rows take less time, some multiprocessors get their data
faster, and thread blocks that step by the grid size drift apart, until weights are read from memory
twice or some blocks finish late. Without a counter they step by the grid size.

One warp takes tiles and publishes them in shared memory, TURNS at most before they are read.

`progress` counts the columns that the warps of `up` have stored per block of the routing. A block
is complete at (its rows / 16) * (columns of the result). Blocks of experts on other ranks are not
counted: nothing is loaded for them, so the multiplying warps could overtake the one that counts.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from gemm_parts_cute import release
from moe_arguments_cute import address
from moe_routing_cute import expert_of, within
from moe_variant_cute import CONSUMERS, TURNS

_NEVER = 0x7FFFFFFF  # above all turns, in case a counter did not begin at 0
_WINDOW = 16  # blocks within which an expert's neighbouring blocks are found


@cute.jit
def in_order(v, routing, tiles, turn):
    """The block, column and expert of a turn of tiles of 128 rows, found by a whole warp. After the
    last tile the block is `routing.blocks` or more."""
    blocks, columns = routing.blocks, tiles.columns
    block, lane = turn // columns, cute.arch.lane_idx()
    column, mine = Int32(0), Int32(-1)
    if block < blocks:
        window = block // _WINDOW * _WINDOW
        place = block - window
        expert = Int32(-2)
        if (lane < _WINDOW) & (window + lane < blocks):
            expert = expert_of(v, routing, window + lane)
        mine = cute.arch.shuffle_sync(expert, place)
        alike = Int32(cute.arch.vote_ballot_sync(expert == mine))
        begin = _highest(~alike & ((1 << place) - 1)) + 1
        others = ~alike >> place
        count = place + cute.arch.popc((others & -others) - 1) - begin
        at = turn - (window + begin) * columns
        column = at // count
        block = window + begin + at - column * count
    return block, column, mine


def block_of(v, tiles, number):
    """The block of a tile. Tiles of 128 rows are handed over as block, column and expert, so their
    `number` is the block."""
    return number // tiles.columns + tiles.rank if const_expr(v.pingpong) else number


def column_of(v, tiles, number, column):
    return number % tiles.columns if const_expr(v.pingpong) else column


def end_of(v, routing, tiles):
    """One more than the last tile's number."""
    return tiles.count if const_expr(v.pingpong) else routing.blocks


@cute.jit
def claim(p, turn, grid):
    """The next turn of tiles of 128 rows, in the first lane; not waited for here."""
    taken = turn + grid
    if address(p.counter) != 0:
        if cute.arch.lane_idx() == 0:
            taken = within(2 * grid + _count(address(p.counter)), _NEVER)
    return taken


@cute.jit
def claim_next(p, tiles, number):
    """The tile of 64 rows after `number`; a warp waits for it. The first ones are dealt out."""
    taken = number + tiles.grid
    if (address(p.counter) != 0) & (tiles.grid < tiles.count):
        if cute.arch.lane_idx() == 0:
            taken = within(tiles.grid + _count(address(p.counter)), _NEVER)
        taken = cute.arch.shuffle_sync(taken, 0)
    return taken


@cute.jit
def publish(v, storage, entry, *tile):
    """One warp hands a tile to `take`."""
    full, empty = _turn_barriers(v, storage)
    slot = entry % TURNS
    cute.arch.mbarrier_wait(empty + slot, (entry // TURNS & 1) ^ 1)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(v.turn_words):
            storage.words.data_ptr()[i * TURNS + slot] = tile[i]
        cute.arch.mbarrier_arrive(full + slot)


@cute.jit
def take(v, storage, entry):
    """The number of a tile of 64 rows and two zeros; the block, column and expert of one of 128."""
    full, empty = _turn_barriers(v, storage)
    slot = entry % TURNS
    cute.arch.mbarrier_wait(full + slot, entry // TURNS & 1)
    words = storage.words.data_ptr()
    tile = [Int32(0)] * 3
    for i in cutlass.range_constexpr(v.turn_words):
        tile[i] = cute.arch.make_warp_uniform(words[i * TURNS + slot])
    cute.arch.sync_warp()
    release(empty, slot)
    return tuple(tile)


def init_turns(v, storage):
    full, empty = _turn_barriers(v, storage)
    loaders = v.gatherers // 32 + (not v.pingpong)  # tiles of 128 rows: the publisher reads, too
    for i in range(TURNS * v.dynamic):
        cute.arch.mbarrier_init(full + i, 1)
        cute.arch.mbarrier_init(empty + i, 4 * CONSUMERS + loaders)


def _turn_barriers(v, storage):
    full = storage.barriers.data_ptr() + 2 * v.stages
    return full, full + TURNS


def _stored_barrier(v, storage):
    return storage.barriers.data_ptr() + (2 * v.stages + 2 * TURNS)


def init_stored(v, storage):
    cute.arch.mbarrier_init(_stored_barrier(v, storage), 4 * CONSUMERS)


@cute.jit
def say_stored(v, storage):
    """Each multiplying warp, after its stores of a tile."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(_stored_barrier(v, storage))


@cute.jit
def count_tile(v, p, storage, warp, tile, tiles):
    """One loading warp counts the last of `tiles`, once it is stored and before the next one is: a
    multiplying warp would have to wait for memory."""
    block, column = tile
    if (warp == 2) & (tiles > 0) & (address(p.progress) != 0):
        cute.arch.mbarrier_wait(_stored_barrier(v, storage), (tiles - 1) & 1)
        columns = cutlass.min(v.width, p.rows - column * v.width)
        if cute.arch.lane_idx() == 0:
            cute.arch.inline_ptx(
                "red.release.gpu.global.add.u32 [{$r0}], {$r1};",
                read_only_args=[
                    address(p.progress) + Int64(block) * 4,
                    columns * (4 * CONSUMERS),
                ],
            )


@cute.jit
def wait_for_rows(v, p, block):
    """Waits until `up` has stored a block's rows, which the copy engine may then read."""
    at = address(p.progress) + Int64(block) * 4
    stored = _acquire(at)
    while stored < v.tile_m // 16 * p.k:
        stored = _acquire(at)
    cute.arch.fence_proxy("async.global")


def _acquire(at):
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[at]
    )


def _highest(bits):
    """The index of the highest bit set, -1 for none."""
    return cute.arch.inline_ptx(
        "bfind.u32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[bits]
    )


def _count(at):
    return cute.arch.inline_ptx(
        "atom.global.relaxed.gpu.add.u32 {$w0}, [{$r0}], 1;",
        write_only_types=[Int32],
        read_only_args=[Int64(at)],
    )
