# SPDX-License-Identifier: Apache-2.0
"""o = softmax(q k^T * scale, masked) v for many queries: TMA, wgmma, persistent blocks.

A block works on tiles of 64 query rows a warpgroup. One warp loads q, k and v: q once a tile, k and
v in blocks of `tile_n` keys through rings of stages, from the last block that a tile needs to the
first. Each multiplying warpgroup keeps its scores, probabilities and sums of o in registers: while
block i's softmax runs, the tensor cores multiply block i + 1's scores and block i - 1's values, of
this warpgroup and, as named barriers let them take turns, of the next one.

Floor: 4 * D multiply-adds a score, 16 a cycle and multiprocessor at D = 64, which is as fast as the
exponentials; 8 at D = 128.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

WARPGROUP = 128
ROWS = 64  # of a warpgroup
PIECE = 64  # columns of a 128-byte swizzle row

# Named barriers.
_WARPGROUP = 1  # and up: within one warpgroup
_TURN = 4  # and up: whose turn it is to start multiplying

_LN2 = 0.6931471805599453

# Powers of 2 by which a row's maximum may grow before what was summed so far is scaled anew: the
# probabilities are up to 2**8 then, which costs no precision in either dtype.
_SLACK = 8.0

# 2**f for f in [-0.5, 0.5], lowest power first: relative error 7.5e-5, a 26th of bfloat16's rounding.
_POLYNOMIAL = (0.9999280571937561, 0.6932609677314758, 0.2426111251115799, 0.05517164245247841)
_ROUND = 12582912.0  # 1.5 * 2**23: added, it leaves a whole number in the low bits


class Attention:
    def __init__(self, name, dtype, d, warpgroups, tile_n, causal, stages=2, q_stages=1, by_polynomial=0, turns=True):
        self.name = name
        self.dtype = dtype
        self.d = d
        self.warpgroups = warpgroups
        self.tile_m = ROWS * warpgroups
        self.tile_n = tile_n
        self.causal = causal
        self.stages = stages
        self.q_stages = q_stages
        self.turns = turns
        self.by_polynomial = by_polynomial  # of 16 exponentials
        self.threads = (1 + warpgroups) * WARPGROUP
        self.loader_registers, self.registers = {2: (24, 240), 3: (32, 160)}[warpgroups]

    def mma_qk(self):
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            (self.warpgroups, 1, 1),
            (64, self.tile_n),
        )

    def mma_pv(self):
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.MN,
            Float32,
            (self.warpgroups, 1, 1),
            (64, self.d),
            a_source=warpgroup.OperandSource.RMEM,
        )

    def smem_layouts(self):
        """Staged layouts of q, k and v, and o's pieces, all in 128-byte swizzle."""

        def layout(rows, columns, stages):
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
            return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))

        return (
            layout(self.tile_m, self.d, self.q_stages),
            layout(self.tile_n, self.d, self.stages),
            layout(ROWS, PIECE, self.warpgroups * (self.d // PIECE)),
        )

    def storage(self):
        q_layout, kv_layout, o_layout = self.smem_layouts()

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(kv_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(kv_layout)], 1024]
            o: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(o_layout)], 1024]
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.q_stages]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]

        return Storage

    def smem_bytes(self):
        """What the storage takes, as the launch asks for it."""
        tiles = 2 * self.d * ((1 + self.q_stages) * self.tile_m + 2 * self.stages * self.tile_n)
        return (tiles + 16 * (self.q_stages + 2 * self.stages) + 1023) // 1024 * 1024

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        batch: Int32,
        seq_q: Int32,
        seq_k: Int32,
        heads: Int32,
        kv_heads: Int32,
        scale: Int32,
        band: Int32,
        blocks: Int32,
        stream,
    ):
        q_layout, kv_layout, o_layout = self.smem_layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()

        def packed(pointer, rows, count):
            shape = (rows, self.d, count, batch)
            stride = (self.d, 1, rows * self.d, count * rows * self.d)
            return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

        tma_q, _ = cpasync.make_tiled_tma_atom(
            load,
            packed(q, seq_q, heads),
            cute.slice_(q_layout, (None, None, 0)),
            (self.tile_m, self.d),
        )
        tma_k, _ = cpasync.make_tiled_tma_atom(
            load,
            packed(k, seq_k, kv_heads),
            cute.slice_(kv_layout, (None, None, 0)),
            (self.tile_n, self.d),
        )
        tma_v, _ = cpasync.make_tiled_tma_atom(
            load,
            packed(v, seq_k, kv_heads),
            cute.slice_(kv_layout, (None, None, 0)),
            (self.tile_n, self.d),
        )
        tma_o, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            packed(o, seq_q, heads),
            cute.slice_(o_layout, (None, None, 0)),
            (ROWS, PIECE),
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tma_q, tma_k, tma_v, tma_o, lse, batch, seq_q, seq_k, heads, kv_heads, scale, band
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
        tma_o: cute.CopyAtom,
        lse: cute.Pointer,
        batch: Int32,
        seq_q: Int32,
        seq_k: Int32,
        heads: Int32,
        kv_heads: Int32,
        scale: Int32,
        band: Int32,
    ):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
            cpasync.prefetch_descriptor(tma_v)
            cpasync.prefetch_descriptor(tma_o)

        q_layout, kv_layout, o_layout = self.smem_layouts()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage())
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        sv = storage.v.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        so = storage.o.get_tensor(o_layout.outer, swizzle=o_layout.inner)

        def ring(barriers, stages, rows):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=stages,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                consumer_group=pipeline.CooperativeGroup(
                    pipeline.Agent.Thread, 4 * self.warpgroups
                ),
                tx_count=rows * self.d * 2,
                defer_sync=True,
            )

        q_ring = ring(storage.q_barriers, self.q_stages, self.tile_m)
        k_ring = ring(storage.k_barriers, self.stages, self.tile_n)
        v_ring = ring(storage.v_barriers, self.stages, self.tile_n)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        q_tiles = cute.ceil_div(seq_q, self.tile_m)
        tiles = q_tiles * heads * batch
        k_blocks = cute.ceil_div(seq_k, self.tile_n)
        mine = self.tiles_of_block(tiles)
        one = cute.make_layout(1)

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.loader_registers)
            if warp_index == 0:
                gq = cute.zipped_divide(
                    coordinates(self.d, seq_q, heads, batch), (self.tile_m, self.d)
                )
                gk = cute.zipped_divide(
                    coordinates(self.d, seq_k, kv_heads, batch), (self.tile_n, self.d)
                )
                to_q, from_q = cpasync.tma_partition(tma_q, 0, one, cute.group_modes(sq, 0, 2), gq)
                to_k, from_k = cpasync.tma_partition(tma_k, 0, one, cute.group_modes(sk, 0, 2), gk)
                to_v, from_v = cpasync.tma_partition(tma_v, 0, one, cute.group_modes(sv, 0, 2), gk)
                q_write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.q_stages)
                k_write = pipeline.make_pipeline_state(
                    pipeline.PipelineUserType.Producer, self.stages
                )
                v_write = pipeline.make_pipeline_state(
                    pipeline.PipelineUserType.Producer, self.stages
                )
                for turn in cutlass.range(mine, unroll=1):
                    row, head, entry = self.tile_position(turn, q_tiles, heads, batch, band)
                    kv_head = head // (heads // kv_heads)
                    last = self.last_block(row, seq_q, seq_k, k_blocks)
                    k_ring.producer_acquire(k_write)
                    cute.copy(
                        tma_k,
                        from_k[None, (last - 1, 0, kv_head, entry)],
                        to_k[None, k_write.index],
                        tma_bar_ptr=k_ring.producer_get_barrier(k_write),
                    )
                    k_write.advance()
                    q_ring.producer_acquire(q_write)
                    cute.copy(
                        tma_q,
                        from_q[None, (row, 0, head, entry)],
                        to_q[None, q_write.index],
                        tma_bar_ptr=q_ring.producer_get_barrier(q_write),
                    )
                    q_write.advance()
                    for step in cutlass.range(last - 1, unroll=1):
                        block = last - 1 - step
                        k_ring.producer_acquire(k_write)
                        cute.copy(
                            tma_k,
                            from_k[None, (block - 1, 0, kv_head, entry)],
                            to_k[None, k_write.index],
                            tma_bar_ptr=k_ring.producer_get_barrier(k_write),
                        )
                        k_write.advance()
                        v_ring.producer_acquire(v_write)
                        cute.copy(
                            tma_v,
                            from_v[None, (block, 0, kv_head, entry)],
                            to_v[None, v_write.index],
                            tma_bar_ptr=v_ring.producer_get_barrier(v_write),
                        )
                        v_write.advance()
                    v_ring.producer_acquire(v_write)
                    cute.copy(
                        tma_v,
                        from_v[None, (0, 0, kv_head, entry)],
                        to_v[None, v_write.index],
                        tma_bar_ptr=v_ring.producer_get_barrier(v_write),
                    )
                    v_write.advance()
                v_ring.producer_tail(v_write)
        else:
            cute.arch.setmaxregister_increase(self.registers)
            wg = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
            lane = thread % 32
            wg_thread = thread % WARPGROUP
            scale_log2 = float_from_bits(scale)

            mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
            qk_part = mma_qk.get_slice(wg * WARPGROUP)
            pv_part = mma_pv.get_slice(wg * WARPGROUP)
            rq = mma_qk.make_fragment_A(qk_part.partition_A(sq))
            rk = mma_qk.make_fragment_B(qk_part.partition_B(sk))
            v_columns = cute.make_tensor(sv.iterator, cute.select(sv.layout, [1, 0, 2]))
            rv = mma_pv.make_fragment_B(pv_part.partition_B(v_columns))
            s = cute.make_rmem_tensor(
                mma_qk.partition_shape_C((self.tile_m, self.tile_n)), Float32
            )
            sums = cute.make_rmem_tensor(mma_pv.partition_shape_C((self.tile_m, self.d)), Float32)
            p = mma_pv.make_fragment_A(mma_pv.partition_shape_A((self.tile_m, self.tile_n)))
            row_max = cute.make_rmem_tensor(2, Float32)
            row_sum = cute.make_rmem_tensor(2, Float32)
            rescale = cute.make_rmem_tensor(2, Float32)

            # The output's way: registers, stmatrix, 64x64 pieces in shared memory, TMA stores.
            epi_mma = hopper.make_trivial_tiled_mma(
                self.dtype,
                self.dtype,
                warpgroup.OperandMajorMode.K,
                warpgroup.OperandMajorMode.K,
                Float32,
                (1, 1, 1),
                (64, PIECE),
            )
            stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
            r2s = cute.make_tiled_copy_S(stmatrix, cute.make_tiled_copy_C_atom(stmatrix, epi_mma))
            to_so = r2s.get_slice(wg_thread).partition_D(so)
            piece = cute.make_rmem_tensor(to_so.shape[:3], self.dtype)
            go = cute.zipped_divide(coordinates(self.d, seq_q, heads, batch), (ROWS, PIECE))
            from_so, to_o = cpasync.tma_partition(tma_o, 0, one, cute.group_modes(so, 0, 2), go)

            q_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.q_stages)
            k_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            v_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            # The first row's place in a tile, and the first column's in a block of keys.
            my_row = wg * ROWS + wg_thread // 32 * 16 + lane // 4
            my_column = lane % 4 * 2
            offset = seq_k - seq_q

            if wg == self.warpgroups - 1:
                _arrive(_TURN + 0, 2 * WARPGROUP)

            # The first tile's first block of keys: scores and softmax alone.
            row, head, entry = self.tile_position(Int32(0), q_tiles, heads, batch, band)
            last = self.last_block(row, seq_q, seq_k, k_blocks)
            q_ring.consumer_wait(q_read)
            k_ring.consumer_wait(k_read)
            warpgroup.fence()
            self.multiply_qk(s, rq, rk, q_read.index, k_read.index)
            sums.fill(0.0)
            warpgroup.wait_group(0)
            k_ring.consumer_release(k_read)
            k_read.advance()
            if self.needs_mask(last, seq_k):
                at_row = row * self.tile_m + my_row
                self.mask(s, (last - 1) * self.tile_n + my_column, at_row, offset, seq_k)
            self.softmax(s, row_max, row_sum, rescale, scale_log2, True, True)
            self.to_p(s, p)

            for turn in cutlass.range(mine, unroll=1):
                # Blocks that need a mask: those of the diagonal.
                at_row = row * self.tile_m + my_row
                free = last - 1
                if const_expr(self.causal):
                    free = cutlass.min(
                        free, cutlass.max(row * self.tile_m + offset + 1, 0) // self.tile_n
                    )
                    for step in cutlass.range(last - 1 - free, unroll=1):
                        block = last - 2 - step
                        k_ring.consumer_wait(k_read)
                        self.wait_for_turn(wg)
                        warpgroup.fence()
                        self.multiply_qk(s, rq, rk, q_read.index, k_read.index)
                        v_ring.consumer_wait(v_read)
                        self.multiply_pv(sums, p, rv, v_read.index)
                        self.pass_turn(wg)
                        warpgroup.wait_group(1)
                        k_ring.consumer_release(k_read)
                        self.mask(s, block * self.tile_n + my_column, at_row, offset, seq_k)
                        self.softmax(s, row_max, row_sum, rescale, scale_log2, False, True)
                        self.finish_block(s, p, sums, rescale, v_ring, v_read)
                        k_read.advance()
                        v_read.advance()
                for _ in cutlass.range(free, unroll=1):
                    k_ring.consumer_wait(k_read)
                    self.wait_for_turn(wg)
                    warpgroup.fence()
                    self.multiply_qk(s, rq, rk, q_read.index, k_read.index)
                    v_ring.consumer_wait(v_read)
                    self.multiply_pv(sums, p, rv, v_read.index)
                    self.pass_turn(wg)
                    warpgroup.wait_group(1)
                    k_ring.consumer_release(k_read)
                    self.softmax(s, row_max, row_sum, rescale, scale_log2, False, False)
                    self.finish_block(s, p, sums, rescale, v_ring, v_read)
                    k_read.advance()
                    v_read.advance()
                q_ring.consumer_release(q_read)
                q_read.advance()

                # The last block's values, and the next tile's first scores. After the last tile
                # they are of whatever lies there, and nobody looks.
                more = turn + 1 < mine
                next_row, next_head, next_entry = self.tile_position(
                    turn + 1, q_tiles, heads, batch, band
                )
                next_last = self.last_block(next_row, seq_q, seq_k, k_blocks)
                if more:
                    q_ring.consumer_wait(q_read)
                    k_ring.consumer_wait(k_read)
                self.wait_for_turn(wg)
                warpgroup.fence()
                self.multiply_qk(s, rq, rk, q_read.index, k_read.index)
                v_ring.consumer_wait(v_read)
                self.multiply_pv(sums, p, rv, v_read.index)
                self.pass_turn(wg)

                for r in cutlass.range_constexpr(2):
                    total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
                    rescale[r] = inverse(total)
                    row_sum[r] = total
                if lse.toint() != 0:
                    if lane % 4 == 0:
                        to_lse = lse + cutlass.Int64(entry * heads + head) * seq_q
                        for r in cutlass.range_constexpr(2):
                            if at_row + 8 * r < seq_q:
                                value = row_max[r] * scale_log2 + cute.math.log2(row_sum[r])
                                (to_lse + (at_row + 8 * r)).store(value * _LN2)

                warpgroup.wait_group(1)
                if more:
                    k_ring.consumer_release(k_read)
                k_read.advance()
                if self.needs_mask(next_last, seq_k):
                    next_at = next_row * self.tile_m + my_row
                    column = (next_last - 1) * self.tile_n + my_column
                    self.mask(s, column, next_at, offset, seq_k)
                self.softmax(s, row_max, row_sum, rescale, scale_log2, True, True)

                if warp_index % 4 == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                _sync(_WARPGROUP + wg, WARPGROUP)
                warpgroup.wait_group(0)
                v_ring.consumer_release(v_read)
                v_read.advance()
                self.to_p(s, p)
                for chunk in cutlass.range_constexpr(self.d // PIECE):
                    values = cute.size(piece)
                    for i in cutlass.range_constexpr(values):
                        value = sums[chunk * values + i] * rescale[i // 2 % 2]
                        piece[i] = value.to(self.dtype)
                    cute.copy(
                        r2s, piece, to_so[None, None, None, wg * (self.d // PIECE) + chunk]
                    )
                cute.arch.fence_proxy("async.shared", space="cta")
                _sync(_WARPGROUP + wg, WARPGROUP)
                if warp_index % 4 == 0:
                    for chunk in cutlass.range_constexpr(self.d // PIECE):
                        cute.copy(
                            tma_o,
                            from_so[None, wg * (self.d // PIECE) + chunk],
                            to_o[None, (row * self.warpgroups + wg, chunk, head, entry)],
                        )
                    cute.arch.cp_async_bulk_commit_group()
                sums.fill(0.0)
                row, head, entry, last = next_row, next_head, next_entry, next_last
            if warp_index % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def tiles_of_block(self, tiles):
        blocks = cute.arch.grid_dim()[0]
        rounds = tiles // blocks
        if self.place(rounds) < tiles:
            rounds += 1
        return rounds

    @cute.jit
    def place(self, turn):
        """The block's tile in a round. With tiles of falling length, rounds alternate in direction,
        so that all blocks get the same length in two."""
        block = cute.arch.block_idx()[0]
        blocks = cute.arch.grid_dim()[0]
        if const_expr(self.causal):
            block = blocks - 1 - block if turn % 2 == 1 else block
        return turn * blocks + block

    @cute.jit
    def tile_position(self, turn, q_tiles, heads, batch, band):
        """Row of tiles, head and batch entry: bands of heads, longest tiles first in each."""
        tile = self.place(turn)
        section = tile // (band * q_tiles)
        height = cutlass.min(heads * batch - section * band, band)
        height = cutlass.max(height, 1)  # of a tile after the last one
        within = tile - section * band * q_tiles
        row = within // height
        pair = section * band + within - row * height
        if const_expr(self.causal):
            row = q_tiles - 1 - row
        entry = pair // heads
        return row, pair - entry * heads, entry

    @cute.jit
    def last_block(self, row, seq_q, seq_k, k_blocks):
        """One more than the last block of keys that a tile of rows sees; at least one."""
        last = k_blocks
        if const_expr(self.causal):
            seen = (row + 1) * self.tile_m + seq_k - seq_q
            last = cutlass.max(1, cutlass.min(k_blocks, cute.ceil_div(seen, self.tile_n)))
        return last

    def multiply_qk(self, s, rq, rk, q_stage, stage):
        mma = self.mma_qk()
        for block in range(self.d // 16):
            mma.set(warpgroup.Field.ACCUMULATE, block != 0)
            cute.gemm(mma, s, rq[None, None, block, q_stage], rk[None, None, block, stage], s)
        warpgroup.commit_group()

    def multiply_pv(self, sums, p, rv, stage):
        mma = self.mma_pv()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for block in range(self.tile_n // 16):
            cute.gemm(mma, sums, p[None, None, block], rv[None, None, block, stage], sums)
        warpgroup.commit_group()

    def needs_mask(self, last, seq_k):
        """Whether a tile's first block has keys that some row does not see."""
        return True if self.causal else last * self.tile_n > seq_k

    @cute.jit
    def pass_turn(self, wg):
        if const_expr(self.turns):
            next_wg = wg + 1
            if next_wg == self.warpgroups:
                next_wg = Int32(0)
            _arrive(_TURN + next_wg, 2 * WARPGROUP)

    def wait_for_turn(self, wg):
        if self.turns:
            _sync(_TURN + wg, 2 * WARPGROUP)

    @cute.jit
    def finish_block(self, s, p, sums, rescale, v_ring, v_read):
        warpgroup.wait_group(0)
        v_ring.consumer_release(v_read)
        self.to_p(s, p)
        if cute.arch.vote_any_sync(rescale[0] * rescale[1] != 1.0):
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] = sums[i] * rescale[i // 2 % 2]

    def to_p(self, s, p):
        pairs = cute.recast_tensor(p, Int32)
        for i in range(cute.size(s) // 2):
            pairs[i] = pack(s[2 * i], s[2 * i + 1], self.dtype)

    @cute.jit
    def mask(self, s, column, row, offset, seq_k):
        """Minus infinity for keys after the last one or, if causal, after the row's own."""
        for r in cutlass.range_constexpr(2):
            end = seq_k - column
            if const_expr(self.causal):
                end = cutlass.min(end, row + 8 * r + offset + 1 - column)
            for i in cutlass.range_constexpr(self.tile_n // 8):
                for e in cutlass.range_constexpr(2):
                    at = 4 * i + 2 * r + e
                    s[at] = s[at] if end > 8 * i + e else -Float32.inf

    @cute.jit
    def softmax(
        self,
        s,
        row_max,
        row_sum,
        rescale,
        scale,
        first: cutlass.Constexpr[bool],
        masked: cutlass.Constexpr[bool],
    ):
        """Scores become probabilities up to a factor; updates the rows' maxima and sums."""
        for r in cutlass.range_constexpr(2):
            places = [4 * i + 2 * r + e for i in range(self.tile_n // 8) for e in range(2)]
            best = tree([s[at] for at in places], cute.arch.fmax)
            best = cute.arch.warp_reduction_max(best, threads_in_group=4)
            if const_expr(not first):
                best = cute.arch.fmax(best, row_max[r])
                # Any maximum near the true one will do: keep it, and what it scaled, for long.
                best = row_max[r] if (best - row_max[r]) * scale <= _SLACK else best
            safe = best
            if const_expr(masked):
                safe = best if best != -Float32.inf else Float32(0.0)
            shift = safe * scale
            for j in cutlass.range_constexpr(len(places)):
                power = s[places[j]] * scale - shift
                if const_expr(not masked and j % 16 < self.by_polynomial):
                    s[places[j]] = exp2_polynomial(power)
                else:
                    s[places[j]] = cute.math.exp2(power, fastmath=True)
            total = tree([s[at] for at in places], lambda a, b: a + b)
            if const_expr(first):
                row_sum[r] = total
            else:
                rescale[r] = cute.math.exp2(row_max[r] * scale - shift, fastmath=True)
                row_sum[r] = row_sum[r] * rescale[r] + total
            row_max[r] = best


def tree(values, combine):
    """All values combined, in four chains."""
    chains = values[:4]
    for i, value in enumerate(values[4:]):
        chains[i % 4] = combine(chains[i % 4], value)
    return combine(combine(chains[0], chains[1]), combine(chains[2], chains[3]))


def _sync(barrier, threads):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def _arrive(barrier, threads):
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)


@cute.jit
def inverse(total):
    """1 / total; 0 of a row without keys."""
    return cute.arch.rcp_approx(total) if total != 0.0 else Float32(0.0)


def pack(low, high, dtype):
    """Two values in one register."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[high, low],
    )


def exp2_polynomial(x):
    """2**x for x <= 0, below 2**-126 something as small, without the unit for special functions."""
    x = cute.arch.fmax(x, -127.0, nan=True)
    shifted = x + _ROUND
    f = x - (shifted - _ROUND)
    power = Float32(_POLYNOMIAL[-1])
    for coefficient in reversed(_POLYNOMIAL[:-1]):
        power = power * f + coefficient
    return cute.arch.inline_ptx(
        "{ .reg .b32 n, p; mov.b32 n, {$r0}; mov.b32 p, {$r1}; shl.b32 n, n, 23; add.s32 p, p, n; "
        "mov.b32 {$w0}, p; }",
        write_only_types=[Float32],
        read_only_args=[shifted, power],
    )


def float_from_bits(bits):
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )


def coordinates(d, rows, heads, batch):
    """What a map of [batch, heads, rows, d] is indexed with, as a (rows, d, heads, batch) tensor."""
    identity = cute.make_identity_tensor((d, rows, heads, batch))
    return cute.make_tensor(identity.iterator, cute.select(identity.layout, [1, 0, 2, 3]))
