# SPDX-License-Identifier: Apache-2.0
"""A variant of moe_up's and moe_down's kernel: its tiles, products and shared memory."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from moe_activations_cute import activation

ROW = 128  # bytes of a row in shared memory: one swizzle
EPI = 64  # rows and columns of a piece of the result on its way out
WARPGROUP = 128
SCALE_BLOCK = 128
GATHERERS, WIDE_GATHERERS = 64, 96  # threads that copy rows of tiles of 64 rows, of 128
TURNS = 4  # tiles whose numbers are on their way from who takes them to who works on them
# What blocks of threads route by themselves (moe_routing_cute.py): as moe_mlp.h says.
ROUTED_IDS, ROUTED_EXPERTS = 1024, 512
ROUTED_BLOCKS = ROUTED_EXPERTS + ROUTED_IDS // 64


class MoeLayouts:
    """`act` is None for `down`; `pingpong`: two warpgroups take turns with tiles instead of sharing
    them;
    `block_scaled`: scales of 1x128 values of x and 128x128 of weights, instead of rows;
    `by_boxes`: x is in the routing's order, so that the copy engine takes a tile's rows."""

    def __init__(self, name, dtype, act, tile_m, tile_n, pingpong, stages, block_scaled, by_boxes):
        self.name = name
        self.dtype = dtype
        self.block_scaled = block_scaled
        self.scaled = dtype.width == 8 and not block_scaled
        self.out_dtype = cutlass.BFloat16 if dtype.width == 8 else dtype
        self.up = act is not None
        self.act = activation(act) if self.up else None
        self.act_before_float8 = activation(act, True) if self.up else None
        self.tile_m, self.tile_n = tile_m, tile_n
        self.tile_k = ROW * 8 // dtype.width
        self.half = tile_n // 2
        self.width = self.half if self.up else tile_n  # columns of the result
        self.chunk = min(self.width, EPI)  # columns of them on their way out
        self.routes = pingpong
        self.pingpong = pingpong
        self.stages = stages
        self.in_expert_order = tile_m > EPI
        # Tiles are taken as they come; of 16 bits and few rows that was up to 3 % slower (H200).
        self.by_turns = self.in_expert_order or dtype.width == 8
        self.by_boxes = by_boxes
        # Scales of a tile's rows of weights meet the sums from shared memory: one warpgroup's.
        self.lists_scales = self.scaled and not pingpong
        # Scales of blocks: whether a tile's halves have one each, and are multiplied in turn; and
        # whether the result may be quantised.
        self.in_turn = block_scaled and self.half >= SCALE_BLOCK
        self.scale_a_half = block_scaled and (self.up or self.in_turn)
        self.quantizes = self.in_turn and self.up
        # Shared memory that the lists of rows take in other kernels; and registers in some.
        self.pieces = 1 if pingpong or self.quantizes else min(2, self.width // self.chunk)
        # Threads that copy rows of x; beside boxes, their scales.
        self.gatherers = WIDE_GATHERERS if tile_m > EPI else GATHERERS
        if by_boxes:
            self.gatherers = 32 * block_scaled
        self.stage_scales = (tile_m + 2) * block_scaled
        # See moe_progress_cute.py; who takes rows by boxes may read them as they are stored. Rows
        # of one scale are quantised in between.
        self.counts = self.in_expert_order and self.up and not self.scaled
        self.consumers = 2 if pingpong else tile_m // EPI
        self.threads = (1 + self.consumers) * WARPGROUP
        # Handed from the loaders to those that multiply, where there are two.
        self.loader_registers, self.registers = (56, 224) if self.consumers == 2 else (0, 0)
        self.sharing = 1 if pingpong else self.consumers
        self.wg_rows = tile_m // self.sharing
        # A tile's first products are under way before anything else is read for it. Turns hide
        # that anyway; it made float8's `down` 7 % slower on an H200; and by boxes no step has a
        # fence, which would wait for what is read.
        self.begins = (
            not pingpong and not block_scaled and (self.up or not self.scaled) and not by_boxes
        )
        # What is to be known of the next tile is read while a tile's sums go out: before, a fence
        # of gathered rows would wait for it, and by boxes the first of a tile's steps.
        self.looks_late = block_scaled and not pingpong

    def mma(self, dtype, warpgroups, columns):
        return hopper.make_trivial_tiled_mma(
            dtype,
            dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            (warpgroups, 1, 1),
            (64, columns),
        )

    def smem_layout(self, dtype, rows, stages):
        columns = ROW * 8 // dtype.width
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
        return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))

    def storage(self):
        def tiles(dtype, rows):
            size = rows * ROW * 8 // dtype.width
            return cute.struct.Align[cute.struct.MemRange[dtype, size], 1024]

        @cute.struct
        class Storage:
            x: tiles(self.dtype, self.stages * self.tile_m)
            w: tiles(self.dtype, self.stages * self.tile_n)
            y: tiles(self.out_dtype, self.consumers * self.pieces * EPI)
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages + 2 * TURNS + 1]
            routing: cute.struct.MemRange[Int32, self.routing_words()]

        return Storage

    def routing_words(self):
        """Of turns; then the lists, or scales; then scales of the ring's steps."""
        of_steps = self.stages * self.stage_scales
        if self.routes:
            lists = ROUTED_IDS + 2 * ROUTED_BLOCKS + 2  # even: scales are read as pairs
            return TURNS * self.by_turns + lists + of_steps
        lists = self.consumers * self.tile_n * self.lists_scales
        return self.turn_words() + lists + of_steps

    def turn_words(self):
        """Of tiles' numbers, and what is handed on with them; even."""
        return TURNS * 3

    def smem_bytes(self):
        """What the storage takes, as the launch asks for it."""
        ring = self.stages * ((self.tile_m + self.tile_n) * ROW + 16)
        rest = self.consumers * self.pieces * EPI * ROW + 4 * self.routing_words()
        return (ring + 16 * TURNS + 8 + rest + 1023) // 1024 * 1024

    @cute.jit
    def next(self, index, phase):
        end = index + 1 == self.stages
        return Int32(0) if end else index + 1, phase ^ 1 if end else phase

    @cute.jit
    def skip(self, index, phase, steps):
        total = index + steps
        rounds = total // self.stages
        return total - rounds * self.stages, phase ^ (rounds & 1)


def coordinates(experts, rows, k):
    """What a map of [experts, rows, k] is indexed with: (row, k, expert)."""
    identity = cute.make_identity_tensor((k, rows, experts))
    return cute.make_tensor(identity.iterator, cute.select(identity.layout, [1, 0, 2]))
