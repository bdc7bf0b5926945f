# SPDX-License-Identifier: Apache-2.0
"""A compiled variant of moe_up's and moe_down's kernel: its tiles, threads and shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from linear_layouts_cute import EPI, ROW, WARPGROUP, round_up, swizzled
from moe_activations_cute import activation

CONSUMERS = 2  # warpgroups that multiply
TURNS = 4  # tiles handed from the warp that takes them to the other warps, at most, in flight
# The largest problem that thread blocks route by themselves (moe_routing_cute.py), as in moe_mlp.h.
ROUTED_IDS, ROUTED_EXPERTS = 1024, 512
ROUTED_BLOCKS = ROUTED_EXPERTS + ROUTED_IDS // 64


class MoeVariant:
    """`act` is None for `down`. `block_scaled`: a scale per 1x128 values of x and 128x128 of the
    weights instead of one per row. `by_boxes`: x is in the routing's order, so TMA loads its rows.
    """

    def __init__(self, name, dtype, act, tile_m, tile_n, stages, block_scaled, by_boxes):
        assert tile_m in (EPI, CONSUMERS * EPI)
        self.name = name
        self.dtype = dtype
        self.up = act is not None
        self.by_boxes = by_boxes
        self.block_scaled = block_scaled
        self.scaled = dtype.width == 8 and not block_scaled  # a scale per row
        self.out_dtype = cutlass.BFloat16 if dtype.width == 8 else dtype
        self.act = activation(act) if self.up else None
        self.act_before_float8 = activation(act, True) if self.up else None
        self.tile_m, self.tile_n = tile_m, tile_n
        self.tile_k = ROW * 8 // dtype.width
        self.half = tile_n // 2
        self.width = self.half if self.up else tile_n  # columns of the result
        self.chunk = min(self.width, EPI)  # columns stored at a time
        self.stages = stages
        self.threads = (1 + CONSUMERS) * WARPGROUP
        # Tiles of 64 rows: the warpgroups take turns with whole tiles. Else they share each tile.
        self.pingpong = tile_m == EPI
        self.sharing = 1 if self.pingpong else CONSUMERS  # warpgroups per tile
        # Tiles are taken from a counter. For 16-bit tiles of 64 rows that was up to 3 % slower
        # (H200) than dealing them out in steps of the grid.
        self.dynamic = not self.pingpong or dtype.width == 8
        self.turn_words = (1 if self.pingpong else 3) * self.dynamic  # handed over per tile
        # Threads that copy rows of x; with boxes, those that copy its block scales.
        self.gatherers = 64 if self.pingpong else 96
        if by_boxes:
            self.gatherers = 32 * block_scaled
        # `up` counts the stored columns (moe_progress_cute.py). It does not with a scale per row:
        # those rows are quantised before `down` reads them.
        self.counts = not self.pingpong and self.up and not self.scaled
        # The scales of a tile's weight rows reach the epilogue through shared memory. Pingpong
        # tiles read them from global memory while the other warpgroup multiplies.
        self.lists_scales = self.scaled and not self.pingpong
        # Wide tiles with block scales: the registers hold products of one half at a time.
        self.halves_in_turn = block_scaled and not self.pingpong
        self.scale_a_half = block_scaled and (self.up or self.halves_in_turn)
        self.quantizes = self.halves_in_turn and self.up  # the result may be float8
        self.stage_scales = (tile_m + 2) * block_scaled
        # The epilogue's buffers per warpgroup. In other kernels the lists of rows take the shared
        # memory of a second one, or there are no registers for it.
        self.pieces = 1 if self.pingpong or self.quantizes else 2
        # When a tile's indices and scales are read. Static and shared tiles: one tile ahead.
        self.looks_ahead = not (self.pingpong and self.dynamic)
        # Shared tiles: after the first products are issued. It made float8's `down` 7 % slower
        # (H200), and with boxes no step has a fence that would wait for these reads.
        self.looks_after_first = not (self.pingpong or block_scaled or by_boxes) and (
            self.up or not self.scaled
        )

    @property
    def words(self):
        """32-bit words of shared memory: tiles handed over; lists of the routing, or scales of
        weight rows; block scales of the ring's stages."""
        lists = CONSUMERS * self.tile_n * self.lists_scales
        if self.pingpong:
            lists = ROUTED_IDS + 2 * ROUTED_BLOCKS + 2  # even: scales are read as pairs
        return TURNS * self.turn_words + lists + self.stages * self.stage_scales

    def storage(self):
        def tiles(dtype, rows):
            size = rows * ROW * 8 // dtype.width
            return cute.struct.Align[cute.struct.MemRange[dtype, size], 1024]

        @cute.struct
        class Storage:
            x: tiles(self.dtype, self.stages * self.tile_m)
            w: tiles(self.dtype, self.stages * self.tile_n)
            y: tiles(self.out_dtype, CONSUMERS * self.pieces * EPI)
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages + 2 * TURNS + 1]
            words: cute.struct.MemRange[Int32, self.words]

        return Storage

    def smem_bytes(self):
        """The size of storage() as the launch requests it."""
        ring = self.stages * ((self.tile_m + self.tile_n) * ROW + 16)
        rest = CONSUMERS * self.pieces * EPI * ROW + 4 * self.words
        return round_up(ring + 16 * TURNS + 8 + rest)


def tile_layout(dtype, rows, stages):
    """Stages of a tile with ROW bytes per row."""
    return swizzled(dtype, rows, ROW * 8 // dtype.width, stages)
