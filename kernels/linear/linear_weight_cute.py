# SPDX-License-Identifier: Apache-2.0
"""A weight's gradient in float8: out[M, N] = x[M, K] @ w[N, K]^T with a scale per 1x128 of both.

K counts tokens; x is the transposed gradient, w the transposed input. Per tile of 128x256 and step
of 128 tokens, the tensor cores need 1024 cycles. The float32 sums need 32768 multiply-adds and as
many products of two scales: 512 issue slots of each of the four schedulers, about 780 with all
other instructions. Two blocks of a cluster share w by multicast: 32 KB per step come from the L2.
The result is written once, 4 bytes per element, and with `total` read once: [4096, 4096] are 134
MB, 31 us at 4.3 TB/s, of about 110 us for the products of 4096 tokens.

The plan is that of linear_act_cute.py and linear_blocks_cute.py: one warp loads x and w into a ring
of stages, another one the scales beside it; two warpgroups multiply. Of a tile of 256 columns each
has all 128 rows of 128 columns, so that a lane's 32 scales of columns serve two halves of rows from
registers; of a tile of 128 columns it has 64 rows.

A warpgroup multiplies 64 rows by 64 columns at a time, into one of two accumulators, and scales the
previous part meanwhile: beside the other warpgroup's products a warp needs about three cycles per
instruction for that, which is more than the products themselves take.

Sums are stored from registers: four lanes write 32 bytes of a row. With `total`, the warp of the
scales prefetches it to the L2 during the tile's first steps.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from block_scales_cute import copy_scale, fixed, start_products
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from linear_act_cute import CONSUMERS, tile_position
from linear_blocks_cute import empty_barriers, producer_group, release
from linear_layouts_cute import (
    EPI,
    OPERAND_MAJORS,
    ROW,
    WARPGROUP,
    coordinates,
    copies_of_w,
    matrix,
    round_up,
    swizzled,
)

COLUMNS = 128  # of a warpgroup
LINE = 32  # floats of a line of the L2
PREFETCHING = 8  # first steps of a tile in which its result's lines are prefetched

# Values of WeightResult in linear_weight_kernels.h.
_ADD, _BFLOAT16 = 1, 2


class LinearWeight:
    def __init__(self, name, dtype, tile_n, cluster, stages):
        self.name = name
        self.dtype = dtype
        self.tile_m, self.tile_n, self.tile_k = CONSUMERS * EPI, tile_n, ROW
        self.width, self.parts = tile_n, 1  # of w's copies
        self.majors = ("k", "k")
        self.halves = tile_n // COLUMNS  # of the rows, one after the other
        self.pieces = tile_n // EPI  # that a warpgroup multiplies in turn
        self.cluster = cluster
        self.stages = stages
        self.multicasts = cluster  # blocks that load parts of each other's tiles
        self.blocks = True  # scales beside the stages
        self.in_fours = False
        self.threads = (1 + CONSUMERS) * WARPGROUP
        self.scales = self.tile_m + tile_n  # of a stage

    def smem_layouts(self):
        return (
            swizzled(self.dtype, self.tile_m, self.tile_k, self.stages),
            swizzled(self.dtype, self.tile_n, self.tile_k, self.stages),
        )

    def storage(self):
        x_layout, w_layout = self.smem_layouts()

        @cute.struct
        class Storage:
            x: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, self.stages * self.scales], 16]
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]

        return Storage

    def smem_bytes(self):
        """Bytes of shared memory, as the launch asks for them."""
        stage = (self.tile_m + self.tile_n) * ROW + self.scales * 4 + 16
        return round_up(self.stages * stage)

    def tiled_mma(self, accumulate):
        mma = hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            *(OPERAND_MAJORS[major] for major in self.majors),
            Float32,
            (1, 1, 1),
            (EPI, EPI),
        )
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        w: cute.Pointer,
        x_scale: cute.Pointer,
        w_scale: cute.Pointer,
        out: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        group: Int32,
        x_step: Int32,
        x_across: Int32,
        w_step: Int32,
        w_across: Int32,
        result: Int32,
        blocks: Int32,
        stream,
    ):
        x_layout, w_layout = self.smem_layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        multicast = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else load
        tma_x, _ = cpasync.make_tiled_tma_atom(
            load,
            cute.make_tensor(x, matrix(m, k, "k", 16)),
            cute.slice_(x_layout, (None, None, 0)),
            (self.tile_m, self.tile_k),
        )
        tma_w, _ = cpasync.make_tiled_tma_atom(
            multicast,
            cute.make_tensor(w, matrix(n, k, "k", 16)),
            cute.slice_(w_layout, (None, None, 0)),
            (self.tile_n, self.tile_k),
            num_multicast=self.cluster,
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            *(tma_x, tma_w, x_scale, w_scale, out),
            *(m, n, k, group, x_step, x_across, w_step, w_across, result),
        ).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_x: cute.CopyAtom,
        tma_w: cute.CopyAtom,
        x_scale: cute.Pointer,
        w_scale: cute.Pointer,
        out: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        group: Int32,
        x_step: Int32,  # from the scale of a row to that of the next row,
        x_across: Int32,  # and to that of the next 128 of K
        w_step: Int32,
        w_across: Int32,
        result: Int32,
    ):
        x_layout, w_layout = self.smem_layouts()
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_x)
            cpasync.prefetch_descriptor(tma_w)

        storage = cutlass.utils.SmemAllocator().allocate(self.storage())
        sx = storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        sw = storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        scales = storage.scales.data_ptr()
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=producer_group(self),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, 4 * CONSUMERS * self.cluster
            ),
            tx_count=(self.tile_m + self.tile_n) * ROW,
            cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.cluster, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(self.cluster, 1))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # A cluster's tiles: every clusters-th one from its own index on.
        clusters = cute.arch.grid_dim()[0] // self.cluster
        first = cute.arch.block_idx()[0] // self.cluster
        rows = cute.ceil_div(m, self.tile_m * self.cluster)
        columns = cute.ceil_div(n, self.tile_n)
        k_tiles = cute.ceil_div(k, self.tile_k)

        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(24)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
            if warp_index == 0:
                gx = cute.local_tile(coordinates(m, k), (self.tile_m, self.tile_k), (None, None))
                to_x, from_x = cpasync.tma_partition(
                    tma_x,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(sx, 0, 2),
                    cute.group_modes(gx, 0, 2),
                )
                to_w, from_w = copies_of_w(self, tma_w, sw, n, k, rank, self.cluster)
                everyone = cutlass.Int16((1 << self.cluster) - 1)  # unused without multicast
                for tile in cutlass.range(first, rows * columns, clusters, unroll=1):
                    row, column = tile_position(tile, rows, columns, group)
                    row = row * self.cluster + rank
                    for step in cutlass.range(k_tiles, unroll=1):
                        ring.producer_acquire(state)
                        barrier = ring.producer_get_barrier(state)
                        cute.copy(
                            tma_x,
                            from_x[None, row, step],
                            to_x[None, state.index],
                            tma_bar_ptr=barrier,
                        )
                        cute.copy(
                            tma_w,
                            from_w[0][None, column, step],
                            to_w[0][None, state.index],
                            tma_bar_ptr=barrier,
                            mcast_mask=everyone,
                        )
                        state.advance()
                ring.producer_tail(state)
            if warp_index == 1:
                for tile in cutlass.range(first, rows * columns, clusters, unroll=1):
                    row, column = tile_position(tile, rows, columns, group)
                    row = (row * self.cluster + rank) * self.tile_m
                    state = self.load_scales(
                        *(ring, state, scales, k_tiles, (x_scale, w_scale)),
                        *((x_step, x_across, w_step, w_across), (m, n)),
                        *((row, column * self.tile_n), out, result),
                    )
        else:
            cute.arch.setmaxregister_increase(240)
            consumer = warpgroup_index - 1
            wg_thread = thread % WARPGROUP
            mma, start = self.tiled_mma(True), self.tiled_mma(False)
            part = mma.get_slice(0)
            halves = swizzled(self.dtype, EPI, self.tile_k, 2 * self.stages)
            halves = storage.x.get_tensor(halves.outer, swizzle=halves.inner)
            rx = mma.make_fragment_A(part.partition_A(halves))
            pieces = swizzled(self.dtype, EPI, self.tile_k, self.pieces * self.stages)
            pieces = storage.w.get_tensor(pieces.outer, swizzle=pieces.inner)
            rw = mma.make_fragment_B(part.partition_B(pieces))
            shape = mma.partition_shape_C((EPI, EPI))
            products = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
            sums = cute.make_rmem_tensor(EPI * self.halves, Float32)
            # This lane's first row and column of the tile.
            my_row, my_column = wg_thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
            if const_expr(self.halves == 2):
                my_column += consumer * COLUMNS
            else:
                my_row += consumer * EPI
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            for tile in cutlass.range(first, rows * columns, clusters, unroll=1):
                row, column = tile_position(tile, rows, columns, group)
                row = (row * self.cluster + rank) * self.tile_m + my_row
                sums.fill(0.0)
                read = self.multiply_steps(
                    *(ring, read, k_tiles, (start, mma), products, sums, (rx, rw)),
                    *(scales, (my_row, my_column, consumer)),
                )
                for half in cutlass.range_constexpr(self.halves):
                    self.put(
                        *(sums, half * EPI, out, result),
                        *(row + half * EPI, column * self.tile_n + my_column, (m, n)),
                    )

    @cute.jit
    def multiply_steps(self, ring, read, steps, mmas, products, sums, operands, scales, at):
        """A tile's steps; returns the stage behind them. `at`: this lane's first row and column of
        the tile, and the warpgroup. A part is scaled while the next one is multiplied, across steps
        too."""
        row, column, consumer = at
        lane = cute.arch.lane_idx()
        empty = fixed(empty_barriers(self, ring, lane))
        of_rows = fixed((scales + row).toint())
        of_columns = fixed((scales + self.tile_m + column).toint())
        by_column = cute.make_rmem_tensor((2, COLUMNS // 8), Float32)
        ring.consumer_wait(read)
        self.start(mmas, products, operands, 0, read.index, consumer)
        for step in cutlass.range(steps, unroll=1):
            by_row = self.read_scales(of_rows, of_columns, by_column, read.index)
            for part in cutlass.range_constexpr(self.pieces - 1):
                warpgroup.wait_group(0)
                self.start(mmas, products, operands, part + 1, read.index, consumer)
                self.add(sums, products, part, by_row, by_column)
            done = read.index
            read.advance()
            is_there = ring.consumer_try_wait(read)
            warpgroup.wait_group(0)
            cute.arch.sync_warp()  # all lanes have read the scales; one lane arrives for its warp
            release(self, empty + done * 8, lane)
            if step + 1 < steps:
                ring.consumer_wait(read, is_there)
                self.start(mmas, products, operands, 0, read.index, consumer)
            self.add(sums, products, self.pieces - 1, by_row, by_column)
        return read

    def read_scales(self, of_rows, of_columns, by_column, index):
        """A stage's: of this lane's rows, which it returns, and of its columns."""
        at = index * (self.scales * 4)
        for eight in range(COLUMNS // 8):
            two = at_shared(of_columns + at, 8, 2, eight * 8)
            by_column[0, eight], by_column[1, eight] = two[0], two[1]
        return [
            at_shared(of_rows + at, 4, 1, half * EPI + lower * 8)[0]
            for half in range(self.halves)
            for lower in range(2)
        ]

    def add(self, sums, products, part, by_row, by_column):
        """Adds a part's products to its sums, times the scales of this lane's upper or lower row
        and of its column."""
        half, right = divmod(part, 2)
        for eight in range(EPI // 8):
            column = right * (EPI // 8) + eight
            for v in range(4):
                by = by_row[2 * half + v // 2] * by_column[v % 2, column]
                sums[half * EPI + column * 4 + v] += products[part % 2][eight * 4 + v] * by

    @cute.jit
    def start(self, mmas, products, operands, part, index, consumer):
        """Begins the products of 64 rows of a stage and 64 columns: of two halves of the rows in
        turn with this warpgroup's 128 columns, or of its rows with all columns."""
        rx, rw = operands
        half, right = consumer, 0
        if const_expr(self.halves == 2):
            half, right = part // 2, 2 * consumer
        start_products(
            *(mmas, products[part % 2], rx, rw),
            *(2 * index + half, self.pieces * index + right + part % 2),
        )

    @cute.jit
    def load_scales(self, ring, state, scales, steps, sources, strides, sizes, at, out, result):
        """A warp: the scales of each of a tile's steps. Beyond the last row its scales repeat."""
        (x_scale, w_scale), (m, n), (row, column) = sources, sizes, at
        x_step, x_across, w_step, w_across = strides
        lane = cute.arch.lane_idx()
        of_x = cute.make_rmem_tensor(self.tile_m // 32, Int64)
        of_w = cute.make_rmem_tensor(self.tile_n // 32, Int64)
        for i in cutlass.range_constexpr(self.tile_m // 32):
            of_x[i] = x_scale.toint() + Int64(cutlass.min(row + lane + i * 32, m - 1)) * x_step * 4
        for i in cutlass.range_constexpr(self.tile_n // 32):
            of_w[i] = (
                w_scale.toint() + Int64(cutlass.min(column + lane + i * 32, n - 1)) * w_step * 4
            )
        for step in cutlass.range(steps, unroll=1):
            ring.sync_object_empty.wait(state.index, state.phase)
            to = (scales + state.index * self.scales).toint() + lane * 4
            for i in cutlass.range_constexpr(self.tile_m // 32):
                copy_scale(to + i * 128, of_x[i] + Int64(step) * x_across * 4)
            to += self.tile_m * 4
            for i in cutlass.range_constexpr(self.tile_n // 32):
                copy_scale(to + i * 128, of_w[i] + Int64(step) * w_across * 4)
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.producer_get_barrier(state))
            state.advance()
            if result == _ADD:
                if step < PREFETCHING:
                    self.prefetch(out, row + step * (self.tile_m // PREFETCHING), column, m, n)
        return state

    @cute.jit
    def prefetch(self, out, row, column, m, n):
        """A warp: the lines of a few rows of a tile's result."""
        lane = cute.arch.lane_idx()
        across = self.tile_n // LINE
        for i in cutlass.range_constexpr(self.tile_m // PREFETCHING * across // 32):
            my_row = row + i * (32 // across) + lane // across
            my_column = column + lane % across * LINE
            if my_row < m:
                if my_column < n:
                    cute.arch.inline_ptx(
                        "prefetch.global.L2 [{$r0}];",
                        read_only_args=[out.toint() + (Int64(my_row) * n + my_column) * 4],
                    )

    @cute.jit
    def put(self, sums, first, out, result, row, column, sizes):
        """This lane's sums of 64 rows, of two of them: to out, or added to it."""
        m, n = sizes
        left = [n - column if row + 8 * lower < m else Int32(0) for lower in range(2)]
        at = [Int64(row + 8 * lower) * n + column for lower in range(2)]
        if result == _BFLOAT16:
            for lower in cutlass.range_constexpr(2):
                put_narrow(sums, first + 2 * lower, out.toint() + at[lower] * 2, left[lower])
        else:
            if result == _ADD:
                before = cute.make_rmem_tensor(EPI, Float32)
                before.fill(0.0)
                for lower in cutlass.range_constexpr(2):
                    load_row(before, 2 * lower, out.toint() + at[lower] * 4, left[lower])
                for i in cutlass.range_constexpr(EPI):
                    sums[first + i] = before[i] + sums[first + i]
            for lower in cutlass.range_constexpr(2):
                put_wide(sums, first + 2 * lower, out.toint() + at[lower] * 4, left[lower])


def at_shared(address, align, count, offset):
    """Floats of shared memory, `offset` floats behind an address."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=align)
    return cute.make_tensor(pointer + offset, cute.make_layout(count)).load()


# A lane has two columns in each eight of a row, of which it has four sums: those of its upper and
# its lower row.


@cute.jit
def load_row(values, first, row, left):
    """Columns that are among the `left`."""
    pointer = cute.make_ptr(Float32, row, cute.AddressSpace.gmem, assumed_align=8)
    for eight in cutlass.range_constexpr(COLUMNS // 8):
        if eight * 8 < left:
            two = cute.make_tensor(pointer + eight * 8, cute.make_layout(2)).load()
            values[first + eight * 4], values[first + eight * 4 + 1] = two[0], two[1]


@cute.jit
def put_wide(sums, first, row, left):
    """float32: four lanes write 32 bytes."""
    for eight in cutlass.range_constexpr(COLUMNS // 8):
        i = first + eight * 4
        store_two("f32", row + eight * 32, sums[i], sums[i + 1], eight * 8 < left)


@cute.jit
def put_narrow(sums, first, row, left):
    """bfloat16: two lanes exchange pairs of columns, so that each writes four of one eight, and
    four lanes 32 bytes."""
    words = cute.make_rmem_tensor((2, COLUMNS // 8), BFloat16)
    for eight in cutlass.range_constexpr(COLUMNS // 8):
        for v in cutlass.range_constexpr(2):
            words[v, eight] = sums[first + eight * 4 + v].to(BFloat16)
    words = cute.recast_tensor(words, Int32)
    odd = cute.arch.lane_idx() % 2
    row += odd * 12  # in the next eight, from its second four bytes to its first
    left -= odd * 6
    for eight in cutlass.range_constexpr(0, COLUMNS // 8, 2):
        here, there = words[eight], words[eight + 1]
        got = cute.arch.shuffle_sync_bfly(here if odd == 1 else there, 1)
        two = (got, there) if odd == 1 else (here, got)
        store_two("b32", row + eight * 16, *two, eight * 8 < left)


def store_two(kind, address, first, second, real):
    cute.arch.inline_ptx(
        f"st.global.v2.{kind} [{{$r0}}], {{{{$r1}}, {{$r2}}}};",
        read_only_args=[address, first, second],
        predicate=real,
    )
