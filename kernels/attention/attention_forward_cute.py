# SPDX-License-Identifier: Apache-2.0
"""o = softmax(q k^T * scale, masked) v for many queries: TMA, wgmma, persistent blocks.

A block works on tiles of 64 query rows a warpgroup. One warp loads q, k and v: q once a tile, k and
v in blocks of `tile_n` keys through rings of stages, from the last block that a tile needs to the
first. Each multiplying warpgroup keeps its scores, probabilities and sums of o in registers: while
block i's softmax runs, the tensor cores multiply block i + 1's scores and block i - 1's values, of
this warpgroup and, as named barriers let them take turns, of the next one.

Floor: 2 * D multiply-adds a score, of 2048 a cycle and multiprocessor: 16 scores a cycle at D = 64,
as many as there are exponentials, and 8 at D = 128.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from attention_layouts_cute import PIECE, ROWS, WARPGROUP
from attention_packed_cute import clear_rows_of_no_sequence
from attention_softmax_cute import cap, inverse, largest
from attention_steps_cute import AttentionSteps, sync
from attention_tiles_cute import free_blocks, rounds_of_block
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

_WARPGROUP = 1  # and up, a named barrier each: within one warpgroup

# Where a mask hides some of other blocks than the first: at 0, the upper edge, or 2, the lower.
_EDGES = (("causal", 0), ("window", 0), ("window", 2))

_LN2 = 0.6931471805599453


class AttentionForward(AttentionSteps):
    @cute.jit
    def run(
        self,
        tma_q,
        tma_k,
        tma_v,
        tma_o,
        lse,
        packed,
        factors,
        batch,
        seq_q,
        seq_k,
        heads,
        kv_heads,
        scale,
        slope,
        left,
        right,
        band,
    ):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
            cpasync.prefetch_descriptor(tma_v)
            cpasync.prefetch_descriptor(tma_o)

        storage = cutlass.utils.SmemAllocator().allocate(self.storage())
        sq, sk, sv, so = [
            range_.get_tensor(layout.outer, swizzle=layout.inner)
            for range_, layout in zip(
                (storage.q, storage.k, storage.v, storage.o), self.smem_layouts(), strict=True
            )
        ]

        def ring(barriers, stages, elements):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=stages,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                consumer_group=pipeline.CooperativeGroup(
                    pipeline.Agent.Thread, 4 * self.warpgroups
                ),
                tx_count=elements * self.dtype.width // 8,
                defer_sync=True,
            )

        q_ring = ring(storage.q_barriers, self.q_stages, self.tile_m * self.d)
        k_ring = ring(storage.k_barriers, self.stages, self.tile_n * self.d)
        values, columns = self.value_tile()
        v_ring = ring(storage.v_barriers, self.stages, values * columns)
        self.prepare(storage)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        q_tiles = cute.ceil_div(seq_q, self.tile_m)
        tiles = q_tiles * heads * batch
        mine = rounds_of_block(tiles, self.mask != "none")

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.loader_registers)
            if warp_index == 0:
                q_write = pipeline.make_pipeline_state(
                    pipeline.PipelineUserType.Producer, self.q_stages
                )
                k_write = pipeline.make_pipeline_state(
                    pipeline.PipelineUserType.Producer, self.stages
                )
                v_write = pipeline.make_pipeline_state(
                    pipeline.PipelineUserType.Producer, self.stages
                )
                for turn in cutlass.range(mine, unroll=1):
                    row, head, entry = self.tile(turn, q_tiles, heads, batch, band)
                    kv_head = head // (heads // kv_heads)
                    queries, keys, q_at, k_at, _ = self.sequence(packed, entry, batch, seq_q, seq_k)
                    low, last = self.key_blocks(row, queries, keys, left, right)
                    q_extents = ((seq_q, self.d), heads, batch)
                    k_extents = ((seq_k, self.d), kv_heads, batch)
                    v_extents = (self.value_matrix(seq_k), kv_heads, batch)
                    q_tile, k_tile = (self.tile_m, self.d), (self.tile_n, self.d)
                    v_tile = self.value_tile()
                    q_hidden, k_hidden = self.hidden(queries), self.hidden(keys)
                    to_q, from_q = self.tma_places(tma_q, sq, q_tile, q_extents, q_hidden)
                    to_k, from_k = self.tma_places(tma_k, sk, k_tile, k_extents, k_hidden)
                    to_v, from_v = self.value_places(tma_v, sv, v_tile, v_extents, k_hidden)
                    v_at = self.value_start(entry, keys, k_at, batch)
                    k_ring.producer_acquire(k_write)
                    cute.copy(
                        tma_k,
                        from_k[None, (last - 1, 0, kv_head, *self.whose(k_at))],
                        to_k[None, k_write.index],
                        tma_bar_ptr=k_ring.producer_get_barrier(k_write),
                    )
                    k_write.advance()
                    q_ring.producer_acquire(q_write)
                    cute.copy(
                        tma_q,
                        from_q[None, (row, 0, head, *self.whose(q_at))],
                        to_q[None, q_write.index],
                        tma_bar_ptr=q_ring.producer_get_barrier(q_write),
                    )
                    q_write.advance()
                    for step in cutlass.range(last - 1 - low, unroll=1):
                        block = last - 1 - step
                        k_ring.producer_acquire(k_write)
                        cute.copy(
                            tma_k,
                            from_k[None, (block - 1, 0, kv_head, *self.whose(k_at))],
                            to_k[None, k_write.index],
                            tma_bar_ptr=k_ring.producer_get_barrier(k_write),
                        )
                        k_write.advance()
                        v_ring.producer_acquire(v_write)
                        cute.copy(
                            tma_v,
                            from_v[None, self.value_place(block, kv_head, v_at)],
                            to_v[None, v_write.index],
                            tma_bar_ptr=v_ring.producer_get_barrier(v_write),
                        )
                        v_write.advance()
                    v_ring.producer_acquire(v_write)
                    cute.copy(
                        tma_v,
                        from_v[None, self.value_place(low, kv_head, v_at)],
                        to_v[None, v_write.index],
                        tma_bar_ptr=v_ring.producer_get_barrier(v_write),
                    )
                    v_write.advance()
                v_ring.producer_tail(v_write)
            else:
                if const_expr(self.packed):
                    clear_rows_of_no_sequence(
                        *(packed, lse, batch, heads, q_tiles * self.tile_m),
                        *(self.out_dtype, self.d // 8, thread),
                    )
        else:
            cute.arch.setmaxregister_increase(self.registers)
            wg = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
            lane = thread % 32
            wg_thread = thread % WARPGROUP
            mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
            qk_part = mma_qk.get_slice(wg * WARPGROUP)
            pv_part = mma_pv.get_slice(wg * WARPGROUP)
            rq = mma_qk.make_fragment_A(qk_part.partition_A(sq))
            rk = mma_qk.make_fragment_B(qk_part.partition_B(sk))
            rv = mma_pv.make_fragment_B(pv_part.partition_B(self.value_columns(sv)))
            s = cute.make_rmem_tensor(mma_qk.partition_shape_C((self.tile_m, self.tile_n)), Float32)
            sums = self.make_sums(mma_pv.partition_shape_C((self.tile_m, self.d + self.counted)))
            p = mma_pv.make_fragment_A(mma_pv.partition_shape_A((self.tile_m, self.tile_n)))
            row_max = cute.make_rmem_tensor(2, Float32)
            row_sum = cute.make_rmem_tensor(2, Float32)
            rescale = cute.make_rmem_tensor(2, Float32)
            unused = cute.make_rmem_tensor(2, Float32)

            # The output's way: registers, stmatrix, 64x64 pieces in shared memory, TMA stores.
            epi_mma = hopper.make_trivial_tiled_mma(
                self.out_dtype,
                self.out_dtype,
                warpgroup.OperandMajorMode.K,
                warpgroup.OperandMajorMode.K,
                Float32,
                (1, 1, 1),
                (64, PIECE),
            )
            stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.out_dtype)
            r2s = cute.make_tiled_copy_S(stmatrix, cute.make_tiled_copy_C_atom(stmatrix, epi_mma))
            to_so = r2s.get_slice(wg_thread).partition_D(so)
            piece = cute.make_rmem_tensor(to_so.shape[:3], self.out_dtype)

            q_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.q_stages)
            k_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            v_read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            # The first row's place in a tile, and the first column's in a block of keys.
            my_row = wg * ROWS + wg_thread // 32 * 16 + lane // 4
            my_column = lane % 4 * 2
            rows = (row_max, row_sum, rescale)
            if wg == self.warpgroups - 1:
                self.give_turn(0)

            # The first tile's first block of keys: scores and softmax alone.
            row, head, entry = self.tile(Int32(0), q_tiles, heads, batch, band)
            queries, keys, q_at, _, start = self.sequence(packed, entry, batch, seq_q, seq_k)
            low, last = self.key_blocks(row, queries, keys, left, right)
            sizes = (batch, heads, kv_heads)
            scale_log2, slope_float, gain = self.scales(factors, entry, head, sizes, scale, slope)
            q_ring.consumer_wait(q_read)
            k_ring.consumer_wait(k_read)
            warpgroup.fence()
            self.multiply_qk(s, rq, rk, q_read.index, k_read.index)
            self.clear(sums)
            warpgroup.wait_group(0)
            k_ring.consumer_release(k_read)
            k_read.advance()
            if const_expr(self.capped):
                cap(s, slope_float)
            if self.needs_mask(last, keys):
                own = row * self.tile_m + my_row + keys - queries
                self.hide(s, (last - 1) * self.tile_n + my_column, own, keys, left, right)
            self.soften(s, rows, scale_log2, True, True)
            self.to_operand(s, p)
            self.count(s, rows, lse, True)

            for turn in cutlass.range(mine, unroll=1):
                at_row = row * self.tile_m + my_row
                offset = keys - queries
                bottom, top = free_blocks(
                    row * self.tile_m + offset,
                    *(self.tile_m, self.tile_n, low, last, left, right, self.mask),
                )
                # Blocks at the mask's upper edge, then free ones, then those at its lower edge.
                for part in cutlass.range_constexpr(3):
                    masked = part != 1
                    begin, end = ((top, last - 1), (bottom, top), (low, bottom))[part]
                    if const_expr(part == 1 or (self.mask, part) in _EDGES):
                        for step in cutlass.range(end - begin, unroll=1):
                            k_ring.consumer_wait(k_read)
                            self.start(s, sums, p, rq, rk, rv, q_read, k_read, v_read, v_ring, wg)
                            warpgroup.wait_group(1)
                            k_ring.consumer_release(k_read)
                            if const_expr(self.capped):
                                cap(s, slope_float)
                            if const_expr(masked):
                                column = (end - 1 - step) * self.tile_n + my_column
                                self.hide(s, column, at_row + offset, keys, left, right)
                            self.absorb(
                                *(s, sums, p, rows, scale_log2, masked),
                                *(v_read, v_ring, lse, batch),
                            )
                            k_read.advance()
                            v_read.advance()
                q_ring.consumer_release(q_read)
                q_read.advance()

                # The last block's values, and the next tile's first scores. After the last tile
                # they are of whatever lies there, and nobody looks.
                more = turn + 1 < mine
                next_row, next_head, next_entry = self.tile(turn + 1, q_tiles, heads, batch, band)
                next_queries, next_keys, next_at, _, next_start = self.sequence(
                    packed, next_entry, batch, seq_q, seq_k
                )
                next_low, next_last = self.key_blocks(
                    next_row, next_queries, next_keys, left, right
                )
                next_scale, next_slope, next_gain = self.scales(
                    factors, next_entry, next_head, sizes, scale, slope
                )
                if more:
                    q_ring.consumer_wait(q_read)
                    k_ring.consumer_wait(k_read)
                self.start(s, sums, p, rq, rk, rv, q_read, k_read, v_read, v_ring, wg)

                for r in cutlass.range_constexpr(2):
                    total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
                    rescale[r] = inverse(total)
                    if const_expr(gain is not None):
                        rescale[r] = rescale[r] * gain
                    row_sum[r] = total
                if lse.toint() != 0:
                    if lane % 4 == 0:
                        to_lse = lse + self.lse_place(packed, entry, head, heads, seq_q, start)
                        for r in cutlass.range_constexpr(2):
                            if at_row + 8 * r < queries:
                                value = largest(row_max[r], self.limited(scale_log2))
                                value += cute.math.log2(row_sum[r])
                                if const_expr(self.lift != 0.0):
                                    value -= self.lift
                                (to_lse + (at_row + 8 * r)).store(value * _LN2)

                warpgroup.wait_group(1)
                if more:
                    k_ring.consumer_release(k_read)
                k_read.advance()
                if const_expr(self.capped):
                    cap(s, next_slope)
                if self.needs_mask(next_last, next_keys):
                    own = next_row * self.tile_m + my_row + next_keys - next_queries
                    column = (next_last - 1) * self.tile_n + my_column
                    self.hide(s, column, own, next_keys, left, right)
                self.soften(s, rows[:2] + (unused,), next_scale, True, True)

                warpgroup.wait_group(0)
                v_ring.consumer_release(v_read)
                v_read.advance()
                self.to_operand(s, p)
                self.count(s, rows, lse, True)
                self.normalize(sums, rescale, gain)
                values = cute.size(piece)
                from_so, to_o = self.tma_places(
                    *(tma_o, so, (ROWS, PIECE), ((seq_q, self.d), heads, batch)),
                    self.hidden(queries),
                )
                for chunk in cutlass.range_constexpr(self.d // PIECE):
                    stage = chunk % self.o_stages
                    if const_expr(stage == 0):
                        if warp_index % 4 == 0:
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                        sync(_WARPGROUP + wg, WARPGROUP)
                    for i in cutlass.range_constexpr(values):
                        value = self.total(sums, chunk * values + i) * rescale[i // 2 % 2]
                        piece[i] = value.to(self.out_dtype)
                    cute.copy(r2s, piece, to_so[None, None, None, wg * self.o_stages + stage])
                    if const_expr(stage == self.o_stages - 1):
                        cute.arch.fence_proxy("async.shared", space="cta")
                        sync(_WARPGROUP + wg, WARPGROUP)
                        if warp_index % 4 == 0:
                            for i in cutlass.range_constexpr(self.o_stages):
                                at, column = row * self.warpgroups + wg, chunk - stage + i
                                cute.copy(
                                    tma_o,
                                    from_so[None, wg * self.o_stages + i],
                                    to_o[None, (at, column, head, *self.whose(q_at))],
                                )
                            cute.arch.cp_async_bulk_commit_group()
                self.clear(sums)
                row, head, entry = next_row, next_head, next_entry
                low, last = next_low, next_last
                scale_log2, slope_float, gain = next_scale, next_slope, next_gain
                queries, keys, q_at, start = next_queries, next_keys, next_at, next_start
            if warp_index % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
