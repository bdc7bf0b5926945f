# SPDX-License-Identifier: Apache-2.0
"""Sizes that all kernels share, layouts of shared memory, and coordinates of tensor maps."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

WARPGROUP = 128  # threads
ROWS = 64  # per warpgroup, of a product
PIECE = 64  # 16-bit columns of a 128-byte swizzle row
PACKED_ROWS = 1 << 30  # of a map of packed sequences; kRows in problem.h


def staged_layout(dtype, rows, columns, stages):
    """Stages of tiles with contiguous columns, in the widest swizzle that fits a row."""
    swizzle = swizzle_bytes(columns * dtype.width // 8)
    kind = getattr(warpgroup.SmemLayoutAtomKind, f"K_SW{swizzle}")
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def swizzle_bytes(row_bytes):
    return next(width for width in (128, 64) if row_bytes % width == 0)


def transposed(source):
    """Tiles [rows, columns, stages] as an operand that is multiplied along its rows."""
    return cute.make_tensor(source.iterator, cute.select(source.layout, [1, 0, 2]))


def coordinates(rows, columns, *outer):
    """Coordinates of a map of [*reversed(outer), rows, columns], indexed rows first."""
    identity = cute.make_identity_tensor((columns, rows, *outer))
    modes = [1, 0, *range(2, 2 + len(outer))]
    return cute.make_tensor(identity.iterator, cute.select(identity.layout, modes))


def copy_places(tma, smem, tile, places):
    """The start of a tile's copies: in shared memory, and in the map with these coordinates."""
    tiles = cute.zipped_divide(places, tile)
    one = cute.make_layout(1)
    return cpasync.tma_partition(tma, 0, one, cute.group_modes(smem, 0, 2), tiles)


def sequence_coordinates(rows, columns, heads, batch, hidden):
    """Coordinates of the rows of one sequence's heads. Of packed sequences, `hidden` is the number
    of the map's rows that come before the sequence's; None otherwise."""
    if hidden is None:
        return coordinates(rows, columns, heads, batch)
    places = coordinates(rows, columns, heads, PACKED_ROWS + 1, batch)
    return cute.domain_offset((hidden, 0, 0, 0, 0), places)


def outer_coordinates(entry, packed):
    """A sequence's coordinates in a map's outermost dimensions."""
    return (PACKED_ROWS, entry) if packed else (entry,)
