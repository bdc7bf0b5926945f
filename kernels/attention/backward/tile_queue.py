# SPDX-License-Identifier: Apache-2.0
"""The next tile: warp 0 takes it from a counter, and passes it to the block's other warps through a
queue of two slots with full and empty barriers. Tile -1 ends the block. A tile of packed sequences
comes with `details`: 32-bit numbers of its sequence.

Tiles differ in length under a mask; the counter balances them. A tile that waits for earlier ones
(a fixed order of dq) waits only for tiles that a running block has taken.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

_SLOTS = 2
_READERS = 9  # warps: eight that multiply, and the one that stores


def queue_words(details):
    """The queue's 64-bit words."""
    return _SLOTS * (2 + _words(details))


def _words(details):
    """8-byte words of a slot: the tile and its details."""
    return (2 + details) // 2


@cute.jit
def set_up_queue(queue):
    """One thread calls this before the block's first barrier."""
    for slot in cutlass.range_constexpr(_SLOTS):
        cute.arch.mbarrier_init(queue + slot, 1)
        cute.arch.mbarrier_init(queue + _SLOTS + slot, _READERS)


@cute.jit
def hand_out(queue, turn, tile, details):
    """Warp 0 hands out the block's tile of this turn."""
    slot = turn % _SLOTS
    cute.arch.mbarrier_wait(queue + _SLOTS + slot, (turn // _SLOTS + 1) % 2)
    with cute.arch.elect_one():
        _store(_place(queue, slot, len(details)), (tile, *details))
        cute.arch.mbarrier_arrive(queue + slot)


@cute.jit
def receive(queue, turn, details):
    """Each other warp takes the tile of this turn; registers `details` get the numbers beside it,
    unless they are None."""
    slot = turn % _SLOTS
    cute.arch.mbarrier_wait(queue + slot, turn // _SLOTS % 2)
    tile = _load(queue, slot, details)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(queue + _SLOTS + slot)
    return tile


def _place(queue, slot, details):
    words = _words(details)
    return (queue + 2 * _SLOTS + (slot if words == 1 else slot * words)).toint()


def _store(place, values):
    for i, value in enumerate(values):
        at = f"{{$r0}} + {4 * i}" if i else "{$r0}"
        cute.arch.inline_ptx(f"st.shared.s32 [{at}], {{$r1}};", read_only_args=[place, value])


def _load(queue, slot, details):
    """The slot's tile; its details go to registers."""
    count = 0 if details is None else cute.size(details)
    place = _place(queue, slot, count)
    values = []
    for i in range(1 + count):
        at = f"{{$r0}} + {4 * i}" if i else "{$r0}"
        value = cute.arch.inline_ptx(
            f"ld.shared.s32 {{$w0}}, [{at}];", write_only_types=[Int32], read_only_args=[place]
        )
        values.append(cute.arch.make_warp_uniform(value))
    for i in range(count):
        details[i] = values[1 + i]
    return values[0]


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
