# SPDX-License-Identifier: Apache-2.0
"""A variant of attention's backward kernel: its tiles, products and shared memory."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from attention_backward_turns_cute import MAIL
from attention_layouts_cute import PIECE, ROWS, WARPGROUP
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

WARPGROUPS = 2  # that multiply, each 64 of a tile's keys
TILE_N = ROWS * WARPGROUPS
STAGES = 2  # of q, do, its rows' sums and ds


class AttentionBackwardLayouts:
    """`capped`: scores go through tanh; `columns`: of q and k that are multiplied, where the rest
    is known to be 0."""

    def __init__(self, name, dtype, d, tile_m, capped=False, columns=None):
        self.name = name
        self.dtype = dtype
        self.d = d
        self.columns = columns or d
        self.tile_m = tile_m
        self.capped = capped
        self.threads = (1 + WARPGROUPS) * WARPGROUP
        self.stats_bytes = 2 * 4 * tile_m
        # A warpgroup's part of dq in float32, then its rows of dv and of dk.
        self.part_bytes = max(tile_m * d * 4 // WARPGROUPS, ROWS * d * 2)
        self.loader_registers, self.registers = 24, 240

    def mma_sp(self):
        """s = k q^T and dp = v do^T: keys down, queries across, as dv and dk take them."""
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            (WARPGROUPS, 1, 1),
            (64, self.tile_m),
        )

    def mma_kv(self):
        """dv += p do and dk += ds q, with p and ds from registers."""
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.MN,
            Float32,
            (WARPGROUPS, 1, 1),
            (64, self.d),
            a_source=warpgroup.OperandSource.RMEM,
        )

    def mma_dq(self):
        """dq = ds^T k: warpgroups share its rows or, of 64 rows, its columns."""
        rows = self.tile_m // ROWS
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.MN,
            Float32,
            (rows, WARPGROUPS // rows, 1),
            (64, self.d * rows // WARPGROUPS),
        )

    def _layout(self, rows, columns, stages):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))

    def q_layout(self):
        return self._layout(self.tile_m, self.d, STAGES)

    do_layout = q_layout

    def kv_layout(self):
        return self._layout(TILE_N, self.d, 1)

    def ds_layout(self):
        return self._layout(self.tile_m, TILE_N, STAGES)

    def out_layout(self):
        """A warpgroup's rows of dv or dk, in pieces, in its part of the way out."""
        return self._layout(ROWS, PIECE, self.d // PIECE)

    def storage(self):
        def tile(layout):
            return cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        @cute.struct
        class Storage:
            q: tile(self.q_layout())
            do: tile(self.do_layout())
            k: tile(self.kv_layout())
            v: tile(self.kv_layout())
            ds: tile(self.ds_layout())
            out: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, WARPGROUPS * self.part_bytes], 1024
            ]
            stats: cute.struct.Align[
                cute.struct.MemRange[Float32, STAGES * self.stats_bytes // 4], 128
            ]
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            do_barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            mail: cute.struct.MemRange[cutlass.Int64, MAIL]

        return Storage

    def smem_bytes(self):
        """What the storage takes, as the launch asks for it."""
        tiles = 4 * self.d * (STAGES * self.tile_m + TILE_N) + 2 * STAGES * self.tile_m * TILE_N
        rest = WARPGROUPS * self.part_bytes + STAGES * self.stats_bytes
        barriers = 8 * (4 * STAGES + 4 + MAIL)
        return (tiles + rest + barriers + 1023) // 1024 * 1024
