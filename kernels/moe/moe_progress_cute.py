# SPDX-License-Identifier: Apache-2.0
"""How much of its rows `moe_up` has stored, for those who read them while it still works on others.

`progress` counts for each block of the routing, from zero, the columns that warps have stored: it
is whole with (rows of a block / 16) * (columns of the result). Blocks of experts that are elsewhere
are not counted: nobody loads for them, so those who multiply could run ahead of who counts.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from moe_layouts_cute import TURNS
from moe_routing_cute import MoeRouting


class MoeProgress(MoeRouting):
    def stored_barrier(self, storage):
        return storage.barriers.data_ptr() + (2 * self.stages + 2 * TURNS)

    def init_stored(self, storage):
        cute.arch.mbarrier_init(self.stored_barrier(storage), 4 * self.consumers)

    @cute.jit
    def say_stored(self, storage):
        """By each warp that multiplies, after its stores of a tile."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.stored_barrier(storage))

    @cute.jit
    def count_tile(self, warp, storage, counted, tile, tiles):
        """By one warp of the loaders, so that who multiplies need not wait for memory: the last of
        `tiles`, once all of it is stored and before the next one is."""
        progress, rows = counted
        block, column = tile
        if (warp == 2) & (tiles > 0) & (progress.toint() != 0):
            cute.arch.mbarrier_wait(self.stored_barrier(storage), (tiles - 1) & 1)
            columns = cutlass.min(self.width, rows - column * self.width)
            if cute.arch.lane_idx() == 0:
                cute.arch.inline_ptx(
                    "red.release.gpu.global.add.u32 [{$r0}], {$r1};",
                    read_only_args=[
                        progress.toint() + Int64(block) * 4,
                        columns * (4 * self.consumers),
                    ],
                )

    @cute.jit
    def wait_for(self, progress, block, columns):
        """Then the copy engine may read what is counted."""
        address = progress.toint() + Int64(block) * 4
        stored = _acquire(address)
        while stored < self.tile_m // 16 * columns:
            stored = _acquire(address)
        cute.arch.fence_proxy("async.global")


def _acquire(address):
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[address],
    )
