# SPDX-License-Identifier: Apache-2.0
"""y[M, N] = act(x[M, K] @ w[N, K]^T + bias[N]) for large M: TMA, wgmma, persistent blocks.

Kinds: "extra" may add a residual[M, N], and also write the preactivation for the backward. "gated":
w[2N, K] has N rows of the gate, then N of up, and a tile has equally many of both: y = act(gate) *
up. "grad_x" and "grad_weight" are the products of the backward, with transposed operands: grad @ w
and grad^T @ x. float8 operands have scales per row of x and of w, and a bfloat16 result. "blocks":
block scales instead (linear_blocks_cute.py), and any activation; "gated_blocks": both.

One warp of the first warpgroup loads tiles of x and w into a ring of shared memory stages; two
warpgroups multiply. They either share a tile, half of its rows each, or alternate whole tiles
("pingpong"), so that one's epilogue runs while the other keeps the tensor cores busy. The two
blocks of a cluster work on tiles one below the other and multicast the tile of w.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from activations_cute import ACTIVATIONS
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from linear_blocks_cute import (
    BlockScales,
    activate,
    load_tile_scales,
    load_tile_scales_in_fours,
    multiply_steps,
    producer_group,
    stage_words,
)
from linear_layouts_cute import (
    EPI,
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

CONSUMERS = 2  # warpgroups

# Named barriers.
_WARPGROUP = 1  # and 2: within one consumer warpgroup
_TURN = 3  # and 4: whose turn it is to multiply


class LinearAct:
    def __init__(
        self,
        name,
        dtype,
        act,
        tile_m,
        tile_n,
        pingpong,
        cluster,
        stages,
        epi_stages,
        kind="plain",
    ):
        self.name = name
        self.dtype = dtype
        self.tile_k = ROW * 8 // dtype.width
        self.blocks = kind in ("blocks", "gated_blocks")
        self.scaled = dtype.width == 8 and not self.blocks
        self.out_dtype = cutlass.BFloat16 if dtype.width == 8 else dtype
        self.act = ACTIVATIONS[act]
        self.tile_m, self.tile_n = tile_m, tile_n
        self.pingpong = pingpong
        self.cluster = cluster
        self.stages = stages
        self.epi_stages = epi_stages
        self.majors = MAJORS.get(kind, ("k", "k"))
        # A product of the backward has no bias; one with scales of blocks has no memory for a list.
        self.lists_bias = not (kind in MAJORS or self.blocks)
        # Rows of w that lie together in a tile, and columns of the result that come of a tile.
        self.parts = 2 if kind in ("gated", "gated_blocks") else 1
        self.width = tile_n // self.parts
        self.piece = EPI if tile_n % EPI == 0 else 48  # columns that are stored together
        # Floats in shared memory of a tile's columns: biases, and scales.
        self.column_values = tile_n * (2 if self.scaled else 1)
        self.values = CONSUMERS * self.column_values
        if self.blocks:
            self.values = stages * stage_words(tile_m)  # scales of the ring's stages
        # Parts of a tile that are multiplied in turn, and the scales of w in a stage.
        self.parts_of_x, self.parts_of_w = 1, 2 if tile_n == 256 else 1
        # The orders of linear_blocks_cute.py that were measured to be fastest for these tiles.
        self.staggers = self.in_fours = self.blocks and tile_n in (144, 256)
        self.overlaps = self.blocks and tile_n == 192 and cluster > 1
        # Steps of w that are on their way to the L2 while the kernel before still runs.
        self.ahead = stages if self.blocks and tile_n == 144 else 0
        self.products = 1  # sets of sums of one part
        if self.overlaps:
            self.parts_of_w = self.products = 3
        self.scales_of_w = 1 if tile_n == 128 and self.parts == 1 else 2
        self.multicasts = cluster  # blocks that load parts of each other's tiles
        # Without an activation the result is its own sums.
        self.adds = kind == "extra"
        self.saves = self.adds and act != "none"
        self.threads = (1 + CONSUMERS) * WARPGROUP
        # Rows that one warpgroup multiplies, and how many share a tile.
        self.sharing = 1 if pingpong else CONSUMERS
        self.wg_rows = tile_m // self.sharing
        assert self.parts == 1 or tile_n % WARPGROUP == 0, "its biases are loaded by all threads"
        assert pingpong or self.wg_rows == EPI, "a shared tile gives each warpgroup 64 rows"

    def tiled_mma(self, warpgroups, columns):
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            *(OPERAND_MAJORS[major] for major in self.majors),
            Float32,
            (warpgroups, 1, 1),
            (64, columns),
        )

    def smem_layouts(self):
        """Staged layouts of x, w and the output's pieces."""
        return (
            swizzled(self.dtype, self.tile_m, self.tile_k, self.stages, self.majors[0]),
            swizzled(self.dtype, self.tile_n, self.tile_k, self.stages, self.majors[1]),
            swizzled(self.out_dtype, EPI, self.piece, CONSUMERS * self.epi_stages),
        )

    def storage(self):
        x_layout, w_layout, y_layout = self.smem_layouts()

        @cute.struct
        class Storage:
            x: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]
            y: cute.struct.Align[cute.struct.MemRange[self.out_dtype, cute.cosize(y_layout)], 1024]
            bias: cute.struct.Align[cute.struct.MemRange[Float32, self.values], 16]
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]

        return Storage

    def smem_bytes(self):
        """What the storage takes, as the launch asks for it."""
        ring = self.stages * ((self.tile_m + self.tile_n) * ROW + 16)
        return round_up(ring + CONSUMERS * self.epi_stages * EPI * self.piece * 2 + self.values * 4)

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
        group: Int32,
        save: Int32,
        x_step: Int32,
        w_step: Int32,
        *more,
    ):
        *of_blocks, blocks, stream = more
        n8 = cute.assume(n, divby=8)
        x_layout, w_layout, y_layout = self.smem_layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        multicast = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else load
        tma_x, _ = cpasync.make_tiled_tma_atom(
            load,
            cute.make_tensor(x, matrix(m, k, self.majors[0], self.tile_k // 8)),
            cute.slice_(x_layout, (None, None, 0)),
            (self.tile_m, self.tile_k),
        )
        tma_w, _ = cpasync.make_tiled_tma_atom(
            multicast,
            cute.make_tensor(w, matrix(n * self.parts, k, self.majors[1], self.tile_k // 8)),
            cute.slice_(
                cute.flat_divide(w_layout, (self.width, self.tile_k)), (None, None, 0, 0, 0)
            ),
            (self.width, self.tile_k),
            num_multicast=self.cluster,
        )
        tma_y, _ = self.store_of(y, m, n8, y_layout)
        tma_sums, _ = self.store_of(sums, m, n8, y_layout)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            *(tma_x, tma_w, tma_y, tma_sums, bias, residual, x_scale, w_scale),
            *(m, n, k, group, save, x_step, w_step),
            BlockScales(*of_blocks) if const_expr(self.blocks) else None,
        ).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def store_of(self, tensor, m, n8, layout):
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            cute.make_tensor(tensor, cute.make_layout((m, n8), stride=(n8, 1))),
            cute.slice_(layout, (None, None, 0)),
            (EPI, self.piece),
        )

    @cute.kernel
    def kernel(
        self,
        tma_x: cute.CopyAtom,
        tma_w: cute.CopyAtom,
        tma_y: cute.CopyAtom,
        tma_sums: cute.CopyAtom,
        bias: cute.Pointer,
        residual: cute.Pointer,
        x_scale: cute.Pointer,
        w_scale: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        group: Int32,
        save: Int32,  # the sums too
        x_step: Int32,  # of scales: 0 for one of all
        w_step: Int32,
        of_blocks: BlockScales | None,
    ):
        x_layout, w_layout, y_layout = self.smem_layouts()
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_x)
            cpasync.prefetch_descriptor(tma_w)
            cpasync.prefetch_descriptor(tma_y)

        storage = cutlass.utils.SmemAllocator().allocate(self.storage())
        sx = storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        sw = storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        sy = storage.y.get_tensor(y_layout.outer, swizzle=y_layout.inner)
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=producer_group(self),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, 4 * self.sharing * self.cluster
            ),
            tx_count=(self.tile_m + self.tile_n) * ROW,
            cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.cluster, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(self.cluster, 1))
        if const_expr(self.ahead > 0):
            if warp_index == 0:
                _, early = copies_of_w(self, tma_w, sw, n, k)
                _, column = tile_position(
                    cute.arch.block_idx()[0],
                    cute.ceil_div(m, self.tile_m),
                    cute.ceil_div(n, self.width),
                    group,
                )
                steps = cutlass.min(self.ahead, cute.ceil_div(k, self.tile_k))
                for step in cutlass.range(steps, unroll=1):
                    with cute.arch.elect_one():
                        cute.prefetch(tma_w, early[0][None, column, step])
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # A cluster's tiles: every clusters-th one from its own index on.
        clusters = cute.arch.grid_dim()[0] // self.cluster
        first = cute.arch.block_idx()[0] // self.cluster
        rows = cute.ceil_div(m, self.tile_m * self.cluster)
        columns = cute.ceil_div(n, self.width)
        k_tiles = cute.ceil_div(k, self.tile_k)

        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(24 if self.pingpong else 40)
            if warp_index == 0:
                gx = coordinates(m, k, self.majors[0])
                gx = cute.local_tile(gx, (self.tile_m, self.tile_k), (None, None))
                to_x, from_x = cpasync.tma_partition(
                    tma_x,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(sx, 0, 2),
                    cute.group_modes(gx, 0, 2),
                )
                to_w, from_w = copies_of_w(self, tma_w, sw, n, k, rank, self.cluster)
                everyone = cutlass.Int16((1 << self.cluster) - 1)  # unused without multicast
                state = pipeline.make_pipeline_state(
                    pipeline.PipelineUserType.Producer, self.stages
                )
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
                        for part in cutlass.range_constexpr(self.parts):
                            cute.copy(
                                tma_w,
                                from_w[part][None, column, step],
                                to_w[part][None, state.index],
                                tma_bar_ptr=barrier,
                                mcast_mask=everyone,
                            )
                        state.advance()
                ring.producer_tail(state)
            if const_expr(self.blocks):
                if warp_index >= 1 and warp_index <= (2 if self.in_fours else 1):
                    state = pipeline.make_pipeline_state(
                        pipeline.PipelineUserType.Producer, self.stages
                    )
                    for tile in cutlass.range(first, rows * columns, clusters, unroll=1):
                        row, column = tile_position(tile, rows, columns, group)
                        row = row * self.cluster + rank
                        load = load_tile_scales
                        if const_expr(self.in_fours):
                            load = load_tile_scales_in_fours
                        state = load(
                            *(self, ring, state, (0, k_tiles), storage.bias.data_ptr()),
                            *((x_scale, w_scale, x_step, w_step), (m, n, of_blocks.across)),
                            *(row * self.tile_m, column * self.width),
                        )
        else:
            cute.arch.setmaxregister_increase(240 if self.pingpong else 232)
            consumer = warpgroup_index - 1
            lane = thread % 32
            wg_thread = thread % WARPGROUP
            wide = self.tile_n // (self.parts_of_w if const_expr(self.blocks) else 1)
            mma = self.tiled_mma(self.sharing, wide)
            part = mma.get_slice(0 if const_expr(self.pingpong) else consumer * WARPGROUP)
            rx = mma.make_fragment_A(part.partition_A(sx))
            rw = mma.make_fragment_B(part.partition_B(sw))
            acc = cute.make_rmem_tensor(mma.partition_shape_C((self.tile_m, self.tile_n)), Float32)
            if const_expr(self.blocks):
                halves = swizzled(
                    self.dtype, wide, self.tile_k, self.stages * self.parts_of_w, self.majors[1]
                )
                halves = storage.w.get_tensor(halves.outer, swizzle=halves.inner)
                rw = mma.make_fragment_B(part.partition_B(halves))
                start = self.tiled_mma(self.sharing, wide)
                start.set(warpgroup.Field.ACCUMULATE, False)
                mma.set(warpgroup.Field.ACCUMULATE, True)
                shape = mma.partition_shape_C((self.tile_m, wide))
                products = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.products)]

            # The output's way: registers, stmatrix, a 64x64 piece in shared memory, TMA store.
            epi_mma = hopper.make_trivial_tiled_mma(
                self.out_dtype,
                self.out_dtype,
                warpgroup.OperandMajorMode.K,
                warpgroup.OperandMajorMode.K,
                Float32,
                (1, 1, 1),
                (64, self.piece),
            )
            stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.out_dtype)
            r2s = cute.make_tiled_copy_S(stmatrix, cute.make_tiled_copy_C_atom(stmatrix, epi_mma))
            to_sy = r2s.get_slice(wg_thread).partition_D(sy)
            piece = cute.make_rmem_tensor(to_sy.shape[:3], self.out_dtype)
            gy = cute.zipped_divide(coordinates(m, n), (EPI, self.piece))
            from_sy, to_y = cpasync.tma_partition(
                tma_y, 0, cute.make_layout(1), cute.group_modes(sy, 0, 2), gy
            )
            values = cute.size(piece)

            if const_expr(self.saves):
                from_sums, to_sums = cpasync.tma_partition(
                    tma_sums, 0, cute.make_layout(1), cute.group_modes(sy, 0, 2), gy
                )
            out = ((r2s, piece, to_sy), consumer, warp_index)
            added = cute.make_rmem_tensor(values, self.out_dtype)
            added.fill(0.0)

            sbias = cute.make_tensor(
                storage.bias.data_ptr() + consumer * self.column_values,
                cute.make_layout(self.column_values),
            )
            # This thread's two columns in each group of eight.
            my_bias = cute.make_tensor(
                (storage.bias.data_ptr() + consumer * self.column_values + lane % 4 * 2).align(8),
                cute.make_layout((2, self.tile_n // 8), stride=(1, 8)),
            )
            if const_expr(self.scaled):
                my_scales = cute.make_tensor(
                    (my_bias.iterator + self.tile_n).align(8), my_bias.layout
                )
            loads = (self.tile_n + WARPGROUP - 1) // WARPGROUP
            bias_values = cute.make_rmem_tensor(loads, Float32)
            scale_values = cute.make_rmem_tensor(loads, Float32)

            # Turns: which tiles are mine, and where in the ring their first stage is.
            turn = consumer if const_expr(self.pingpong) else Int32(0)
            every = CONSUMERS if const_expr(self.pingpong) else 1
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            if const_expr(self.pingpong):
                if consumer == 1:
                    read.advance(k_tiles)
                    _arrive(_TURN + 0, 2 * WARPGROUP)
            stored = Int32(0)

            for tile in cutlass.range(
                first + turn * clusters, rows * columns, clusters * every, unroll=1
            ):
                row, column = tile_position(tile, rows, columns, group)
                row = row * self.cluster + rank
                for i in cutlass.range_constexpr(loads if self.lists_bias else 0):
                    in_tile = wg_thread + i * WARPGROUP
                    part_of_w = in_tile // self.width if const_expr(self.parts == 2) else 0
                    at = column * self.width + in_tile - part_of_w * self.width
                    bias_values[i] = 0.0
                    if bias.toint() != 0:
                        if at < n:
                            bias_values[i] = (bias + part_of_w * n + at).load().to(Float32)
                    if const_expr(self.scaled):
                        scale_values[i] = 0.0
                        if at < n:
                            scale_values[i] = (w_scale + (part_of_w * n + at) * w_step).load()

                if const_expr(self.pingpong):
                    _sync(_TURN + consumer, 2 * WARPGROUP)
                if const_expr(self.blocks):
                    acc.fill(0.0)
                    my_row = consumer * EPI + wg_thread // 32 * 16 + lane // 4
                    read = multiply_steps(
                        *(self, ring, read, k_tiles, (start, mma), products, acc),
                        *((rx, rw), storage.bias.data_ptr()),
                        (my_row, column * self.tile_n, consumer),
                    )
                else:
                    release = read.clone()
                    warpgroup.fence()
                    ring.consumer_wait(read)
                    for block in cutlass.range_constexpr(ROW // 32):
                        mma.set(warpgroup.Field.ACCUMULATE, block != 0)
                        at = (None, None, block, read.index)
                        cute.gemm(mma, acc, rx[at], rw[at], acc)
                    warpgroup.commit_group()
                    read.advance()
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                    for _ in cutlass.range(k_tiles - 1, unroll=1):
                        ring.consumer_wait(read)
                        for block in cutlass.range_constexpr(ROW // 32):
                            at = (None, None, block, read.index)
                            cute.gemm(mma, acc, rx[at], rw[at], acc)
                        warpgroup.commit_group()
                        warpgroup.wait_group(1)
                        ring.consumer_release(release)
                        release.advance()
                        read.advance()
                if const_expr(self.pingpong):
                    _arrive(_TURN + 1 - consumer, 2 * WARPGROUP)
                    read.advance(k_tiles)
                for i in cutlass.range_constexpr(loads if self.lists_bias else 0):
                    in_tile = wg_thread + i * WARPGROUP
                    if const_expr(self.tile_n % WARPGROUP == 0) or in_tile < self.tile_n:
                        sbias[in_tile] = bias_values[i]
                        if const_expr(self.scaled):
                            sbias[in_tile + self.tile_n] = scale_values[i]
                if const_expr(self.lists_bias):
                    _sync(_WARPGROUP + consumer, WARPGROUP)
                if const_expr(not self.blocks):
                    warpgroup.wait_group(0)
                    ring.consumer_release(release)

                for half in cutlass.range_constexpr(self.wg_rows // EPI):
                    for chunk in cutlass.range_constexpr(self.width // self.piece):
                        block_row = row * (self.tile_m // EPI) + half
                        if const_expr(not self.pingpong):
                            block_row += consumer * (self.wg_rows // EPI)
                        place = (block_row, column * (self.width // self.piece) + chunk)
                        first_value = half * (self.tile_n // 2) + chunk * values
                        if const_expr(self.adds):
                            if residual.toint() != 0:
                                self.load_piece(added, residual, place, wg_thread, m, n)
                        if const_expr(self.scaled):
                            row_scales = self.scales_of(place[0], x_scale, x_step, wg_thread, m)
                        if const_expr(self.lists_bias):
                            for p in cutlass.range_constexpr(self.parts):
                                for eight in cutlass.range_constexpr(EPI // 8):
                                    group_of_eight = (p * self.width + chunk * EPI) // 8 + eight
                                    b = my_bias[None, group_of_eight].load()
                                    for v in cutlass.range_constexpr(4):
                                        i = first_value + p * (self.width // 2) + eight * 4 + v
                                        if const_expr(self.scaled):
                                            scale = my_scales[None, group_of_eight].load()[v % 2]
                                            acc[i] *= row_scales[v // 2] * scale
                                        acc[i] += b[v % 2]
                        if const_expr(self.blocks):
                            at = place[1] * self.piece + lane % 4 * 2
                            for p in cutlass.range_constexpr(self.parts):
                                of_part = first_value + p * (self.width // 2)
                                add_bias(acc, of_part, values, bias, at, n, p)
                            activate(of_blocks.activation, acc, first_value, values)
                        if const_expr(self.saves):
                            if save != 0:
                                for i in cutlass.range_constexpr(values):
                                    piece[i] = acc[first_value + i].to(self.out_dtype)
                                self.store(out, stored, tma_sums, from_sums, to_sums, place)
                                stored += 1
                        for i in cutlass.range_constexpr(values):
                            value = self.act(acc[first_value + i])
                            if const_expr(self.parts == 2):
                                value = value * acc[first_value + self.width // 2 + i]
                            if const_expr(self.adds):
                                value = value + added[i].to(Float32)
                            piece[i] = value.to(self.out_dtype)
                        self.store(out, stored, tma_y, from_sy, to_y, place)
                        stored += 1
            if warp_index % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store(self, out, stored, tma, pieces, to, place):
        """The values in `piece`, through the next buffer in shared memory and the copy engine."""
        (r2s, piece, to_sy), consumer, warp_index = out
        buffer = consumer * self.epi_stages + stored % self.epi_stages
        if warp_index % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(self.epi_stages - 1, read=True)
        _sync(_WARPGROUP + consumer, WARPGROUP)
        cute.copy(r2s, piece, to_sy[None, None, None, buffer])
        cute.arch.fence_proxy("async.shared", space="cta")
        _sync(_WARPGROUP + consumer, WARPGROUP)
        if warp_index % 4 == 0:
            cute.copy(tma, pieces[None, buffer], to[None, place])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def scales_of(self, block_row, x_scale, step, thread, m):
        """Of this thread's two rows of a piece; those beyond the last row have its."""
        row = block_row * EPI + thread // 32 * 16 + thread % 32 // 4
        return [(x_scale + cutlass.min(row + half, m - 1) * step).load() for half in (0, 8)]

    @cute.jit
    def load_piece(self, values, source, place, thread, m, n):
        """This thread's part of a piece of source[m, n], as the products' sums are spread."""
        row = place[0] * EPI + thread // 32 * 16 + thread % 32 // 4
        column = place[1] * EPI + thread % 4 * 2
        for half in cutlass.range_constexpr(2):
            at = source + (cutlass.Int64(row + half * 8) * n + column)
            for eight in cutlass.range_constexpr(EPI // 8):
                if row + half * 8 < m:
                    if column + eight * 8 < n:
                        two = cute.make_tensor((at + eight * 8).align(4), cute.make_layout(2))
                        values[eight * 4 + half * 2] = two[0]
                        values[eight * 4 + half * 2 + 1] = two[1]


@cute.jit
def add_bias(sums, first, count, bias, column, n, part=0):
    """To this thread's part of a piece, whose first column is that one; `part`: n biases each."""
    if bias.toint() != 0:
        for eight in cutlass.range_constexpr(count // 4):
            if column + eight * 8 < n:
                at = (bias + (part * n + column + eight * 8)).align(4)
                two = cute.make_tensor(at, cute.make_layout(2)).load().to(Float32)
                for v in cutlass.range_constexpr(4):
                    sums[first + eight * 4 + v] += two[v % 2]


def _sync(barrier, threads):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def _arrive(barrier, threads):
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)


@cute.jit
def tile_position(tile, rows, columns, group):
    """Row and column of tile number `tile`: bands of `group` rows, down the columns in a band."""
    band = tile // (group * columns)
    height = cutlass.min(rows - band * group, group)
    within = tile - band * group * columns
    column = within // height
    return band * group + within - column * height, column
