# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention's q, k and v: TMA, wgmma, persistent blocks.

A block works on tiles of 128 keys of one head, 64 a warpgroup, for all heads of queries that read
it: so dk and dv are sums in registers, also of grouped heads, written once and in a fixed order.
For each block of `tile_m` queries, with p = exp2(s * scale - lse) and delta = rowsum(do * o):

    s = k q^T    dp = v do^T    dv += p do    ds = p * (dp - delta)    dk += ds q    dq = ds^T k

All of it stands with keys down and queries across, so that p and ds are left operands from the
registers that they are computed in. Only ds goes through shared memory, for dq, which needs it
of both warpgroups. dq is added in float32 to a workspace, as it lies in registers.

Who does what: warp 0 loads k and v once a tile, and q, do and the rows' sums through rings of
stages. Warp 1 takes what the warpgroups leave for it out of shared memory: it adds dq, and stores
dv and dk. The warpgroups keep the tensor cores supplied: of block i they start

    dp, behind dk of block i - 1     while exponentials are computed
    dv                               while ds is computed, rounded and exchanged
    dq, s of block i + 1, dk         while dq is handed to warp 1

Floor, of a step of 64 queries by 128 keys at D = 128 (of 128 by 128 at D = 64, the same): products
5 * 64 * 128 * 128 / 2048 = 2560 cycles. Shared memory at 128 bytes a cycle: operands 2048, ds 128,
dq in and out 512, copies 256: 2944 cycles. Exponentials 512 (1024). To the L2: 32 KiB of dq, from
it 32 KiB of q and do.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from attention_backward_layouts_cute import STAGES, TILE_N, WARPGROUPS, AttentionBackwardLayouts
from attention_backward_registers_cute import (
    capped_probabilities,
    load_rows,
    probabilities,
    score_gradients,
    store_plain,
    store_rows,
    store_transposed,
    transposed_place,
)
from attention_backward_tiles_cute import needs_mask, query_blocks, tile_position, turn_of
from attention_layouts_cute import PIECE, ROWS, WARPGROUP
from attention_softmax_cute import cap, hide_outside, to_operand
from attention_tiles_cute import place, rounds_of_block
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

# Named barriers.
_DS = 1  # both warpgroups have written their part of ds
_EMPTY = 2  # and 3: a warpgroup's part of the way out
_FULL = 4  # and 5

_OUT_THREADS = WARPGROUP + 32


class AttentionBackward(AttentionBackwardLayouts):
    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        do: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        stats: cute.Pointer,
        dq: cute.Pointer,
        turns: cute.Pointer,
        batch: Int32,
        seq_q: Int32,
        seq_k: Int32,
        heads: Int32,
        kv_heads: Int32,
        scale: Int32,
        slope: Int32,
        gain: Int32,
        left: Int32,
        right: Int32,
        band: Int32,
        descending: Int32,
        blocks: Int32,
        stream,
    ):
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def atom(op, pointer, rows, count, layout, tile):
            shape = (rows, self.d, count, batch)
            stride = (self.d, 1, rows * self.d, count * rows * self.d)
            tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
            one_stage = cute.slice_(layout, (None, None, 0))
            return cpasync.make_tiled_tma_atom(op, tensor, one_stage, tile)[0]

        q_tile, kv_tile = (self.tile_m, self.d), (TILE_N, self.d)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            atom(load, q, seq_q, heads, self.q_layout(), q_tile),
            atom(load, k, seq_k, kv_heads, self.kv_layout(), kv_tile),
            atom(load, v, seq_k, kv_heads, self.kv_layout(), kv_tile),
            atom(load, do, seq_q, heads, self.do_layout(), q_tile),
            atom(store, dk, seq_k, kv_heads, self.out_layout(), (ROWS, PIECE)),
            atom(store, dv, seq_k, kv_heads, self.out_layout(), (ROWS, PIECE)),
            *(stats, dq, turns, batch, seq_q, seq_k, heads, kv_heads),
            *(scale, slope, gain, left, right, band, descending),
        ).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        tma_do: cute.CopyAtom,
        tma_dk: cute.CopyAtom,
        tma_dv: cute.CopyAtom,
        stats: cute.Pointer,
        dq: cute.Pointer,
        turns: cute.Pointer,
        batch: Int32,
        seq_q: Int32,
        seq_k: Int32,
        heads: Int32,
        kv_heads: Int32,
        scale: Int32,
        slope: Int32,
        gain: Int32,
        left: Int32,
        right: Int32,
        band: Int32,
        descending: Int32,
    ):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_q, tma_k, tma_v, tma_do, tma_dk, tma_dv):
                cpasync.prefetch_descriptor(atom)

        storage = cutlass.utils.SmemAllocator().allocate(self.storage())

        def tensor(range_, layout):
            return range_.get_tensor(layout.outer, swizzle=layout.inner)

        sq, sdo = tensor(storage.q, self.q_layout()), tensor(storage.do, self.do_layout())
        sk, sv = tensor(storage.k, self.kv_layout()), tensor(storage.v, self.kv_layout())
        sds = tensor(storage.ds, self.ds_layout())

        def ring(barriers, stages, size):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=stages,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * WARPGROUPS),
                tx_count=size,
                defer_sync=True,
            )

        tile_bytes = 2 * self.tile_m * self.d
        q_ring = ring(storage.q_barriers, self.q_stages, tile_bytes)
        do_ring = ring(storage.do_barriers, STAGES, tile_bytes + self.stats_bytes)
        kv_ring = ring(storage.kv_barriers, 1, 4 * TILE_N * self.d)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        offset = seq_k - seq_q
        q_blocks, k_tiles = cute.ceil_div(seq_q, self.tile_m), cute.ceil_div(seq_k, TILE_N)
        shared_by = heads // kv_heads
        order = (k_tiles, kv_heads, batch, band, descending)
        sight = (self.tile_m, seq_q, offset, left, right)
        tiles = k_tiles * kv_heads * batch
        stats_address = storage.stats.data_ptr().toint()
        out_address = storage.out.data_ptr().toint()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.loader_registers)
            mine = rounds_of_block(tiles, True)
            if warp_index == 0:
                self.load(
                    *((tma_q, sq, q_ring), (tma_do, sdo, do_ring)),
                    *((tma_k, sk), (tma_v, sv), kv_ring, stats, stats_address),
                    *(mine, order, sight, (batch, seq_q, seq_k, heads, kv_heads), q_blocks),
                )
            if warp_index == 1:
                self.take_out(
                    *(tma_dk, tma_dv, dq, turns, out_address),
                    *(mine, order, sight, (batch, seq_k, heads, kv_heads), q_blocks),
                )
        else:
            cute.arch.setmaxregister_increase(self.registers)
            mine = rounds_of_block(tiles, True)
            wg = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
            wg_thread = thread % WARPGROUP
            mma_sp, mma_kv, mma_dq = self.mma_sp(), self.mma_kv(), self.mma_dq()
            sp_part = mma_sp.get_slice(wg * WARPGROUP)
            kv_part = mma_kv.get_slice(wg * WARPGROUP)
            dq_part = mma_dq.get_slice(wg * WARPGROUP)

            def columns_of(source):
                return cute.make_tensor(source.iterator, cute.select(source.layout, [1, 0, 2]))

            if const_expr(self.held):
                held = mma_sp.partition_shape_A((TILE_N, self.d))
                rk, rv = mma_sp.make_fragment_A(held), mma_sp.make_fragment_A(held)
            else:
                rk = mma_sp.make_fragment_A(sp_part.partition_A(sk))[None, None, None, 0]
                rv = mma_sp.make_fragment_A(sp_part.partition_A(sv))[None, None, None, 0]
            rq = mma_sp.make_fragment_B(sp_part.partition_B(sq))
            rdo = mma_sp.make_fragment_B(sp_part.partition_B(sdo))
            q_columns = mma_kv.make_fragment_B(kv_part.partition_B(columns_of(sq)))
            do_columns = mma_kv.make_fragment_B(kv_part.partition_B(columns_of(sdo)))
            rds = mma_dq.make_fragment_A(dq_part.partition_A(sds))
            k_columns = mma_dq.make_fragment_B(dq_part.partition_B(columns_of(sk)))

            scores = mma_sp.partition_shape_C((TILE_N, self.tile_m))
            sums = mma_kv.partition_shape_C((TILE_N, self.d))
            s = cute.make_rmem_tensor(scores, Float32)
            dk = cute.make_rmem_tensor(sums, Float32)
            dv = cute.make_rmem_tensor(sums, Float32)
            dq_sums = mma_dq.partition_shape_C((self.tile_m, self.d))
            operand = mma_kv.partition_shape_A((TILE_N, self.tile_m))
            p, ds = mma_kv.make_fragment_A(operand), mma_kv.make_fragment_A(operand)

            q_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.q_stages)
            q_free = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.q_stages)
            do_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
            kv_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)

            my_stats = stats_address + wg_thread % 4 * 8
            my_ds = storage.ds.data_ptr().toint() + wg * self.tile_m * 2 * PIECE
            my_ds += transposed_place(wg_thread)
            my_out = out_address + wg * self.part_bytes
            scale_log2, slope_float = scale.bitcast(Float32), slope.bitcast(Float32)
            columns, depth, parts = self.columns // 16, self.tile_m // 16, self.parts

            for turn in cutlass.range(mine, unroll=1):
                column, _, _ = tile_position(place(turn, True), *order)
                key = column * TILE_N
                first, end = query_blocks(key, TILE_N, *sight)
                steps = (end - first) * shared_by
                block = first
                dk.fill(0.0)
                dv.fill(0.0)
                kv_ring.consumer_wait(kv_read)
                if const_expr(self.held):
                    rows = wg * ROWS * 2 * PIECE
                    piece = TILE_N * 2 * PIECE
                    load_rows(rk, storage.k.data_ptr().toint() + rows, wg_thread, piece)
                    load_rows(rv, storage.v.data_ptr().toint() + rows, wg_thread, piece)
                # After the last step, as without any, scores are of whatever lies there.
                if steps > 0:
                    q_ring.consumer_wait(q_read)
                warpgroup.fence()
                self.multiply(mma_sp, s, rk, rq, q_read.index, columns)
                warpgroup.wait_group(0)
                if steps > 0:
                    q_read.advance()

                for step in cutlass.range(steps, unroll=1):
                    do_ring.consumer_wait(do_read)
                    stage = do_read.index
                    # Made anew, so that no register is kept for what they were.
                    dp = cute.make_rmem_tensor(scores, Float32)
                    dqs = cute.make_rmem_tensor(dq_sums, Float32)
                    if const_expr(self.capped):
                        # Registers are short: dp only when the tangents are done.
                        warpgroup.wait_group(0)  # of the step before, dk
                        cap(s, slope_float)
                    else:
                        warpgroup.fence()
                        self.multiply(mma_sp, dp, rv, rdo, stage, columns)
                    query = block * self.tile_m
                    if needs_mask(key, TILE_N, query, self.tile_m, seq_k, offset, left, right):
                        self.hide(s, key, query, seq_k, offset, left, right)
                    lse = my_stats + stage * self.stats_bytes
                    if const_expr(self.capped):
                        capped_probabilities(s, p, lse, scale_log2, self.dtype)
                        warpgroup.fence()
                        self.multiply(mma_sp, dp, rv, rdo, stage, columns)
                    else:
                        probabilities(s, lse, scale_log2)
                        _hold(batch)
                        warpgroup.wait_group(1)  # of the step before, dk
                        to_operand(s, p, self.dtype)
                    if step > 0:
                        q_ring.consumer_release(q_free)
                        q_free.advance()
                    warpgroup.fence()
                    # A part of ds takes the registers of a part of p as soon as dv has it.
                    for part in cutlass.range_constexpr(parts):
                        blocks = range(part * depth // parts, (part + 1) * depth // parts)
                        self.accumulate(mma_kv, dv, p, do_columns, stage, blocks)
                    for part in cutlass.range_constexpr(parts):
                        blocks = range(part * depth // parts, (part + 1) * depth // parts)
                        warpgroup.wait_group(parts - 1 - part)
                        delta = lse + 4 * self.tile_m
                        score_gradients(s, dp, ds, delta, self.dtype, blocks)
                        if const_expr(part + 1 < parts):
                            _hold(batch)
                    store_transposed(ds, my_ds + stage * (2 * self.tile_m * TILE_N))
                    cute.arch.fence_proxy("async.shared", space="cta")
                    _sync(_DS, WARPGROUPS * WARPGROUP)

                    warpgroup.fence()
                    self.multiply(mma_dq, dqs, rds[None, None, None, stage], k_columns, 0, TILE_N // 16)
                    if step + 1 < steps:
                        q_ring.consumer_wait(q_read)
                    self.multiply(mma_sp, s, rk, rq, q_read.index, columns)
                    self.accumulate(mma_kv, dk, ds, q_columns, q_free.index, range(depth))
                    if step + 1 < steps:
                        q_read.advance()
                    warpgroup.wait_group(2)  # dv and dq
                    do_ring.consumer_release(do_read)
                    do_read.advance()
                    _sync(_EMPTY + wg, _OUT_THREADS)
                    store_plain(dqs, my_out + wg_thread * 16)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    _arrive(_FULL + wg, _OUT_THREADS)
                    block += 1
                    block = first if block == end else block
                    warpgroup.wait_group(1)  # s

                warpgroup.wait_group(0)
                kv_ring.consumer_release(kv_read)
                kv_read.advance()
                if steps > 0:
                    q_ring.consumer_release(q_free)
                    q_free.advance()
                own = _anew(wg_thread)
                for which in cutlass.range_constexpr(2):
                    factor = Float32(1.0) if which == 0 else gain.bitcast(Float32)
                    _sync(_EMPTY + wg, _OUT_THREADS)
                    store_rows((dv, dk)[which], factor, my_out, own, self.dtype)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    _arrive(_FULL + wg, _OUT_THREADS)

    @cute.jit
    def load(
        self, q, do, k, v, kv_ring, stats, stats_address, mine, order, sight, sizes, q_blocks
    ):
        """Warp 0: k and v once a tile; q, do and its rows' sums of each head and block."""
        batch, seq_q, seq_k, heads, kv_heads = sizes
        tma_q, sq, q_ring = q
        tma_do, sdo, do_ring = do
        tma_k, sk = k
        tma_v, sv = v
        one = cute.make_layout(1)
        gq = cute.zipped_divide(coordinates(self.d, seq_q, heads, batch), (self.tile_m, self.d))
        gk = cute.zipped_divide(coordinates(self.d, seq_k, kv_heads, batch), (TILE_N, self.d))
        to_q, from_q = cpasync.tma_partition(tma_q, 0, one, cute.group_modes(sq, 0, 2), gq)
        to_do, from_do = cpasync.tma_partition(tma_do, 0, one, cute.group_modes(sdo, 0, 2), gq)
        to_k, from_k = cpasync.tma_partition(tma_k, 0, one, cute.group_modes(sk, 0, 2), gk)
        to_v, from_v = cpasync.tma_partition(tma_v, 0, one, cute.group_modes(sv, 0, 2), gk)
        q_write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.q_stages)
        do_write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        kv_write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        shared_by = heads // kv_heads
        for turn in cutlass.range(mine, unroll=1):
            column, kv_head, entry = tile_position(place(turn, True), *order)
            first, end = query_blocks(column * TILE_N, TILE_N, *sight)
            kv_ring.producer_acquire(kv_write)
            barrier = kv_ring.producer_get_barrier(kv_write)
            at = (column, 0, kv_head, entry)
            cute.copy(tma_k, from_k[None, at], to_k[None, 0], tma_bar_ptr=barrier)
            cute.copy(tma_v, from_v[None, at], to_v[None, 0], tma_bar_ptr=barrier)
            kv_write.advance()
            for shared in cutlass.range(shared_by, unroll=1):
                head = kv_head * shared_by + shared
                stats_row = stats.toint() + Int64(entry * heads + head) * q_blocks * (
                    self.stats_bytes
                )
                for block in cutlass.range(first, end, unroll=1):
                    at = (block, 0, head, entry)
                    q_ring.producer_acquire(q_write)
                    barrier = q_ring.producer_get_barrier(q_write)
                    cute.copy(
                        tma_q, from_q[None, at], to_q[None, q_write.index], tma_bar_ptr=barrier
                    )
                    q_write.advance()
                    do_ring.producer_acquire(do_write)
                    barrier = do_ring.producer_get_barrier(do_write)
                    cute.copy(
                        tma_do, from_do[None, at], to_do[None, do_write.index], tma_bar_ptr=barrier
                    )
                    with cute.arch.elect_one():
                        _load_bytes(
                            stats_address + do_write.index * self.stats_bytes,
                            stats_row + Int64(block) * self.stats_bytes,
                            self.stats_bytes,
                            barrier,
                        )
                    do_write.advance()
        kv_ring.producer_tail(kv_write)

    @cute.jit
    def take_out(
        self, tma_dk, tma_dv, dq, turns, out_address, mine, order, sight, sizes, q_blocks
    ):
        """Warp 1: adds dq to the workspace, in the tiles' order if there are turns; stores dv and
        dk."""
        batch, seq_k, heads, kv_heads = sizes
        lane = cute.arch.lane_idx()
        gk = cute.zipped_divide(coordinates(self.d, seq_k, kv_heads, batch), (ROWS, PIECE))
        ways = [self.way_out(wg, out_address, (tma_dv, tma_dk), gk) for wg in range(WARPGROUPS)]
        shared_by = heads // kv_heads
        dq_bytes = self.tile_m * self.d * 4
        for turn in cutlass.range(mine, unroll=1):
            column, kv_head, entry = tile_position(place(turn, True), *order)
            first, end = query_blocks(column * TILE_N, TILE_N, *sight)
            for shared in cutlass.range(shared_by, unroll=1):
                pair = Int64(entry * heads + kv_head * shared_by + shared) * q_blocks
                for block in cutlass.range(first, end, unroll=1):
                    self.make_room()
                    flag = turns.toint() + (pair + block) * 4
                    if turns.toint() != 0:
                        mine_is = turn_of(
                            *(column, TILE_N, order[0], block * self.tile_m, self.tile_m),
                            *(*sight[2:], order[4]),
                        )
                        if lane == 0:
                            _wait_for(flag, mine_is)
                        cute.arch.sync_warp()
                    to = dq.toint() + (pair + block) * dq_bytes
                    for wg in cutlass.range_constexpr(WARPGROUPS):
                        _sync(_FULL + wg, _OUT_THREADS)
                        with cute.arch.elect_one():
                            _add_floats(
                                to + wg * (dq_bytes // WARPGROUPS),
                                out_address + wg * self.part_bytes,
                                dq_bytes // WARPGROUPS,
                            )
                        cute.arch.cp_async_bulk_commit_group()
                    if turns.toint() != 0:
                        cute.arch.cp_async_bulk_wait_group(0)
                        cute.arch.sync_warp()
                        if lane == 0:
                            _pass_on(flag)
            for which in cutlass.range_constexpr(2):
                self.make_room()
                for wg in cutlass.range_constexpr(WARPGROUPS):
                    _sync(_FULL + wg, _OUT_THREADS)
                    from_so, to_gk = ways[wg][which]
                    for piece in cutlass.range_constexpr(self.d // PIECE):
                        at = (column * WARPGROUPS + wg, piece, kv_head, entry)
                        cute.copy((tma_dv, tma_dk)[which], from_so[None, piece], to_gk[None, at])
                    cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def way_out(self, wg, out_address, maps, gk):
        """From a warpgroup's part, for dv and for dk: the copies' two ends."""
        layout = self.out_layout()
        address = out_address + wg * self.part_bytes
        start = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        so = cute.make_tensor(cute.recast_ptr(start, layout.inner), layout.outer)
        so, one = cute.group_modes(so, 0, 2), cute.make_layout(1)
        return [cpasync.tma_partition(tma, 0, one, so, gk) for tma in maps]

    def make_room(self):
        """Tells each warpgroup that what it left has been read."""
        for wg in range(WARPGROUPS):
            cute.arch.cp_async_bulk_wait_group(WARPGROUPS - 1 - wg, read=True)
            _arrive(_EMPTY + wg, _OUT_THREADS)

    def hide(self, s, key, query, seq_k, offset, left, right):
        """Minus infinity for keys that a query does not see, from the tile's first ones on."""
        thread = _anew(cute.arch.thread_idx()[0] - WARPGROUP)
        key += thread // 32 * 16 + thread % 32 // 4
        query += thread % 4 * 2
        begin, end = [], []
        for r in range(2):
            at = key + 8 * r
            begin.append(at - offset - right - query)
            there = cutlass.min(seq_k - at, 1) * 256  # more than the columns, or none
            end.append(cutlass.min(at - offset + left + 1 - query, there))
        hide_outside(s, begin, end)

    def multiply(self, mma, sums, a, b, stage, blocks):
        """Starts sums = a b."""
        for block in range(blocks):
            mma.set(warpgroup.Field.ACCUMULATE, block != 0)
            cute.gemm(mma, sums, a[None, None, block], b[None, None, block, stage], sums)
        warpgroup.commit_group()

    def accumulate(self, mma, sums, a, b, stage, blocks):
        """Starts sums += a b, with a in registers."""
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for block in blocks:
            cute.gemm(mma, sums, a[None, None, block], b[None, None, block, stage], sums)
        warpgroup.commit_group()


def coordinates(d, rows, heads, batch):
    """What a map of [batch, heads, rows, d] is indexed with: (rows, d, heads, batch)."""
    identity = cute.make_identity_tensor((d, rows, heads, batch))
    return cute.make_tensor(identity.iterator, cute.select(identity.layout, [1, 0, 2, 3]))


def _sync(barrier, threads):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def _arrive(barrier, threads):
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)


def _anew(value):
    """The same value; what is computed of it is not computed ahead and kept."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def _hold(count):
    """Keeps the arithmetic before it there: else the compiler moves a later wait ahead of it. A
    loop that never repeats, since `count` is not negative."""
    cute.arch.inline_ptx(
        "{ .reg .pred again; setp.lt.s32 again, {$r0}, 0; AGAIN: @again nanosleep.u32 32; @again bra AGAIN; }",
        read_only_args=[count],
    )


def _load_bytes(to_shared, from_global, size, barrier):
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[{{$r0}}], [{{$r1}}], {size}, [{{$r2}}];",
        read_only_args=[to_shared, from_global, barrier.toint()],
    )


def _add_floats(to_global, from_shared, size):
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
        f"[{{$r0}}], [{{$r1}}], {size};",
        read_only_args=[to_global, from_shared],
    )


@cute.jit
def _wait_for(flag, value):
    seen = Int32(-1)
    while seen != value:
        seen = cute.arch.inline_ptx(
            "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[flag],
        )


def _pass_on(flag):
    cute.arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], 1;", read_only_args=[flag])
