# SPDX-License-Identifier: Apache-2.0
"""Which tile comes next: warp 0 takes it from a counter, and hands it to the block's other warps
through a queue of two slots: barriers for full, barriers for empty, tiles. Tile -1 ends the block.

Tiles differ in length under a mask; taken one after another, blocks end together. A tile that waits
for earlier ones (a fixed order of dq) waits for what a running block has taken.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

_SLOTS = 2
QUEUE = 3 * _SLOTS  # 64-bit words
_READERS = 9  # warps: eight that multiply, and the one that stores


@cute.jit
def set_up_queue(queue):
    """One thread calls this before the block's first barrier."""
    for slot in cutlass.range_constexpr(_SLOTS):
        cute.arch.mbarrier_init(queue + slot, 1)
        cute.arch.mbarrier_init(queue + _SLOTS + slot, _READERS)


@cute.jit
def hand_out(queue, turn, tile):
    """Warp 0 hands out the block's tile of this turn."""
    slot = turn % _SLOTS
    cute.arch.mbarrier_wait(queue + _SLOTS + slot, (turn // _SLOTS + 1) % 2)
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "st.shared.s32 [{$r0}], {$r1};",
            read_only_args=[(queue + 2 * _SLOTS + slot).toint(), tile],
        )
        cute.arch.mbarrier_arrive(queue + slot)


@cute.jit
def receive(queue, turn):
    """Each other warp takes the tile of this turn."""
    slot = turn % _SLOTS
    cute.arch.mbarrier_wait(queue + slot, turn // _SLOTS % 2)
    tile = cute.arch.inline_ptx(
        "ld.shared.s32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[(queue + 2 * _SLOTS + slot).toint()],
    )
    tile = cute.arch.make_warp_uniform(tile)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(queue + _SLOTS + slot)
    return tile


@cute.jit
def take(counter):
    """The next tile that no block has taken."""
    tile = Int32(0)
    if cute.arch.lane_idx() == 0:
        tile = cute.arch.inline_ptx(
            "atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], 1;",
            write_only_types=[Int32],
            read_only_args=[counter],
        )
    return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(tile, 0))
