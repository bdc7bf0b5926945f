# SPDX-License-Identifier: Apache-2.0
"""Which tile a block of threads takes next.

Tiles are numbered a block of the routing after the other, its columns one after the other. Those of
128 rows are begun in another order: the blocks of an expert one after the other for each column, so
that those that multiply the same weights come from the L2 at the same time. A block of threads
takes whichever is next when it is done with one, by a counter in memory: tiles of few rows take
less time, memory serves some multiprocessors faster than others, and blocks that only count in
steps of the grid drift apart, until weights are read from memory twice, or some work long after the
rest has ended. Without a counter they count so all the same.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from moe_layouts_cute import TURNS
from moe_progress_cute import MoeProgress
from moe_routing_cute import within

_NEVER = 0x7FFFFFFF  # behind all turns: what a counter that did not begin with 0 may lead to
_WINDOW = 16  # blocks; an expert's are told apart within one


class MoeTiles(MoeProgress):
    @cute.jit
    def in_order(self, turn, routing, columns):
        """The tile of a turn: its block, behind the last one at the end, its column and its expert.
        By a whole warp."""
        blocks = routing[2]
        block, lane = turn // columns, cute.arch.lane_idx()
        column, mine = Int32(0), Int32(-1)
        if block < blocks:
            window = block // _WINDOW * _WINDOW
            place = block - window
            expert = Int32(-2)
            if (lane < _WINDOW) & (window + lane < blocks):
                expert = self.expert_of(routing, window + lane)
            mine = cute.arch.shuffle_sync(expert, place)
            alike = Int32(cute.arch.vote_ballot_sync(expert == mine))
            begin = _highest(~alike & ((1 << place) - 1)) + 1
            others = ~alike >> place
            count = place + cute.arch.popc((others & -others) - 1) - begin
            at = turn - (window + begin) * columns
            column = at // count
            block = window + begin + at - column * count
        return block, column, mine

    def block_of(self, number, place):
        """Of a tile's number; in the experts' order that is its block."""
        rank, columns = place[0], place[4]
        if const_expr(self.in_expert_order):
            return number
        return number // columns + rank

    def column_of(self, number, column, place):
        if const_expr(self.in_expert_order):
            return column
        return number % place[4]

    def end_of(self, routing, place):
        """Behind the last tile's number."""
        return routing[2] if const_expr(self.in_expert_order) else place[3]

    @cute.jit
    def expert_for(self, routing, block, handed):
        """Of a tile, whose expert was handed on with its number or is not known yet."""
        expert = handed
        if const_expr(not self.in_expert_order):
            expert = self.expert_of(routing, block)
        return expert

    @cute.jit
    def claim(self, counter, turn, grid):
        """The next turn, in the first lane; not waited for here."""
        taken = turn + grid
        if counter.toint() != 0:
            if cute.arch.lane_idx() == 0:
                taken = within(2 * grid + _count(counter.toint()), _NEVER)
        return taken

    @cute.jit
    def claim_next(self, counter, number, grid, tiles):
        """The tile after `number`, where only the first ones are dealt; waited for, by a warp."""
        taken = number + grid
        if (counter.toint() != 0) & (grid < tiles):
            if cute.arch.lane_idx() == 0:
                taken = within(grid + _count(counter.toint()), _NEVER)
            taken = cute.arch.shuffle_sync(taken, 0)
        return taken

    @cute.jit
    def publish(self, storage, entry, *tile):
        """By one warp: what `take` reads."""
        full, empty = self.turn_barriers(storage)
        slot = entry % TURNS
        cute.arch.mbarrier_wait(empty + slot, (entry // TURNS & 1) ^ 1)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(tile)):
                storage.routing.data_ptr()[i * TURNS + slot] = tile[i]
            cute.arch.mbarrier_arrive(full + slot)

    @cute.jit
    def take(self, storage, entry):
        """A tile's number; in the experts' order its block, column and expert."""
        full, empty = self.turn_barriers(storage)
        slot = entry % TURNS
        cute.arch.mbarrier_wait(full + slot, entry // TURNS & 1)
        words = storage.routing.data_ptr()
        tile = [Int32(0)] * 3
        for i in cutlass.range_constexpr(3 if const_expr(self.in_expert_order) else 1):
            tile[i] = cute.arch.make_warp_uniform(words[i * TURNS + slot])
        cute.arch.sync_warp()
        self.release(empty, slot)
        return tuple(tile)

    @cute.jit
    def release(self, empty, index):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + index)

    def init_turns(self, storage):
        full, empty = self.turn_barriers(storage)
        loaders = self.gatherers // 32 + self.in_expert_order
        readers = 4 * self.consumers + loaders  # warps
        for i in range(TURNS * self.by_turns):
            cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init(empty + i, readers)

    def turn_barriers(self, storage):
        full = storage.barriers.data_ptr() + 2 * self.stages
        return full, full + TURNS


def _highest(bits):
    """The place of the highest bit, -1 of none."""
    return cute.arch.inline_ptx(
        "bfind.u32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[bits]
    )


def _count(address):
    return cute.arch.inline_ptx(
        "atom.global.relaxed.gpu.add.u32 {$w0}, [{$r0}], 1;",
        write_only_types=[Int32],
        read_only_args=[Int64(address)],
    )
