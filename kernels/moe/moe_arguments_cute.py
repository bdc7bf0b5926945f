# SPDX-License-Identifier: Apache-2.0
"""The parameters of moe_up's and moe_down's kernel, and the tuples its parts are given."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Arguments(NamedTuple):
    """The kernel's parameters after its tensor maps, in order. This is the only such list in
    Python; MoeMlpArguments in moe_mlp_kernels.h has members of the same names. An element is an
    entry of topk_ids."""

    x: cute.Pointer
    sorted_ids: cute.Pointer  # null: thread blocks route the ids themselves
    expert_ids: cute.Pointer
    used: cute.Pointer  # slots in use
    counter: cute.Pointer  # tiles taken, from 0; or null
    progress: cute.Pointer  # columns stored per block of the routing, from 0; or null
    weights: cute.Pointer  # per element, or null
    ids: cute.Pointer  # experts by element; or null: see clear_rows_of_none
    x_scale: cute.Pointer  # per row of x, or per 1x128 values
    w_scale: cute.Pointer  # per row of the weights, or per 128x128 values
    out_scale: cute.Pointer  # per 1x128 values of a float8 result; or null
    out: cute.Pointer  # [elements, rows]
    experts: Int32
    w_rows: Int32  # rows of weights per expert
    k: Int32
    second: Int32  # rows from a tile's first half of weights to its second
    rows: Int32  # columns of the result, each a row of weights
    elements: Int32
    divide: Int32  # element e reads row e / divide of x
    x_pieces: Int32  # 16-byte pieces from a row of x to the next
    id_words: Int32  # 2 for int64 ids, else 1
    bound: Int32  # ids at or above it name no expert
    early: Int32  # the routing was complete before the previous kernel: do not wait for that one
    x_scale_step: Int32  # 0: one scale for all rows
    w_scale_expert: Int32
    w_scale_step: Int32
    x_rows: Int32
    to_slots: Int32  # rows of the result are in the routing's order
    listed: Int32  # blocks that the lists have room for


class Ring(NamedTuple):
    """The shared memory struct, and its barriers per stage of the ring."""

    storage: object
    full: cute.Pointer
    empty: cute.Pointer


class Routing(NamedTuple):
    ids: object  # elements by slot; pingpong kernels have addresses of both lists, else pointers
    experts: object  # experts by block
    blocks: Int32  # in use
    steps: Int32  # K steps of a tile
    places: Int32  # each block's first slot | rows << 16: a shared memory address, or 0
    expert_count: Int32


class Tiles(NamedTuple):
    rank: Int32
    first: Int32  # this thread block's first tile
    grid: Int32  # thread blocks
    count: Int32
    columns: Int32  # tiles per block of the routing


def address(pointer):
    """An integer; 0 for null. As a function, so that a branch does not carry `pointer`."""
    return pointer.toint()
