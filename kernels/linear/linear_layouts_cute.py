# SPDX-License-Identifier: Apache-2.0
"""Shared by linear's kernels: layouts of tiles in memory, and copies of w to shared memory."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

ROW = 128  # bytes of a row in shared memory: one swizzle
EPI = 64  # rows and columns of one store
WARPGROUP = 128

# Which dimension of x and w lies together in memory, where it is not that of the sum for both.
MAJORS = {"grad_x": ("k", "mn"), "grad_weight": ("mn", "mn")}
OPERAND_MAJORS = {"k": warpgroup.OperandMajorMode.K, "mn": warpgroup.OperandMajorMode.MN}


def round_up(size, unit=1024):
    """Storage's size: a multiple of its largest alignment."""
    return (size + unit - 1) // unit * unit


def copies_of_w(kernel, tma_w, sw, n, k, rank=0, blocks=1):
    """To shared memory and from w: of the parts of a tile that lie together, a rank's share."""
    tile = (kernel.width, kernel.tile_k)
    parts = cute.flat_divide(sw, tile)
    rows = coordinates(n * kernel.parts, k, kernel.majors[1])
    to, source = [], []
    for part in range(kernel.parts):
        tiles = cute.local_tile(cute.domain_offset((part * n, 0), rows), tile, (None, None))
        there, here = cpasync.tma_partition(
            tma_w,
            rank,
            cute.make_layout(blocks),
            cute.group_modes(parts[None, None, part, 0, None], 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        to.append(there)
        source.append(here)
    return to, source


def swizzled(dtype, rows, columns, stages, major="k"):
    """Stages of a tile in shared memory, in 128-byte swizzle."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind, order = (kinds.K_SW128, (0, 1, 2)) if major == "k" else (kinds.MN_SW128, (1, 0, 2))
    if major == "k" and columns * dtype.width // 8 % ROW:
        kind = kinds.K_SW32
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=order)


def matrix(rows, columns, major, unit=8):
    """A [rows, columns] matrix in memory; "mn": its transpose is row-major."""
    if major == "k":
        columns = cute.assume(columns, divby=unit)
        return cute.make_layout((rows, columns), stride=(columns, 1))
    rows = cute.assume(rows, divby=8)
    return cute.make_layout((rows, columns), stride=(1, rows))


def coordinates(rows, columns, major="k"):
    """What its tensor map is indexed with; of a row-major one (column, row)."""
    if major == "mn":
        return cute.make_identity_tensor((rows, columns))
    identity = cute.make_identity_tensor((columns, rows))
    return cute.make_tensor(identity.iterator, cute.select(identity.layout, [1, 0]))
