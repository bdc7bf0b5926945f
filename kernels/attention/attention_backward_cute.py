# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention's q, k and v: TMA, wgmma, persistent blocks.

A block works on tiles of 128 keys of one head, 64 a warpgroup, for all heads of queries that read
it: so dk and dv are sums in registers, also of grouped heads, written once and in a fixed order.
For each block of `tile_m` queries, with p = exp2(s * scale - lse) and delta = rowsum(do * o):

    s = k q^T    dp = v do^T    dv += p do    ds = p * (dp - delta)    dk += ds q    dq = ds^T k

All of it stands with keys down and queries across, so that p and ds are left operands from the
registers that they are computed in. Only ds goes through shared memory, for dq, which needs it
of both warpgroups. dq is added in float32 to a workspace, as it lies in registers.

Who does what: warp 0 loads k and v once a tile, each as soon as the tile before is done with it,
and q, do and the rows' sums through rings of stages. Warp 1 takes what the warpgroups leave for it out of shared memory: it adds dq, and stores
dv and dk. The warpgroups multiply: of each block they start

    s, dp        dp while exponentials are computed
    dv           while ds is exchanged
    dq, dk       dk while dq is handed to warp 1

and the other warpgroup fills the gaps. Starting the next block's s beside dk was 5 % slower, dv
before ds no faster.

Floor, of a step of 64 queries by 128 keys. D = 128: products 5 * 64 * 128 * 128 / 2048 = 2560
cycles. Shared memory at 128 bytes a cycle: s and dp, whose operands are both 64 rows, 1024; dv and
dk 512, dq 512, ds 128, dq in and out 512, copies 256, rows' sums 128: 3072. Exponentials 512.
D = 64, for which a step has 128 queries, so half as many exchanges: products 1280, shared memory
1408, exponentials 512. A query and 64 columns send 256 bytes of dq to the L2, and fetch half as
much.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from attention_backward_copies_cute import (
    EMPTY,
    FULL,
    OUT_THREADS,
    AttentionBackwardCopies,
    arrive,
    sync,
)
from attention_backward_layouts_cute import STAGES, TILE_N, WARPGROUPS
from attention_backward_registers_cute import (
    capped_probabilities,
    probabilities,
    score_gradients,
    store_plain,
    store_rows,
    store_transposed,
    transposed_place,
)
from attention_backward_tiles_cute import needs_mask, query_blocks, tile_position
from attention_backward_turns_cute import receive, set_up_mail
from attention_layouts_cute import PIECE, ROWS, WARPGROUP
from attention_softmax_cute import cap, hide_outside, to_operand
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

# A named barrier: both warpgroups have written their part of ds.
_DS = 1


class AttentionBackward(AttentionBackwardCopies):
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
        counter: cute.Pointer,
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
            *(stats, dq, turns, counter, batch, seq_q, seq_k, heads, kv_heads),
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
        counter: cute.Pointer,
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
        q_ring = ring(storage.q_barriers, STAGES, tile_bytes)
        do_ring = ring(storage.do_barriers, STAGES, tile_bytes + self.stats_bytes)
        k_ring = ring(storage.k_barriers, 1, 2 * TILE_N * self.d)
        v_ring = ring(storage.v_barriers, 1, 2 * TILE_N * self.d)
        mail = storage.mail.data_ptr()
        if warp_index == 0:
            with cute.arch.elect_one():
                set_up_mail(mail)
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
            if warp_index == 0:
                self.load(
                    *((tma_q, sq, q_ring), (tma_do, sdo, do_ring)),
                    *((tma_k, sk, k_ring), (tma_v, sv, v_ring), stats, stats_address),
                    *(mail, counter.toint(), tiles, order, sight),
                    *((batch, seq_q, seq_k, heads, kv_heads), q_blocks),
                )
            if warp_index == 1:
                self.take_out(
                    *(tma_dk, tma_dv, dq, turns, out_address),
                    *(mail, order, sight, (batch, seq_k, heads, kv_heads), q_blocks),
                )
        else:
            cute.arch.setmaxregister_increase(self.registers)
            wg = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
            wg_thread = thread % WARPGROUP
            mma_sp, mma_kv, mma_dq = self.mma_sp(), self.mma_kv(), self.mma_dq()
            sp_part = mma_sp.get_slice(wg * WARPGROUP)
            kv_part = mma_kv.get_slice(wg * WARPGROUP)
            dq_part = mma_dq.get_slice(wg * WARPGROUP)

            def columns_of(source):
                return cute.make_tensor(source.iterator, cute.select(source.layout, [1, 0, 2]))

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
            dk = cute.make_rmem_tensor(sums, Float32)
            dv = cute.make_rmem_tensor(sums, Float32)
            dq_sums = mma_dq.partition_shape_C((self.tile_m, self.d))
            operand = mma_kv.partition_shape_A((TILE_N, self.tile_m))
            p, ds = mma_kv.make_fragment_A(operand), mma_kv.make_fragment_A(operand)

            q_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
            do_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
            kv_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)

            my_stats = stats_address + wg_thread % 4 * 8
            my_ds = storage.ds.data_ptr().toint() + wg * self.tile_m * 2 * PIECE
            my_ds += transposed_place(wg_thread)
            my_out = out_address + wg * self.part_bytes
            scale_log2, slope_float = scale.bitcast(Float32), slope.bitcast(Float32)
            columns, depth = self.columns // 16, self.tile_m // 16

            turn = Int32(1)
            tile = receive(mail, Int32(0))
            while tile >= 0:
                column, _, _ = tile_position(tile, *order)
                key = column * TILE_N
                first, end = query_blocks(key, TILE_N, *sight)
                steps = (end - first) * shared_by
                block = first
                dk.fill(0.0)
                dv.fill(0.0)
                if steps > 0:
                    k_ring.consumer_wait(kv_read)
                    v_ring.consumer_wait(kv_read)
                for step in cutlass.range(steps, unroll=1):
                    last = step + 1 == steps
                    # Made anew, so that no register is kept for what they were.
                    s, dp = (cute.make_rmem_tensor(scores, Float32) for _ in range(2))
                    dqs = cute.make_rmem_tensor(dq_sums, Float32)
                    q_ring.consumer_wait(q_read)
                    warpgroup.fence()
                    self.multiply(mma_sp, s, rk, rq, q_read.index, columns)
                    do_ring.consumer_wait(do_read)
                    stage = do_read.index
                    warpgroup.fence()
                    self.multiply(mma_sp, dp, rv, rdo, stage, columns)
                    warpgroup.wait_group(1)  # s
                    query = block * self.tile_m
                    if const_expr(self.capped):
                        cap(s, slope_float)
                    if needs_mask(key, TILE_N, query, self.tile_m, seq_k, offset, left, right):
                        self.hide(s, key, query, seq_k, offset, left, right)
                    lse = my_stats + stage * self.stats_bytes
                    if const_expr(self.capped):
                        capped_probabilities(s, p, lse, scale_log2, self.dtype)
                    else:
                        probabilities(s, lse, scale_log2)
                        to_operand(s, p, self.dtype)
                    warpgroup.wait_group(0)  # dp
                    if last:
                        v_ring.consumer_release(kv_read)
                    score_gradients(s, dp, ds, lse + 4 * self.tile_m, self.dtype)
                    store_transposed(ds, my_ds + stage * (2 * self.tile_m * TILE_N))

                    warpgroup.fence()
                    self.accumulate(mma_kv, dv, p, do_columns, stage, depth)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    sync(_DS, WARPGROUPS * WARPGROUP)
                    warpgroup.fence()
                    part_of_ds = rds[None, None, None, stage]
                    self.multiply(mma_dq, dqs, part_of_ds, k_columns, 0, TILE_N // 16)
                    self.accumulate(mma_kv, dk, ds, q_columns, q_read.index, depth)
                    warpgroup.wait_group(1)  # dv and dq
                    if last:
                        k_ring.consumer_release(kv_read)
                        kv_read.advance()
                    do_ring.consumer_release(do_read)
                    do_read.advance()
                    sync(EMPTY + wg, OUT_THREADS)
                    store_plain(dqs, my_out + wg_thread * 16)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    arrive(FULL + wg, OUT_THREADS)
                    block += 1
                    block = first if block == end else block
                    warpgroup.wait_group(0)  # dk
                    q_ring.consumer_release(q_read)
                    q_read.advance()

                own = _anew(wg_thread)
                for which in cutlass.range_constexpr(2):
                    factor = Float32(1.0) if which == 0 else gain.bitcast(Float32)
                    sync(EMPTY + wg, OUT_THREADS)
                    store_rows((dv, dk)[which], factor, my_out, own, self.dtype)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    arrive(FULL + wg, OUT_THREADS)
                tile = receive(mail, turn)
                turn += 1

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
        for block in range(blocks):
            cute.gemm(mma, sums, a[None, None, block], b[None, None, block, stage], sums)
        warpgroup.commit_group()


def _anew(value):
    """The same value; what is computed of it is not computed ahead and kept."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )
