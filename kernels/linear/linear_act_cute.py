# SPDX-License-Identifier: Apache-2.0
"""y[M, N] = act(x[M, K] @ w[N, K]^T + bias[N]) for large M: TMA, wgmma, persistent blocks.

One warp of the first warpgroup loads tiles of x and w into a ring of shared memory stages; two
warpgroups multiply. They either share a tile, a half of its rows each, or take turns with whole
tiles ("pingpong"), so that one's epilogue runs while the other keeps the tensor cores busy. The
two blocks of a cluster work on tiles one below the other and multicast the tile of w.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from activations_cute import ACTIVATIONS
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

TILE_K = 64  # elements: one 128-byte swizzle row
EPI = 64  # rows and columns of one store
WARPGROUP = 128
CONSUMERS = 2

# Named barriers.
_WARPGROUP = 1  # and 2: within one consumer warpgroup
_TURN = 3  # and 4: whose turn it is to multiply


class LinearAct:
    def __init__(self, name, dtype, act, tile_m, tile_n, pingpong, cluster, stages, epi_stages):
        self.name = name
        self.dtype = dtype
        self.act = ACTIVATIONS[act]
        self.tile_m, self.tile_n = tile_m, tile_n
        self.pingpong = pingpong
        self.cluster = cluster
        self.stages = stages
        self.epi_stages = epi_stages
        self.threads = (1 + CONSUMERS) * WARPGROUP
        # Rows that one warpgroup multiplies, and how many share a tile.
        self.sharing = 1 if pingpong else CONSUMERS
        self.wg_rows = tile_m // self.sharing
        assert pingpong or self.wg_rows == EPI, "a shared tile gives each warpgroup 64 rows"

    def tiled_mma(self, warpgroups):
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            (warpgroups, 1, 1),
            (64, self.tile_n),
        )

    def smem_layouts(self):
        """Staged layouts of x, w and the output's pieces, all in 128-byte swizzle."""

        def layout(rows, columns, stages):
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
            return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))

        return (
            layout(self.tile_m, TILE_K, self.stages),
            layout(self.tile_n, TILE_K, self.stages),
            layout(EPI, EPI, CONSUMERS * self.epi_stages),
        )

    def storage(self):
        x_layout, w_layout, y_layout = self.smem_layouts()

        @cute.struct
        class Storage:
            x: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]
            y: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(y_layout)], 1024]
            bias: cute.struct.Align[cute.struct.MemRange[Float32, CONSUMERS * self.tile_n], 16]
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]

        return Storage

    def smem_bytes(self):
        """What the storage takes, as the launch asks for it."""
        ring = self.stages * ((self.tile_m + self.tile_n) * TILE_K * 2 + 16)
        return round_up(ring + CONSUMERS * (self.epi_stages * EPI * EPI * 2 + self.tile_n * 4))

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        w: cute.Pointer,
        bias: cute.Pointer,
        y: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        group: Int32,
        blocks: Int32,
        stream,
    ):
        n8, k8 = cute.assume(n, divby=8), cute.assume(k, divby=8)
        x_layout, w_layout, y_layout = self.smem_layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        multicast = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else load
        tma_x, _ = cpasync.make_tiled_tma_atom(
            load,
            cute.make_tensor(x, cute.make_layout((m, k8), stride=(k8, 1))),
            cute.slice_(x_layout, (None, None, 0)),
            (self.tile_m, TILE_K),
        )
        tma_w, _ = cpasync.make_tiled_tma_atom(
            multicast,
            cute.make_tensor(w, cute.make_layout((n8, k8), stride=(k8, 1))),
            cute.slice_(w_layout, (None, None, 0)),
            (self.tile_n, TILE_K),
            num_multicast=self.cluster,
        )
        tma_y, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            cute.make_tensor(y, cute.make_layout((m, n8), stride=(n8, 1))),
            cute.slice_(y_layout, (None, None, 0)),
            (EPI, EPI),
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(tma_x, tma_w, tma_y, bias, m, n, k, group).launch(
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
        tma_y: cute.CopyAtom,
        bias: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        group: Int32,
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
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, 4 * self.sharing * self.cluster
            ),
            tx_count=(self.tile_m + self.tile_n) * TILE_K * 2,
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
        k_tiles = cute.ceil_div(k, TILE_K)

        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(24 if self.pingpong else 40)
            if warp_index == 0:
                gx = cute.local_tile(coordinates(m, k), (self.tile_m, TILE_K), (None, None))
                gw = cute.local_tile(coordinates(n, k), (self.tile_n, TILE_K), (None, None))
                to_x, from_x = cpasync.tma_partition(
                    tma_x,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(sx, 0, 2),
                    cute.group_modes(gx, 0, 2),
                )
                to_w, from_w = cpasync.tma_partition(
                    tma_w,
                    rank,
                    cute.make_layout(self.cluster),
                    cute.group_modes(sw, 0, 2),
                    cute.group_modes(gw, 0, 2),
                )
                everyone = cutlass.Int16((1 << self.cluster) - 1)  # unused without multicast
                state = pipeline.make_pipeline_state(
                    pipeline.PipelineUserType.Producer, self.stages
                )
                for tile in cutlass.range(first, rows * columns, clusters, unroll=1):
                    row, column = _tile_position(tile, rows, columns, group)
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
                            from_w[None, column, step],
                            to_w[None, state.index],
                            tma_bar_ptr=barrier,
                            mcast_mask=everyone,
                        )
                        state.advance()
                ring.producer_tail(state)
        else:
            cute.arch.setmaxregister_increase(240 if self.pingpong else 232)
            consumer = warpgroup_index - 1
            lane = thread % 32
            wg_thread = thread % WARPGROUP
            mma = self.tiled_mma(self.sharing)
            part = mma.get_slice(0 if const_expr(self.pingpong) else consumer * WARPGROUP)
            rx = mma.make_fragment_A(part.partition_A(sx))
            rw = mma.make_fragment_B(part.partition_B(sw))
            acc = cute.make_rmem_tensor(mma.partition_shape_C((self.tile_m, self.tile_n)), Float32)

            # The output's way: registers, stmatrix, a 64x64 piece in shared memory, TMA store.
            epi_mma = hopper.make_trivial_tiled_mma(
                self.dtype,
                self.dtype,
                warpgroup.OperandMajorMode.K,
                warpgroup.OperandMajorMode.K,
                Float32,
                (1, 1, 1),
                (64, EPI),
            )
            stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
            r2s = cute.make_tiled_copy_S(stmatrix, cute.make_tiled_copy_C_atom(stmatrix, epi_mma))
            to_sy = r2s.get_slice(wg_thread).partition_D(sy)
            piece = cute.make_rmem_tensor(to_sy.shape[:3], self.dtype)
            gy = cute.zipped_divide(coordinates(m, n), (EPI, EPI))
            from_sy, to_y = cpasync.tma_partition(
                tma_y, 0, cute.make_layout(1), cute.group_modes(sy, 0, 2), gy
            )
            values = cute.size(piece)

            sbias = cute.make_tensor(
                storage.bias.data_ptr() + consumer * self.tile_n,
                cute.make_layout(self.tile_n),
            )
            # This thread's two columns in each group of eight.
            my_bias = cute.make_tensor(
                (storage.bias.data_ptr() + consumer * self.tile_n + lane % 4 * 2).align(8),
                cute.make_layout((2, self.tile_n // 8), stride=(1, 8)),
            )
            loads = (self.tile_n + WARPGROUP - 1) // WARPGROUP
            bias_values = cute.make_rmem_tensor(loads, Float32)

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
                row, column = _tile_position(tile, rows, columns, group)
                row = row * self.cluster + rank
                for i in cutlass.range_constexpr(loads):
                    in_tile = wg_thread + i * WARPGROUP
                    at = column * self.tile_n + in_tile
                    bias_values[i] = 0.0
                    if bias.toint() != 0:
                        if at < n:
                            bias_values[i] = (bias + at).load().to(Float32)

                if const_expr(self.pingpong):
                    _sync(_TURN + consumer, 2 * WARPGROUP)
                release = read.clone()
                warpgroup.fence()
                ring.consumer_wait(read)
                for block in cutlass.range_constexpr(TILE_K // 16):
                    mma.set(warpgroup.Field.ACCUMULATE, block != 0)
                    at = (None, None, block, read.index)
                    cute.gemm(mma, acc, rx[at], rw[at], acc)
                warpgroup.commit_group()
                read.advance()
                mma.set(warpgroup.Field.ACCUMULATE, True)
                for _ in cutlass.range(k_tiles - 1, unroll=1):
                    ring.consumer_wait(read)
                    for block in cutlass.range_constexpr(TILE_K // 16):
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
                for i in cutlass.range_constexpr(loads):
                    in_tile = wg_thread + i * WARPGROUP
                    if const_expr(self.tile_n % WARPGROUP == 0) or in_tile < self.tile_n:
                        sbias[in_tile] = bias_values[i]
                warpgroup.wait_group(0)
                ring.consumer_release(release)

                for half in cutlass.range_constexpr(self.wg_rows // EPI):
                    for chunk in cutlass.range_constexpr(self.tile_n // EPI):
                        buffer = consumer * self.epi_stages + stored % self.epi_stages
                        if warp_index % 4 == 0:
                            cute.arch.cp_async_bulk_wait_group(self.epi_stages - 1, read=True)
                        _sync(_WARPGROUP + consumer, WARPGROUP)
                        first_value = half * (self.tile_n // 2) + chunk * values
                        for eight in cutlass.range_constexpr(EPI // 8):
                            b = my_bias[None, chunk * (EPI // 8) + eight].load()
                            for v in cutlass.range_constexpr(4):
                                i = eight * 4 + v
                                value = acc[first_value + i] + b[v % 2]
                                piece[i] = self.act(value).to(self.dtype)
                        cute.copy(r2s, piece, to_sy[None, None, None, buffer])
                        cute.arch.fence_proxy("async.shared", space="cta")
                        _sync(_WARPGROUP + consumer, WARPGROUP)
                        if warp_index % 4 == 0:
                            block_row = row * (self.tile_m // EPI) + half
                            if const_expr(not self.pingpong):
                                block_row += consumer * (self.wg_rows // EPI)
                            block_column = column * (self.tile_n // EPI) + chunk
                            cute.copy(
                                tma_y,
                                from_sy[None, buffer],
                                to_y[None, (block_row, block_column)],
                            )
                            cute.arch.cp_async_bulk_commit_group()
                        stored += 1
            if warp_index % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)


def _sync(barrier, threads):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def _arrive(barrier, threads):
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)


def round_up(size, unit=1024):
    """Storage's size: a multiple of its largest alignment."""
    return (size + unit - 1) // unit * unit


def coordinates(rows, columns):
    """What a tensor map of a row-major [rows, columns] tensor is indexed with: (column, row)."""
    identity = cute.make_identity_tensor((columns, rows))
    return cute.make_tensor(identity.iterator, cute.select(identity.layout, [1, 0]))


@cute.jit
def _tile_position(tile, rows, columns, group):
    """Row and column of tile number `tile`: bands of `group` rows, down the columns in a band."""
    band = tile // (group * columns)
    height = cutlass.min(rows - band * group, group)
    within = tile - band * group * columns
    column = within // height
    return band * group + within - column * height, column
