# SPDX-License-Identifier: Apache-2.0
"""A variant of grouped_gemm's kernel: its tiles, products and shared memory."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from linear_layouts_cute import (
    EPI,
    MAJORS,
    OPERAND_MAJORS,
    ROW,
    WARPGROUP,
    coordinates,
    round_up,
    swizzled,
)

CONSUMERS = 2  # warpgroups that multiply
MOST_GROUPS = 512


class GroupedGemmLayouts:
    def __init__(self, name, dtype, kind, tile_m, tile_n, stages):
        self.name = name
        self.dtype = dtype
        self.of_weight = kind == "grad_weight"
        self.majors = MAJORS.get(kind, ("k", "k"))
        self.tile_m, self.tile_n = tile_m, tile_n
        self.tile_k = ROW // 2
        self.stages = stages
        self.threads = (1 + CONSUMERS) * WARPGROUP
        self.pieces = tile_n // EPI  # of a warpgroup's 64 rows on their way out
        assert tile_m == CONSUMERS * EPI

    def tiled_mma(self, dtype, warpgroups, columns, majors=("k", "k")):
        return hopper.make_trivial_tiled_mma(
            dtype,
            dtype,
            *(OPERAND_MAJORS[major] for major in majors),
            Float32,
            (warpgroups, 1, 1),
            (64, columns),
        )

    def smem_layouts(self):
        """Staged layouts of a, b and the output's pieces."""
        return (
            swizzled(self.dtype, self.tile_m, self.tile_k, self.stages, self.majors[0]),
            swizzled(self.dtype, self.tile_n, self.tile_k, self.stages, self.majors[1]),
            swizzled(self.dtype, EPI, EPI, self.pieces * CONSUMERS),
        )

    def storage(self):
        def tiles(layout):
            return cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        a_layout, b_layout, y_layout = self.smem_layouts()

        @cute.struct
        class Storage:
            a: tiles(a_layout)
            b: tiles(b_layout)
            y: tiles(y_layout)
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            begins: cute.struct.MemRange[Int32, MOST_GROUPS + 4]

        return Storage

    def smem_bytes(self):
        """What the storage takes, as the launch asks for it."""
        ring = self.stages * ((self.tile_m + self.tile_n) * ROW + 16)
        return round_up(ring + self.pieces * CONSUMERS * EPI * EPI * 2 + (MOST_GROUPS + 4) * 4)

    def matrices(self, groups, n, k):
        """The groups' matrices in memory, as (column of the result, element of the sum, group)."""
        n8, k8 = cute.assume(n, divby=8), cute.assume(k, divby=8)
        stride = (k8, 1, n8 * k8) if self.majors[1] == "k" else (1, n8, n8 * k8)
        return cute.make_layout((n8, k8, groups), stride=stride)

    def places(self, groups, n, k):
        """What their tensor map is indexed with."""
        if self.majors[1] == "mn":
            return cute.make_identity_tensor((n, k, groups))
        identity = cute.make_identity_tensor((k, n, groups))
        return cute.make_tensor(identity.iterator, cute.select(identity.layout, [1, 0, 2]))

    def results(self, m, groups, n, k):
        """What the map of the result is indexed with: (row, column), and of groups' the group."""
        if self.of_weight:
            identity = cute.make_identity_tensor((n, k, groups))
            return cute.make_tensor(identity.iterator, cute.select(identity.layout, [1, 0, 2]))
        return coordinates(m, n)

    @cute.jit
    def next(self, index, phase):
        end = index + 1 == self.stages
        return Int32(0) if end else index + 1, phase ^ 1 if end else phase
