# SPDX-License-Identifier: Apache-2.0
"""y[M, N] = act(x[M, K] @ w[N, K]^T + bias[N]) for small M, bound by reading w.

Split-K within a cluster: its blocks share one tile of the output, with a slice of K each. Each adds
up a share of the tile's rows, whose partial sums the others send to it: no workspace, no second
kernel, no fence. One warp loads, one warpgroup multiplies. A tile may have fewer rows than the
instruction, so that M divides evenly: garbage in the others only affects rows of the product that
are not read.

Kinds ("plain", "gated", "grad_x", "blocks", "gated_blocks"), residual and sums are those of
linear_act_cute.py.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from activations_cute import ACTIVATIONS
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from linear_blocks_cute import (
    BlockScales,
    activate,
    load_tile_scales,
    multiply_few_rows,
    producer_group,
    stage_words,
)
from linear_layouts_cute import (
    MAJORS,
    OPERAND_MAJORS,
    ROW,
    WARPGROUP,
    coordinates,
    copies_of_w,
    matrix,
    round_up,
    swizzled,
)

VECTOR = 4  # columns that a thread reduces at a time
ROWS = 4  # that a thread reduces at a time: their loads are on the way together
AHEAD = 4  # steps of w that are on their way to the L2 while the kernel before still runs
MOST_SPLITS = 8  # as linear_act_choose.cc has it: kMaxSplits
PAD = 8  # floats a row, so that a warp's stores of partial sums meet no bank twice


class LinearActSplitK:
    def __init__(self, name, dtype, act, tile_m, tile_n, stages, kind="plain"):
        self.name = name
        self.dtype = dtype
        self.tile_k = ROW * 8 // dtype.width
        self.blocks = kind in ("blocks", "gated_blocks")
        self.scaled = dtype.width == 8 and not self.blocks
        self.out_dtype = cutlass.BFloat16 if dtype.width == 8 else dtype
        self.act = ACTIVATIONS[act]
        self.tile_m, self.tile_n = tile_m, tile_n
        self.stages = stages
        self.majors = MAJORS.get(kind, ("k", "k"))
        self.parts = 2 if kind in ("gated", "gated_blocks") else 1
        self.width = tile_n // self.parts
        self.parts_of_x, self.parts_of_w = tile_m // 64, 1  # as of LinearAct
        self.overlaps = self.in_fours = False
        self.scales_of_w = 1 if 128 % self.width == 0 and self.parts == 1 else 2
        two = self.blocks and self.scales_of_w == 2
        assert not (two and tile_m > 64), "two scales of w, or rows of two parts"
        self.scale_words = stages * stage_words(tile_m) // 2 * self.blocks
        self.threads = 2 * WARPGROUP
        # How the threads add up a tile: vectors of a row side by side, rows below each other.
        self.vectors = self.width // VECTOR
        self.below = self.threads // self.vectors
        self.at_once = min(ROWS // self.parts, -(-tile_m // self.below))

    def tiled_mma(self):
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            *(OPERAND_MAJORS[major] for major in self.majors),
            Float32,
            (1, 1, 1),
            (64, self.tile_n),
        )

    def smem_layouts(self):
        return (
            swizzled(self.dtype, self.tile_m, self.tile_k, self.stages),
            swizzled(self.dtype, self.tile_n, self.tile_k, self.stages, self.majors[1]),
        )

    def storage(self):
        x_layout, w_layout = self.smem_layouts()

        @cute.struct
        class Storage:
            # Also the partial sums, once the rings are drained.
            x: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            # One barrier, and behind it the stages' scales.
            received: cute.struct.MemRange[cutlass.Int64, 1 + self.scale_words]

        return Storage

    def smem_bytes(self):
        """What the storage takes, as the launch asks for it."""
        ring = self.stages * (self.tile_m + self.tile_n) * ROW
        # Of all rows, and of those that fill up the last block's share.
        sums = (self.tile_m + MOST_SPLITS - 1) * (self.tile_n + PAD)
        assert ring >= sums * 4, "no room for the partial sums"
        return round_up(ring + self.stages * 16 + 8 + self.scale_words * 8)

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        w: cute.Pointer,
        bias: cute.Pointer,
        residual: cute.Pointer,
        x_scale: cute.Pointer,
        w_scale: cute.Pointer,
        y: cute.Pointer,
        sums: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        rows: Int32,
        x_step: Int32,
        w_step: Int32,
        splits: Int32,
        *more,
    ):
        *of_blocks, blocks, stream = more
        x_layout, w_layout = self.smem_layouts()
        tma_x, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cute.make_tensor(x, matrix(m, k, "k", self.tile_k // 8)),
            cute.slice_(x_layout, (None, None, 0)),
            (self.tile_m, self.tile_k),
        )
        tma_w, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cute.make_tensor(w, matrix(n * self.parts, k, self.majors[1], self.tile_k // 8)),
            cute.slice_(
                cute.flat_divide(w_layout, (self.width, self.tile_k)), (None, None, 0, 0, 0)
            ),
            (self.width, self.tile_k),
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            *(tma_x, tma_w, bias, residual, x_scale, w_scale, y, sums),
            *(m, n, k, rows, x_step, w_step),
            BlockScales(*of_blocks) if const_expr(self.blocks) else None,
        ).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(splits, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_x: cute.CopyAtom,
        tma_w: cute.CopyAtom,
        bias: cute.Pointer,
        residual: cute.Pointer,
        x_scale: cute.Pointer,
        w_scale: cute.Pointer,
        y: cute.Pointer,
        sums: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        rows: Int32,  # of a tile
        x_step: Int32,  # of scales: 0 for one of all
        w_step: Int32,
        of_blocks: BlockScales | None,
    ):
        x_layout, w_layout = self.smem_layouts()
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        splits = cute.arch.cluster_size()
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_x)
            cpasync.prefetch_descriptor(tma_w)

        storage = cutlass.utils.SmemAllocator().allocate(self.storage())
        sx = storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        sw = storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        received = storage.received.data_ptr()
        stage_scales = cute.recast_ptr(received + 1, dtype=Float32)
        if thread == 0:
            cute.arch.mbarrier_init(received, 5)  # warps: the loader and those that multiply
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=producer_group(self),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4),
            tx_count=self.tile_n * ROW,  # w's; the loader adds x's
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )

        # My tile of the output and my slice of K, which may be empty.
        tile = cute.arch.block_idx()[0] // splits
        columns = cute.ceil_div(n, self.width)
        row = tile // columns
        column = tile - row * columns
        k_tiles = cute.ceil_div(k, self.tile_k)
        share = cute.ceil_div(k_tiles, splits)
        first = rank * share
        last = cutlass.min(first + share, k_tiles)

        # Should the kernel before write w, its writes go to the L2 too: this is no read.
        to_w, from_w = copies_of_w(self, tma_w, sw, n, k)
        if warp_index == 0:
            for step in cutlass.range(first, cutlass.min(first + AHEAD, last), unroll=1):
                with cute.arch.elect_one():
                    for part in cutlass.range_constexpr(self.parts):
                        cute.prefetch(tma_w, from_w[part][None, column, step])
        # Of the columns that this thread adds up.
        in_column = thread % self.vectors * VECTOR
        my_column = column * self.width + in_column
        in_tile = thread < self.below * self.vectors and my_column < n
        if thread < self.vectors and in_tile:
            if bias.toint() != 0:
                for p in cutlass.range_constexpr(self.parts):
                    _prefetch(bias + p * n + my_column)
        cute.arch.griddepcontrol_wait()

        biases = cute.make_rmem_tensor((VECTOR, self.parts), self.out_dtype)
        biases.fill(0.0)
        scales = cute.make_rmem_tensor((VECTOR, self.parts), Float32)
        beside = (biases, scales, bias, w_scale, n, my_column, w_step)

        # The blocks add up a share of the tile's rows each: this is where their sums arrive.
        pitch = self.tile_n + PAD
        partials = cute.recast_ptr(storage.x.data_ptr(), dtype=Float32)
        share_of_rows = cute.ceil_div(rows, splits)
        slot = share_of_rows * pitch  # of one block's sums
        first_row = rank * share_of_rows
        valid_rows = cutlass.min(m - row * rows, rows)
        my_rows = cutlass.max(cutlass.min(valid_rows - first_row, share_of_rows), 0)

        if warp_index == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    received, my_rows * (splits - 1) * (self.tile_n * 4)
                )
            mine = cute.domain_offset((row * rows, 0), coordinates(m, k))
            gx = cute.local_tile(mine, (self.tile_m, self.tile_k), (0, None))
            one = cute.make_layout(1)
            to_x, from_x = cpasync.tma_partition(
                tma_x, 0, one, cute.group_modes(sx, 0, 2), cute.group_modes(gx, 0, 2)
            )
            write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
            for step in cutlass.range(first, last, unroll=1):
                ring.producer_acquire(write)
                barrier = ring.producer_get_barrier(write)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_expect_tx(barrier, rows * ROW)
                for part in cutlass.range_constexpr(self.parts):
                    cute.copy(
                        tma_w,
                        from_w[part][None, column, step],
                        to_w[part][None, write.index],
                        tma_bar_ptr=barrier,
                    )
                cute.copy(tma_x, from_x[None, step], to_x[None, write.index], tma_bar_ptr=barrier)
                write.advance()
            # Late: what the next kernel brings to the L2 would be in the way of these loads.
            cute.arch.griddepcontrol_launch_dependents()
            # Not before the loop, which would wait for it.
            if in_tile:
                self.load_beside(*beside)
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        elif warp_index >= 4:
            if in_tile:
                self.load_beside(*beside)
            mma = self.tiled_mma()
            part = mma.get_slice(thread - WARPGROUP)
            rx = mma.make_fragment_A(part.partition_A(sx))
            rw = mma.make_fragment_B(part.partition_B(sw))
            acc = cute.make_rmem_tensor(mma.partition_shape_C((self.tile_m, self.tile_n)), Float32)
            acc.fill(0.0)
            mma.set(warpgroup.Field.ACCUMULATE, True)
            if const_expr(self.blocks):
                halves = swizzled(self.dtype, 64, self.tile_k, self.stages * self.parts_of_x)
                halves = storage.x.get_tensor(halves.outer, swizzle=halves.inner)
                rx = mma.make_fragment_A(part.partition_A(halves))
                start = self.tiled_mma()
                start.set(warpgroup.Field.ACCUMULATE, False)
                shape = mma.partition_shape_C((64, self.tile_n))
                products = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.parts_of_x)]
                my_row = (warp_index - 4) * 16 + thread % 32 // 4
                if last > first:
                    read = pipeline.make_pipeline_state(
                        pipeline.PipelineUserType.Consumer, self.stages
                    )
                    multiply_few_rows(
                        *(self, ring, read, last - first, (start, mma)),
                        *((products[0], products[-1]), acc, (rx, rw), stage_scales),
                        (my_row, column * self.width),
                    )
            else:
                read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
                release = read.clone()
                warpgroup.fence()
                for step in cutlass.range(first, last, unroll=1):
                    ring.consumer_wait(read)
                    for block in cutlass.range_constexpr(ROW // 32):
                        at = (None, None, block, read.index)
                        cute.gemm(mma, acc, rx[at], rw[at], acc)
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    if step > first:
                        ring.consumer_release(release)
                        release.advance()
                    read.advance()
                warpgroup.wait_group(0)
            # All blocks have begun, and are done with the memory where their sums arrive.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
            self.send(
                *(acc, rank, slot, pitch, share_of_rows, valid_rows),
                *(partials, received, (warp_index - 4) * 16, thread % 32),
            )
        else:
            if const_expr(self.blocks):
                if warp_index == 1:
                    write = pipeline.make_pipeline_state(
                        pipeline.PipelineUserType.Producer, self.stages
                    )
                    load_tile_scales(
                        *(self, ring, write, (first, last), stage_scales),
                        *((x_scale, w_scale, x_step, w_step), (m, n, of_blocks.across)),
                        *(row * rows, column * self.width),
                    )
            if in_tile:
                self.load_beside(*beside)
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        cute.arch.mbarrier_wait(received, 0)

        if in_tile:
            layout = cute.make_layout(VECTOR)
            totals = cute.make_rmem_tensor((VECTOR, self.parts, self.at_once), Float32)
            added = cute.make_rmem_tensor((VECTOR, self.at_once), self.out_dtype)
            out = cute.make_rmem_tensor(layout, self.out_dtype)
            for top in cutlass.range(
                thread // self.vectors, my_rows, self.below * self.at_once, unroll=1
            ):
                totals.fill(0.0)
                added.fill(0.0)
                # All loads before their first use; rows beyond the last one repeat it.
                turns = [
                    cutlass.min(top + u * self.below, my_rows - 1) for u in range(self.at_once)
                ]
                rows_of_x = [row * rows + first_row + turn for turn in turns]
                offsets = [cutlass.Int64(r) * n + my_column for r in rows_of_x]
                places = [
                    partials + (turn * pitch + p * self.width + in_column)
                    for turn in turns
                    for p in range(self.parts)
                ]
                if const_expr(self.parts == 1):
                    if residual.toint() != 0:
                        for u in cutlass.range_constexpr(self.at_once):
                            theirs = cute.make_tensor((residual + offsets[u]).align(8), layout)
                            for v in cutlass.range_constexpr(VECTOR):
                                added[v, u] = theirs[v]
                for peer in cutlass.range(splits, unroll=1):
                    loaded = [
                        cute.make_tensor((place + peer * slot).align(16), layout).load()
                        for place in places
                    ]
                    for u in cutlass.range_constexpr(self.at_once):
                        for p in cutlass.range_constexpr(self.parts):
                            for v in cutlass.range_constexpr(VECTOR):
                                totals[v, p, u] += loaded[u * self.parts + p][v]
                for u in cutlass.range_constexpr(self.at_once):
                    if const_expr(self.scaled):
                        of_row = (x_scale + rows_of_x[u] * x_step).load()
                    for p in cutlass.range_constexpr(self.parts):
                        for v in cutlass.range_constexpr(VECTOR):
                            if const_expr(self.scaled):
                                totals[v, p, u] *= of_row * scales[v, p]
                            totals[v, p, u] += biases[v, p].to(Float32)
                    if const_expr(self.blocks):
                        activate(of_blocks.activation, totals, u * VECTOR * self.parts, VECTOR)
                    if top + u * self.below < my_rows:
                        if const_expr(self.parts == 1):
                            if sums.toint() != 0:
                                for v in cutlass.range_constexpr(VECTOR):
                                    out[v] = totals[v, 0, u].to(self.out_dtype)
                                cute.make_tensor((sums + offsets[u]).align(8), layout).store(
                                    out.load()
                                )
                        for v in cutlass.range_constexpr(VECTOR):
                            value = self.act(totals[v, 0, u])
                            if const_expr(self.parts == 2):
                                value *= totals[v, 1, u]
                            else:
                                value += added[v, u].to(Float32)
                            out[v] = value.to(self.out_dtype)
                        cute.make_tensor((y + offsets[u]).align(8), layout).store(out.load())

    @cute.jit
    def send(
        self, acc, rank, slot, pitch, share_of_rows, valid_rows, partials, received, top, lane
    ):
        """The rows of partial sums to the blocks that add them up, and word of its own."""
        for half in cutlass.range_constexpr(self.tile_m // 32):
            of_tile = half // 2 * 64 + top + half % 2 * 8 + lane // 4
            if of_tile < valid_rows:
                owner = of_tile // share_of_rows
                row = of_tile - owner * share_of_rows
                place = partials + (rank * slot + row * pitch + lane % 4 * 2)
                pairs = [
                    [acc[(c, half % 2, eight), half // 2, 0] for c in range(2)]
                    for eight in range(self.tile_n // 8)
                ]
                if owner == rank:
                    for eight in cutlass.range_constexpr(self.tile_n // 8):
                        here = (place + eight * 8).align(8)
                        two = cute.make_tensor(here, cute.make_layout(2))
                        two[0], two[1] = pairs[eight]
                else:
                    there = cute.arch.map_dsmem_ptr(place, owner).toint()
                    counter = cute.arch.map_dsmem_ptr(received, owner).toint()
                    for eight in cutlass.range_constexpr(self.tile_n // 8):
                        _send(there + eight * 32, pairs[eight], counter)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(received)

    @cute.jit
    def load_beside(self, biases, scales, bias, w_scale, n, column, w_step):
        """What there is for the columns that a thread adds up."""
        for p in cutlass.range_constexpr(self.parts):
            if bias.toint() != 0:
                of_bias = (bias + p * n + column).align(8)
                theirs = cute.make_tensor(of_bias, cute.make_layout(VECTOR))
                for v in cutlass.range_constexpr(VECTOR):
                    biases[v, p] = theirs[v]
            if const_expr(self.scaled):
                for v in cutlass.range_constexpr(VECTOR):
                    scales[v, p] = (w_scale + (p * n + column + v) * w_step).load()


def _prefetch(pointer):
    """To the L2, where all writes of the kernel before meet: this is no read."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[pointer.toint()])


def _send(place, pair, counter):
    """Two floats to another block of the cluster, counted there."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
        " [{$r0}], {{$r1}, {$r2}}, [{$r3}];",
        read_only_args=[place, *pair, counter],
    )
