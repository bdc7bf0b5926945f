# SPDX-License-Identifier: Apache-2.0
"""A variant of attention's kernel: its tiles, products and shared memory."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

WARPGROUP = 128
ROWS = 64  # of a warpgroup
PIECE = 64  # columns of a 128-byte swizzle row
PACKED_ROWS = 1 << 30  # of a map of packed sequences; kRows in attention_problem.h


class AttentionLayouts:
    """`mask` is "none", "causal" or "window"; `capped`: scores go through tanh; `o_stages`: 64x64
    pieces of the output that a warpgroup has room for; `columns`: of q and k that are multiplied,
    where the rest is known to be 0; `as_integers`: scores are compared as integers, unless the
    largest is negative."""

    value_major = warpgroup.OperandMajorMode.MN
    depth = 16  # columns that one product multiplies
    counted = 0  # columns of ones beside v's: their sums are the rows' normalizers
    lift = 0.0  # the largest probability's power of 2

    def __init__(
        self,
        name,
        dtype,
        d,
        warpgroups,
        tile_n,
        mask,
        capped=False,
        stages=2,
        q_stages=1,
        o_stages=None,
        columns=None,
        as_integers=False,
    ):
        self.name = name
        self.dtype = self.out_dtype = dtype
        self.d = d
        self.columns = columns or d
        self.warpgroups = warpgroups
        self.tile_m = ROWS * warpgroups
        self.tile_n = tile_n
        self.mask = mask
        self.capped = capped
        self.as_integers = as_integers
        self.o_stages = o_stages or d // PIECE
        self.stages = stages
        self.q_stages = q_stages
        self.threads = (1 + warpgroups) * WARPGROUP
        self.loader_registers, self.registers = {2: (24, 240), 3: (32, 160)}[warpgroups]

    def mma_qk(self):
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            (self.warpgroups, 1, 1),
            (64, self.tile_n),
        )

    def mma_pv(self):
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            self.value_major,
            Float32,
            (self.warpgroups, 1, 1),
            (64, self.d + self.counted),
            a_source=warpgroup.OperandSource.RMEM,
        )

    def smem_layouts(self):
        """Staged layouts of q, k and v, and o's pieces, all in 128-byte swizzle."""

        def layout(rows, columns, stages):
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
            return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))

        return (
            layout(self.tile_m, self.d, self.q_stages),
            *(layout(self.tile_n, self.d, self.stages),) * 2,
            layout(ROWS, PIECE, self.warpgroups * self.o_stages),
        )

    def storage(self):
        q_layout, k_layout, _, o_layout = self.smem_layouts()
        values, columns = self.value_tile()
        v_size = self.stages * (values + self.counted) * columns

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, v_size], 1024]
            o: cute.struct.Align[cute.struct.MemRange[self.out_dtype, cute.cosize(o_layout)], 1024]
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.q_stages]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]

        return Storage

    def smem_bytes(self):
        """What the storage takes, as the launch asks for it."""
        rows = self.q_stages * self.tile_m + 2 * self.stages * self.tile_n
        tiles = self.dtype.width // 8 * self.d * rows
        tiles += 2 * PIECE * self.o_stages * self.tile_m
        return (tiles + 16 * (self.q_stages + 2 * self.stages) + 1023) // 1024 * 1024
