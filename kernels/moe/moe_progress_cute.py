# SPDX-License-Identifier: Apache-2.0
"""How much of its rows `moe_up` has stored, for those who read them while it still works on others.

`progress` counts for each block of the routing, from zero, the columns that warps have stored: it
is whole with (rows of a block / 16) * (columns of the result).
"""

import cutlass.cute as cute
from cutlass import Int32, Int64
from moe_routing_cute import MoeRouting


class MoeProgress(MoeRouting):
    @cute.jit
    def count_stored(self, progress, block, columns):
        """By a warp, some time after its stores, for which this waits; not where there are none."""
        cute.arch.sync_warp()
        if (cute.arch.lane_idx() == 0) & (columns > 0) & (progress.toint() != 0):
            cute.arch.inline_ptx(
                "red.release.gpu.global.add.u32 [{$r0}], {$r1};",
                read_only_args=[progress.toint() + Int64(block) * 4, columns],
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
