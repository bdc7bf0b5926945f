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

_WINDOW = 16  # blocks; an expert's are told apart within one


class MoeTiles(MoeProgress):
    @cute.jit
    def in_order(self, turn, routing, columns):
        """The tile of a turn, its expert, and whether it is its column's first; the turn itself at
        the end. By a whole warp."""
        if const_expr(self.cluster > 1):
            turn = turn * 2 + self.side()
        number, mine, leads, shared = turn, Int32(-1), Int32(0), Int32(0)
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
            if const_expr(self.cluster > 1):
                # Pairs of blocks for each column; then the columns of a block without a partner.
                paired = count // 2 * 2
                column = at // cutlass.max(paired, 1)
                row = at - column * paired
                shared = Int32(at < paired * columns)
                if shared == 0:
                    column, row = at - paired * columns, paired
                leads = Int32(row == 0)
                number = (window + begin + row) * columns + column
            else:
                column = at // count
                number = (window + begin + at - column * count) * columns + column
                leads = Int32(at == column * count)
        return number, mine, leads, shared

    def side(self):
        return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    @cute.jit
    def agree(self, storage, entry, turn):
        """A cluster's second block learns the turn that the first one has taken."""
        got = storage.barriers.data_ptr() + (2 * self.stages + 2 * TURNS)
        free = got + 2
        words = storage.routing.data_ptr() + 4 * TURNS
        slot, phase = entry % 2, entry // 2 & 1
        if const_expr(self.cluster > 1):
            if self.side() == 0:
                cute.arch.mbarrier_wait(free + slot, phase ^ 1)
                with cute.arch.elect_one():
                    _send(words + slot, turn, got + slot)
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(got + slot, 4)
                cute.arch.mbarrier_wait(got + slot, phase)
                turn = cute.arch.make_warp_uniform(words[slot])
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(free + slot, 0)
        return turn

    @cute.jit
    def expert_for(self, routing, block, handed):
        """Of a tile, whose expert was handed on with its number or is not known yet."""
        expert = handed
        if const_expr(not self.hands_experts):
            expert = self.expert_of(routing, block)
        return expert

    @cute.jit
    def claim(self, counter, turn, grid):
        """The next turn, in the first lane; not waited for here."""
        taken = turn + grid
        if counter.toint() != 0:
            claims = cute.arch.lane_idx() == 0
            if const_expr(self.cluster > 1):
                claims = claims & (self.side() == 0)
            if claims:
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
    def publish(self, storage, entry, number, expert=None, leads=None, shared=None):
        """By one warp: what `take` reads."""
        full, empty = self.turn_barriers(storage)
        slot = entry % TURNS
        cute.arch.mbarrier_wait(empty + slot, (entry // TURNS & 1) ^ 1)
        if cute.arch.lane_idx() == 0:
            storage.routing.data_ptr()[slot] = number
            if const_expr(self.hands_experts):
                storage.routing.data_ptr()[TURNS + slot] = expert
            if const_expr(self.fetches_ahead):
                storage.routing.data_ptr()[2 * TURNS + slot] = leads
            if const_expr(self.cluster > 1):
                storage.routing.data_ptr()[3 * TURNS + slot] = shared
            cute.arch.mbarrier_arrive(full + slot)

    @cute.jit
    def take(self, storage, entry, loads: cutlass.Constexpr = False):
        full, empty = self.turn_barriers(storage)
        slot = entry % TURNS
        cute.arch.mbarrier_wait(full + slot, entry // TURNS & 1)
        number = cute.arch.make_warp_uniform(storage.routing.data_ptr()[slot])
        expert, leads, shared = Int32(0), Int32(0), Int32(0)
        if const_expr(self.hands_experts):
            expert = cute.arch.make_warp_uniform(storage.routing.data_ptr()[TURNS + slot])
        if const_expr(self.fetches_ahead and loads):
            leads = cute.arch.make_warp_uniform(storage.routing.data_ptr()[2 * TURNS + slot])
        if const_expr(self.cluster > 1 and loads):
            shared = cute.arch.make_warp_uniform(storage.routing.data_ptr()[3 * TURNS + slot])
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + slot)
        return number, expert, leads, shared

    @cute.jit
    def release(self, empty, index):
        with cute.arch.elect_one():
            if const_expr(self.cluster == 1):
                cute.arch.mbarrier_arrive(empty + index)
            else:
                for rank in cutlass.range_constexpr(self.cluster):
                    cute.arch.mbarrier_arrive(empty + index, rank)

    def init_turns(self, storage):
        full, empty = self.turn_barriers(storage)
        loaders = self.gatherers // 32 + self.by_boxes
        readers = 4 * self.consumers + loaders  # warps
        for i in range(TURNS * self.by_turns):
            cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init(empty + i, readers)
        for i in range(4 * (self.cluster > 1)):
            cute.arch.mbarrier_init(full + 2 * TURNS + i, 1)

    def turn_barriers(self, storage):
        full = storage.barriers.data_ptr() + 2 * self.stages
        return full, full + TURNS


def _highest(bits):
    """The place of the highest bit, -1 of none."""
    return cute.arch.inline_ptx(
        "bfind.u32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[bits]
    )


def _send(to, value, barrier):
    """To the cluster's second block."""
    cute.arch.inline_ptx(
        "{ .reg .b32 to, signal; mapa.shared::cluster.u32 to, {$r0}, 1; "
        "mapa.shared::cluster.u32 signal, {$r2}, 1; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], {$r1}, [signal]; }",
        read_only_args=[to.toint(), value, barrier.toint()],
    )


def _count(address):
    return cute.arch.inline_ptx(
        "atom.global.relaxed.gpu.add.u32 {$w0}, [{$r0}], 1;",
        write_only_types=[Int32],
        read_only_args=[Int64(address)],
    )
