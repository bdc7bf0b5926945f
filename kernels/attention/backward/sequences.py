# SPDX-License-Identifier: Apache-2.0
"""Packed sequences in the backward: the list of their tiles of keys.

attention_backward_sequences.cu writes the list from cu_seqlens before the kernel runs, so no host
knows a length. All heads share it. Its entries are inside of the tensors whatever cu_seqlens holds,
and each row of k is in one tile; tiles of padding rows have no queries.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels.attention.common.layouts import PACKED_ROWS

DETAILS = 5  # numbers of a tile that all warps get
_TILE_BYTES = 32  # of the list


class Packed(NamedTuple):
    """The parameters beside those of sequences of one length: pointers before BackwardProblem,
    numbers after it."""

    tiles: cute.Pointer
    count: cute.Pointer  # of the tiles
    room: Int32  # blocks of queries a head, in the workspace


POINTERS, SIZES = Packed._fields[:2], Packed._fields[2:]


class Tile(NamedTuple):
    """AttentionBackwardTile in kernels.h. Rows are those of the tensors, without a head."""

    column: Int32  # of the sequence's tiles
    seq_k: Int32
    seq_q: Int32
    k_end: Int32  # the row of k after the sequence's last one
    first_block: Int32  # of the sequence's queries, in the workspace
    q_end: Int32 | None
    ends: Int32 | int = 1  # 0: k_end and q_end are the number of a batch entry (wide.py)

    @property
    def hidden_k(self):
        """Rows of the map of k that come before the sequence's."""
        return PACKED_ROWS - self.seq_k * self.ends

    @property
    def hidden_q(self):
        return PACKED_ROWS - self.seq_q * self.ends


def tile_at(packed, at):
    """Element `at` of the list."""
    address = packed.tiles.toint() + Int64(at) * _TILE_BYTES
    return Tile(
        *cute.arch.inline_ptx(
            "ld.global.v4.s32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address],
        ),
        *cute.arch.inline_ptx(
            "ld.global.v2.s32 {{$w0}, {$w1}}, [{$r0} + 16];",
            write_only_types=[Int32] * 2,
            read_only_args=[address],
        ),
    )
