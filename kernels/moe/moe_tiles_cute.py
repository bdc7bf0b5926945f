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

import cutlass.cute as cute
from cutlass import Int32, Int64
from moe_layouts_cute import TURNS
from moe_progress_cute import MoeProgress

_WINDOW = 16  # blocks; an expert's are told apart within one


class MoeTiles(MoeProgress):
    @cute.jit
    def in_order(self, turn, routing, columns):
        """The tile of a turn; the turn itself at the end. By a whole warp."""
        number = turn
        blocks = routing[2]
        block, lane = turn // columns, cute.arch.lane_idx()
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
            number = (window + begin + at - column * count) * columns + column
        return number

    @cute.jit
    def claim(self, counter, turn, grid):
        """The next turn, in the first lane; not waited for here."""
        taken = turn + grid
        if counter.toint() != 0:
            if cute.arch.lane_idx() == 0:
                taken = 2 * grid + _count(counter.toint())
        return taken

    @cute.jit
    def claim_next(self, counter, number, grid, tiles):
        """The tile after `number`, where only the first ones are dealt; waited for, by a warp."""
        taken = number + grid
        if (counter.toint() != 0) & (grid < tiles):
            if cute.arch.lane_idx() == 0:
                taken = grid + _count(counter.toint())
            taken = cute.arch.shuffle_sync(taken, 0)
        return taken

    @cute.jit
    def publish(self, storage, entry, number):
        """By one warp: what `take` reads."""
        full, empty = self.turn_barriers(storage)
        slot = entry % TURNS
        cute.arch.mbarrier_wait(empty + slot, (entry // TURNS & 1) ^ 1)
        if cute.arch.lane_idx() == 0:
            storage.routing.data_ptr()[slot] = number
            cute.arch.mbarrier_arrive(full + slot)

    @cute.jit
    def take(self, storage, entry):
        full, empty = self.turn_barriers(storage)
        slot = entry % TURNS
        cute.arch.mbarrier_wait(full + slot, entry // TURNS & 1)
        number = cute.arch.make_warp_uniform(storage.routing.data_ptr()[slot])
        cute.arch.sync_warp()
        self.release(empty, slot)
        return number

    @cute.jit
    def release(self, empty, index):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + index)

    def init_turns(self, storage):
        full, empty = self.turn_barriers(storage)
        loaders = 1 if self.by_boxes else self.gatherers // 32
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
