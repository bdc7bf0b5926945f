# SPDX-License-Identifier: Apache-2.0
"""moe_up and moe_down for many tokens: each block of routed rows times its expert's weights.

The plan. Products bind it: at T = 4096, k = 8, E = 64, H = 2048, I = 1024 they are 412 GFLOP, 0.6 ms
at the rate of the best GEMM; rows gathered beforehand would move 134 MB twice, so they are gathered
on the way to shared memory, where the copy engine cannot do it: the loading warpgroup's threads copy
16 bytes each, rows by the routing's ids, beside the engine's tiles of weights. A block's results go
straight to their elements' rows.

A tile is one block of the routing times tile_n rows of weights: for `up` a half of them of the gate
and their partners, which meet in the activation; for `down` neighbours. Two warpgroups share a tile,
64 rows each, or take turns with whole tiles ("pingpong"), so that one's epilogue runs while the
other multiplies. A warpgroup whose 64 rows are all padding multiplies nothing.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from moe_activations_cute import ACTIVATIONS

TILE_K = 64  # elements: one 128-byte swizzle row
ROW = 2 * TILE_K  # bytes
EPI = 64  # rows and columns of a piece of the result on its way out
WARPGROUP = 128
LAG = 2  # stages that the loaders ask for before they wait for an older one's rows
LOADERS = 64  # threads that gather rows
COPIES = LOADERS // 8  # rows that they copy at a time, 16 bytes of a row each

_TURN = 3  # named barriers 3 and 4: whose turn it is to multiply


class MoeGrouped:
    """`act` is None for `down`."""

    def __init__(self, name, dtype, act, tile_m, tile_n, pingpong, cluster, stages):
        self.name = name
        self.dtype = dtype
        self.up = act is not None
        self.act = ACTIVATIONS.get(act)
        self.tile_m, self.tile_n = tile_m, tile_n
        self.half = tile_n // 2
        self.pingpong = pingpong
        self.cluster = cluster
        self.stages = stages
        self.consumers = 2 if pingpong else tile_m // EPI
        self.threads = (1 + self.consumers) * WARPGROUP
        # Handed from the loaders to those that multiply, where there are two.
        self.loader_registers, self.registers = (56, 224) if self.consumers == 2 else (0, 0)
        self.sharing = 1 if pingpong else self.consumers
        self.wg_rows = tile_m // self.sharing

    def mma(self, warpgroups, columns):
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            (warpgroups, 1, 1),
            (64, columns),
        )

    def smem_layout(self, rows, stages):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (rows, TILE_K, stages), order=(0, 1, 2))

    def storage(self):
        size = cute.cosize(self.smem_layout(EPI, self.consumers))

        @cute.struct
        class Storage:
            x: cute.struct.Align[
                cute.struct.MemRange[self.dtype, self.stages * self.tile_m * TILE_K], 1024
            ]
            w: cute.struct.Align[
                cute.struct.MemRange[self.dtype, self.stages * self.tile_n * TILE_K], 1024
            ]
            y: cute.struct.Align[cute.struct.MemRange[self.dtype, size], 1024]
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]

        return Storage

    def smem_bytes(self):
        """What the storage takes, as the launch asks for it."""
        ring = self.stages * ((self.tile_m + self.tile_n) * ROW + 16)
        return (ring + self.consumers * EPI * EPI * 2 + 1023) // 1024 * 1024

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        w: cute.Pointer,
        sorted_ids: cute.Pointer,
        expert_ids: cute.Pointer,
        used: cute.Pointer,
        weights: cute.Pointer,
        ids: cute.Pointer,
        out: cute.Pointer,
        experts: Int32,
        w_rows: Int32,
        k: Int32,
        second: Int32,
        rows: Int32,
        elements: Int32,
        divide: Int32,
        x_row: Int32,
        id_words: Int32,
        bound: Int32,
        early: Int32,
        blocks: Int32,
        stream,
    ):
        k8 = cute.assume(k, divby=8)
        shape, stride = (w_rows, k8, experts), (k8, 1, w_rows * k8)
        load = cpasync.CopyBulkTensorTileG2SOp()
        multicast = cpasync.CopyBulkTensorTileG2SMulticastOp()
        tma_w, _ = cpasync.make_tiled_tma_atom(
            multicast if const_expr(self.cluster > 1) else load,
            cute.make_tensor(w, cute.make_layout(shape, stride=stride)),
            cute.slice_(self.smem_layout(self.half, 1), (None, None, 0)),
            (self.half, TILE_K),
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tma_w,
            x,
            sorted_ids,
            expert_ids,
            used,
            weights,
            ids,
            out,
            experts,
            w_rows,
            k,
            second,
            rows,
            elements,
            divide,
            x_row,
            id_words,
            bound,
            early,
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
        tma_w: cute.CopyAtom,
        x: cute.Pointer,
        sorted_ids: cute.Pointer,
        expert_ids: cute.Pointer,
        used: cute.Pointer,
        weights: cute.Pointer,  # of elements, or null
        ids: cute.Pointer,  # of experts, by element; or null: see clear_rows_of_none
        out: cute.Pointer,  # [elements, rows]
        experts: Int32,
        w_rows: Int32,  # of an expert
        k: Int32,
        second: Int32,  # rows from a tile's first half of weights to its second
        rows: Int32,  # of the result, an expert
        elements: Int32,
        divide: Int32,  # element e has row e / divide of x
        x_row: Int32,  # elements from a row of x to the next, a multiple of 8
        id_words: Int32,  # 2 of int64 ids, else 1
        bound: Int32,  # ids at or above it are no expert's
        early: Int32,  # the routing is older than the kernel before this one: do not wait for it
    ):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        storage = cutlass.utils.SmemAllocator().allocate(self.storage())
        full = storage.barriers.data_ptr()
        empty = full + self.stages
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_w)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + i, LOADERS + 1)
                    cute.arch.mbarrier_init(empty + i, 4 * self.sharing * self.cluster)
            cute.arch.mbarrier_init_fence()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        columns = cute.ceil_div(rows, self.half if const_expr(self.up) else self.tile_n)
        k_tiles = cute.ceil_div(k, TILE_K)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        first = cute.arch.block_idx()[0] // self.cluster
        grid = cute.arch.grid_dim()[0] // self.cluster

        if warpgroup_index == 0:
            if const_expr(self.registers > 0):
                cute.arch.setmaxregister_decrease(self.loader_registers)
            if warp_index == 0:
                if early == 0:
                    cute.arch.griddepcontrol_wait()
                blocks = used.load() // self.tile_m
                tiles = cute.ceil_div(blocks, self.cluster) * columns
                layout = self.smem_layout(self.half, 2 * self.stages)
                sw = storage.w.get_tensor(layout.outer, swizzle=layout.inner)
                places = coordinates(experts, w_rows, k)
                tile = (self.half, TILE_K)
                to_w, from_first = self.partition(tma_w, sw, cute.zipped_divide(places, tile))
                other = cute.domain_offset((second, 0, 0), places)
                _, from_second = self.partition(tma_w, sw, cute.zipped_divide(other, tile))
                step_columns = 1 if const_expr(self.up) else 2  # of tile.half, a tile
                index, phase = Int32(0), Int32(1)
                for number in cutlass.range(first, tiles, grid, unroll=1):
                    block = number // columns * self.cluster + rank
                    column = number % columns * step_columns
                    expert, shared = self.experts_of(expert_ids, block, blocks)
                    steps = k_tiles if expert >= 0 else 0
                    for step in cutlass.range(steps, unroll=1):
                        barrier = full + index
                        cute.arch.mbarrier_wait(empty + index, phase)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.tile_n * ROW)
                        at = (column, step, expert)
                        to = 2 * index
                        if const_expr(self.cluster == 1):
                            self.copy(tma_w, from_first[None, at], to_w[None, to], barrier)
                            self.copy(tma_w, from_second[None, at], to_w[None, to + 1], barrier)
                        else:
                            # A half each for both, or both for itself.
                            to_whom = cutlass.Int16(3 if shared else 1 << rank)
                            if not shared or rank == 0:
                                self.copy(
                                    tma_w, from_first[None, at], to_w[None, to], barrier, to_whom
                                )
                            if not shared or rank == 1:
                                to += 1
                                self.copy(
                                    tma_w, from_second[None, at], to_w[None, to], barrier, to_whom
                                )
                        index, phase = self.next(index, phase)
            elif warp_index < 1 + LOADERS // 32:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
                blocks = used.load() // self.tile_m
                tiles = cute.ceil_div(blocks, self.cluster) * columns
                # This thread's 16 bytes of its rows: row, row + 8, ...
                row, piece = (thread - 32) // 8, thread % 8
                to_x = storage.x.data_ptr().toint() + row * ROW + (piece ^ row) * 16
                sources = cute.make_rmem_tensor(self.tile_m // COPIES, Int32)  # in 16 bytes
                index, phase, ready, waiting = Int32(0), Int32(1), Int32(0), Int32(0)
                for number in cutlass.range(first, tiles, grid, unroll=1):
                    block = number // columns * self.cluster + rank
                    steps = self.steps_of(expert_ids, block, blocks, k_tiles)
                    for i in cutlass.range_constexpr(self.tile_m // COPIES):
                        at_id = block * self.tile_m + row + i * COPIES
                        element = elements
                        if const_expr(self.cluster == 1) or block < blocks:
                            element = (sorted_ids + at_id).load()
                        sources[i] = Int32(-1)
                        if element < elements:
                            sources[i] = element // divide * (x_row // 8) + piece
                    for step in cutlass.range(steps, unroll=1):
                        cute.arch.mbarrier_wait(empty + index, phase)
                        size = 16 if step * TILE_K + piece * 8 < k else 0
                        to = to_x + index * (self.tile_m * ROW)
                        for i in cutlass.range_constexpr(self.tile_m // COPIES):
                            # The last step's pieces beyond k come from nowhere: zeros.
                            at = sources[i] + (step * (ROW // 16) if size > 0 else 0)
                            source = x.toint() + Int64(at) * 16
                            copy_16(to + i * (COPIES * ROW), source, size, sources[i] >= 0)
                        cute.arch.cp_async_commit_group()
                        index, phase = self.next(index, phase)
                        waiting += 1
                        if waiting > LAG:
                            cute.arch.cp_async_wait_group(LAG)
                            ready = self.announce(full, ready)
                            waiting = Int32(LAG)
                cute.arch.cp_async_wait_group(0)
                for _ in cutlass.range(waiting, unroll=1):
                    ready = self.announce(full, ready)
            elif const_expr(not self.up):
                cute.arch.griddepcontrol_wait()
                if ids.toint() != 0:
                    self.clear_rows_of_none(ids, id_words, bound, elements, rows, out)
        else:
            if const_expr(self.registers > 0):
                cute.arch.setmaxregister_increase(self.registers)
            cute.arch.griddepcontrol_wait()
            blocks = used.load() // self.tile_m
            tiles = cute.ceil_div(blocks, self.cluster) * columns
            consumer = warpgroup_index - 1
            lane = thread % 32
            wg_thread = thread % WARPGROUP
            mma = self.mma(self.sharing, self.tile_n)
            part = mma.get_slice(0 if const_expr(self.pingpong) else consumer * WARPGROUP)
            x_layout = self.smem_layout(self.tile_m, self.stages)
            w_layout = self.smem_layout(self.tile_n, self.stages)
            sx = storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
            sw = storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
            rx = mma.make_fragment_A(part.partition_A(sx))
            rw = mma.make_fragment_B(part.partition_B(sw))
            acc = cute.make_rmem_tensor(mma.partition_shape_C((self.tile_m, self.tile_n)), Float32)
            mma.set(warpgroup.Field.ACCUMULATE, True)

            # The result's pieces: a warp's 16 rows of 64 columns go through its own shared memory.
            y_layout = self.smem_layout(EPI, self.consumers)
            sy = storage.y.get_tensor(y_layout.outer, swizzle=y_layout.inner)
            epi_mma = self.mma(1, EPI)
            stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
            r2s = cute.make_tiled_copy_S(stmatrix, cute.make_tiled_copy_C_atom(stmatrix, epi_mma))
            to_sy = r2s.get_slice(wg_thread).partition_D(sy)
            piece = cute.make_rmem_tensor(to_sy.shape[:3], self.dtype)
            y_row = wg_thread // 32 * 16 + lane // 8  # and every fourth after it
            from_y = storage.y.data_ptr() + consumer * (EPI * EPI)
            owners = cute.make_rmem_tensor(4, Int32)
            scales = cute.make_rmem_tensor(2, Float32)
            vector = cute.make_layout(8)

            index, phase = Int32(0), Int32(0)
            mine = first
            every = grid
            if const_expr(self.pingpong):
                mine = first + consumer * grid
                every = self.consumers * grid
                if consumer == 1:
                    arrive(_TURN + 0, 2 * WARPGROUP)
                    if first < tiles:
                        block = first // columns * self.cluster + rank
                        steps = self.steps_of(expert_ids, block, blocks, k_tiles)
                        index, phase = self.skip(index, phase, steps)
            for number in cutlass.range(mine, tiles, every, unroll=1):
                block = number // columns * self.cluster + rank
                column = number % columns
                steps = self.steps_of(expert_ids, block, blocks, k_tiles)
                my_ids = sorted_ids + cutlass.min(block, blocks - 1) * self.tile_m
                if const_expr(not self.pingpong):
                    my_ids = my_ids + consumer * EPI
                any_real = (my_ids + lane).load() < elements
                for i in cutlass.range_constexpr(1, self.wg_rows // 32):
                    any_real = any_real | ((my_ids + (lane + i * 32)).load() < elements)
                any_real = cute.arch.vote_any_sync(any_real)
                multiplies = any_real
                if const_expr(self.cluster > 1):
                    any_real = any_real & (block < blocks)
                    multiplies = any_real
                    if any_real:
                        multiplies = (expert_ids + block).load() >= 0

                acc.fill(0.0)
                if const_expr(self.pingpong):
                    sync(_TURN + consumer, 2 * WARPGROUP)
                if multiplies:
                    warpgroup.fence()
                    for step in cutlass.range(steps, unroll=1):
                        cute.arch.mbarrier_wait(full + index, phase)
                        for at_k in cutlass.range_constexpr(TILE_K // 16):
                            at = (None, None, at_k, index)
                            cute.gemm(mma, acc, rx[at], rw[at], acc)
                        warpgroup.commit_group()
                        warpgroup.wait_group(1)
                        if step > 0:
                            last = index - 1 if index > 0 else self.stages - 1
                            self.release(empty, last)
                        index, phase = self.next(index, phase)
                else:
                    for step in cutlass.range(steps, unroll=1):
                        cute.arch.mbarrier_wait(full + index, phase)
                        self.release(empty, index)
                        index, phase = self.next(index, phase)
                if const_expr(self.pingpong):
                    arrive(_TURN + 1 - consumer, 2 * WARPGROUP)
                last = index - 1 if index > 0 else self.stages - 1
                warpgroup.wait_group(0)
                if multiplies:
                    if steps > 0:
                        self.release(empty, last)
                if const_expr(self.pingpong):
                    if number + grid < tiles:
                        block = (number + grid) // columns * self.cluster + rank
                        other = self.steps_of(expert_ids, block, blocks, k_tiles)
                        index, phase = self.skip(index, phase, other)

                if any_real:
                    for half in cutlass.range_constexpr(self.wg_rows // EPI):
                        for i in cutlass.range_constexpr(4):
                            owners[i] = (my_ids + (half * EPI + y_row + i * 4)).load()
                        if const_expr(not self.up):
                            for i in cutlass.range_constexpr(2):
                                scales[i] = 1.0
                                if weights.toint() != 0:
                                    at = half * EPI + wg_thread // 32 * 16 + lane // 4 + i * 8
                                    element = (my_ids + at).load()
                                    if element < elements:
                                        scales[i] = (weights + element).load()
                        width = self.half if const_expr(self.up) else self.tile_n
                        for chunk in cutlass.range_constexpr(width // EPI):
                            cute.arch.sync_warp()
                            for i in cutlass.range_constexpr(cute.size(piece)):
                                at = half * (self.tile_n // 2) + chunk * (EPI // 2) + i
                                if const_expr(self.up):
                                    value = self.act(acc[at], acc[at + self.half // 2])
                                else:
                                    value = acc[at] * scales[i // 2 % 2]
                                piece[i] = value.to(self.dtype)
                            cute.copy(r2s, piece, to_sy[None, None, None, consumer])
                            cute.arch.sync_warp()
                            at_column = column * width + chunk * EPI + lane % 8 * 8
                            for i in cutlass.range_constexpr(4):
                                at_row = y_row + i * 4
                                offset = at_row * EPI + (lane % 8 ^ at_row % 8) * 8
                                values = cute.make_tensor((from_y + offset).align(16), vector)
                                if owners[i] < elements:
                                    if at_column < rows:
                                        to = out + (Int64(owners[i]) * rows + at_column)
                                        result = cute.make_tensor(to.align(16), vector)
                                        result.store(values.load())

        if const_expr(self.cluster > 1):  # nobody leaves while others signal it
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def clear_rows_of_none(self, ids, id_words, bound, elements, rows, out):
        """Zeros for ids that are no expert's, which are in no block; by one warp of each block."""
        lane = cute.arch.lane_idx()
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        start = cute.arch.block_idx()[0] * 32
        for group in cutlass.range(start, elements, cute.arch.grid_dim()[0] * 32, unroll=1):
            mine = group + lane
            none = False
            if mine < elements:
                id = (ids + mine * id_words).load()
                none = (id < 0) | (id >= bound)
                if id_words == 2:
                    none = none | ((ids + (mine * 2 + 1)).load() != 0)
            if none:
                for at in cutlass.range(0, rows, 8, unroll=1):
                    to = out + (Int64(mine) * rows + at)
                    cute.make_tensor(to.align(16), cute.make_layout(8)).store(zeros.load())

    def partition(self, tma, smem, tiles):
        one = cute.make_layout(1)
        return cpasync.tma_partition(tma, 0, one, cute.group_modes(smem, 0, 2), tiles)

    def copy(self, tma, source, to, barrier, to_whom=None):
        cute.copy(tma, source, to, tma_bar_ptr=barrier, mcast_mask=to_whom)

    @cute.jit
    def experts_of(self, expert_ids, block, blocks):
        """A block's expert, and whether it is that of the other block in the cluster. A block
        without one takes part in the other's steps."""
        expert, shared = Int32(-1), False
        if const_expr(self.cluster == 1):
            expert = (expert_ids + block).load()
        else:
            other = Int32(-1)
            if block < blocks:
                expert = (expert_ids + block).load()
            if (block ^ 1) < blocks:
                other = (expert_ids + (block ^ 1)).load()
            if expert < 0:
                expert = other
            shared = (expert == other) | (other < 0)
        return expert, shared

    @cute.jit
    def steps_of(self, expert_ids, block, blocks, k_tiles):
        """Of a tile; experts that are elsewhere take none."""
        expert, _ = self.experts_of(expert_ids, block, blocks)
        return k_tiles if expert >= 0 else Int32(0)

    @cute.jit
    def announce(self, full, ready):
        """That this thread's rows of a stage are there; the next stage."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(full + ready)
        return ready + 1 if ready + 1 < self.stages else Int32(0)

    @cute.jit
    def release(self, empty, index):
        with cute.arch.elect_one():
            if const_expr(self.cluster == 1):
                cute.arch.mbarrier_arrive(empty + index)
            else:
                for rank in cutlass.range_constexpr(self.cluster):
                    cute.arch.mbarrier_arrive(empty + index, rank)

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


def copy_16(to, source, size, real):
    """16 bytes to shared memory; those from `size` on are zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[to, source, size],
        predicate=real,
    )


def sync(barrier, threads):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def arrive(barrier, threads):
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)
