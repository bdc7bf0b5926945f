# SPDX-License-Identifier: Apache-2.0
"""The gradients for D = 192 and Dv = 128, as in latent attention.

A warpgroup's accumulators, dk and dv of 64 keys, take 160 of 240 registers, so less fits beside
them than in kernel.py: a block's dp starts only when its s has become a 16-bit operand p, ds is
computed from that, and dk reads ds from shared memory. dq has three pieces of 64 columns, of which
the first warpgroup computes two: so it runs behind the second one, and one multiplies while the
other computes.

Lower bound of a step of 64 queries by 128 keys: products 64 * 128 * (3 * 192 + 2 * 128) / 2048 =
3328 cycles. Shared memory at 128 bytes a cycle: s and dp 1280, dv and dk 768, dq 768, ds 128, dq in
and out 768, copies 320, rows' sums 128: 4160. Shared memory: q 48 KiB, its gradient 32, k 48, v 32,
ds 32, dq 32: 224 of 227.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from kernels.attention.backward.kernel import (
    DS_WRITTEN,
    EMPTY,
    FULL,
    OUT_THREADS,
    WARPGROUPS,
    AttentionBackward,
    add_floats,
    anew,
)
from kernels.attention.backward.registers import (
    probabilities,
    score_gradients_of_operand,
    store_plain,
    store_rows,
    store_transposed,
    transposed_place,
)
from kernels.attention.backward.tile_queue import receive
from kernels.attention.backward.tiles import needs_mask, query_blocks
from kernels.attention.common.layouts import PIECE, ROWS, WARPGROUP, transposed
from kernels.attention.common.pipelines import arrive, reader, sync
from kernels.attention.common.softmax import hold, to_operand

_PIECE_BYTES = ROWS * PIECE * 4  # of dq


class AttentionBackwardNarrow(AttentionBackward):
    """For 64 queries a block, without a cap, in bfloat16."""

    def output_bytes(self):
        """A piece of dq in float32, then 128 columns of dv or dk."""
        return _PIECE_BYTES

    def mma_dq(self):
        """A piece of dq = ds^T k, of one warpgroup."""
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.MN,
            Float32,
            (1, 1, 1),
            (64, PIECE),
        )

    def mma_k(self):
        """dk += ds q, with ds from shared memory."""
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.MN,
            warpgroup.OperandMajorMode.MN,
            Float32,
            (WARPGROUPS, 1, 1),
            (64, self.d),
        )

    @cute.jit
    def consume(
        self,
        q,
        do,
        k,
        v,
        sds,
        out_address,
        ds_address,
        stats_address,
        queue,
        order,
        sight,
        problem,
        shared_by,
    ):
        (sq, q_ring), (sdo, do_ring), (sk, k_ring), (sv, v_ring) = q, do, k, v
        thread = cute.arch.thread_idx()[0]
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        wg_thread = thread % WARPGROUP
        mma_sp, mma_dq = self.mma_sp(), self.mma_dq()
        mma_k, mma_v = self.mma_k(), self.mma_kv(self.d_v)
        sp_part = mma_sp.get_slice(wg * WARPGROUP)
        k_part, v_part = (mma.get_slice(wg * WARPGROUP) for mma in (mma_k, mma_v))
        dq_part = mma_dq.get_slice(0)

        rk = mma_sp.make_fragment_A(sp_part.partition_A(sk))[None, None, None, 0]
        rv = mma_sp.make_fragment_A(sp_part.partition_A(sv))[None, None, None, 0]
        rq = mma_sp.make_fragment_B(sp_part.partition_B(sq))
        rdo = mma_sp.make_fragment_B(sp_part.partition_B(sdo))
        q_columns = mma_k.make_fragment_B(k_part.partition_B(transposed(sq)))
        do_columns = mma_v.make_fragment_B(v_part.partition_B(transposed(sdo)))
        rds = mma_dq.make_fragment_A(dq_part.partition_A(sds))
        ds_keys = mma_k.make_fragment_A(k_part.partition_A(transposed(sds)))

        def piece_of_k(piece):
            one = cute.local_tile(transposed(sk), (PIECE, self.tile_n), (piece, 0, None))
            return mma_dq.make_fragment_B(dq_part.partition_B(one))

        k_piece, k_last = piece_of_k(wg), piece_of_k(WARPGROUPS)

        scores = mma_sp.partition_shape_C((self.tile_n, self.tile_m))
        dk = cute.make_rmem_tensor(mma_k.partition_shape_C((self.tile_n, self.d)), Float32)
        dv = cute.make_rmem_tensor(mma_v.partition_shape_C((self.tile_n, self.d_v)), Float32)
        dq_sums = mma_dq.partition_shape_C((self.tile_m, PIECE))
        p = mma_v.make_fragment_A(mma_v.partition_shape_A((self.tile_n, self.tile_m)))

        read, kv_read = reader(2), reader(1)  # of both q and its gradient
        my_stats = stats_address + wg_thread % 4 * 8
        my_ds = ds_address + wg * self.tile_m * 2 * PIECE + transposed_place(wg_thread)
        my_out = out_address + wg * self.part_bytes
        scale_log2 = problem.scale.bitcast(Float32)
        depth, keys_depth = self.tile_m // 16, self.tile_n // 16

        turn, details = Int32(1), self.details()
        tile = receive(queue, Int32(0), details)
        while tile >= 0:
            (column, _, _), keys, _, seen = self.tile(tile, details, order, sight, problem)
            key = column * self.tile_n
            first, end = query_blocks(key, self.tile_n, *seen)
            steps = (end - first) * shared_by
            block = first
            dk.fill(0.0)
            dv.fill(0.0)
            if steps > 0:
                k_ring.consumer_wait(kv_read)
                v_ring.consumer_wait(kv_read)
            for step in cutlass.range(steps, unroll=1):
                last = step + 1 == steps
                # New fragments, so that no register keeps the old ones.
                s, dp = (cute.make_rmem_tensor(scores, Float32) for _ in range(2))
                dqs = cute.make_rmem_tensor(dq_sums, Float32)
                q_ring.consumer_wait(read)
                warpgroup.fence()
                self.multiply(mma_sp, s, rk, rq, read.index, self.d // 16)
                do_ring.consumer_wait(read)
                lse = my_stats + read.index * self.stats_bytes
                warpgroup.wait_group(0)
                query = block * self.tile_m
                if needs_mask(key, self.tile_n, query, self.tile_m, keys, *seen[2:]):
                    self.hide(s, key, query, keys, *seen[2:])
                probabilities(s, lse, scale_log2)
                to_operand(s, p, self.dtype)
                hold(block)  # else the product begins first, and needs more registers
                warpgroup.fence()
                self.multiply(mma_sp, dp, rv, rdo, read.index, self.d_v // 16)
                warpgroup.wait_group(0)
                if last:
                    v_ring.consumer_release(kv_read)
                ds = cute.make_rmem_tensor(scores, self.dtype)
                score_gradients_of_operand(p, dp, ds, lse + 4 * self.tile_m, self.dtype)
                store_transposed(ds, my_ds + read.index * (2 * self.tile_m * self.tile_n))

                warpgroup.fence()
                self.accumulate(mma_v, dv, p, do_columns, read.index, depth)
                cute.arch.fence_proxy("async.shared", space="cta")
                sync(DS_WRITTEN, WARPGROUPS * WARPGROUP)
                warpgroup.fence()
                part_of_ds = rds[None, None, None, read.index]
                self.multiply(mma_dq, dqs, part_of_ds, k_piece, 0, keys_depth)
                ds_key = ds_keys[None, None, None, read.index]
                self.accumulate(mma_k, dk, ds_key, q_columns, read.index, depth)
                warpgroup.wait_group(1)  # dv and dq
                do_ring.consumer_release(read)
                self.hand_over(dqs, my_out, wg, wg_thread)
                if wg == 0:
                    warpgroup.fence()
                    more = cute.make_rmem_tensor(dq_sums, Float32)
                    self.multiply(mma_dq, more, part_of_ds, k_last, 0, keys_depth)
                    warpgroup.wait_group(0)
                    self.hand_over(more, my_out, wg, wg_thread)
                warpgroup.wait_group(0)  # dk
                if last:
                    k_ring.consumer_release(kv_read)
                    kv_read.advance()
                q_ring.consumer_release(read)
                read.advance()
                block += 1
                block = first if block == end else block

            own = anew(wg_thread)
            gain = problem.gain.bitcast(Float32)
            half = cute.size(dv)  # of dk: 128 columns
            self.store_part(dv, Float32(1.0), 0, half, my_out, wg, own)
            self.store_part(dk, gain, 0, half, my_out, wg, own)
            self.store_part(dk, gain, half, cute.size(dk), my_out, wg, own)
            tile = receive(queue, turn, details)
            turn += 1

    @cute.jit
    def hand_over(self, dqs, my_out, wg, wg_thread):
        """A piece of dq to warp 1."""
        sync(EMPTY + wg, OUT_THREADS)
        store_plain(dqs, my_out + wg_thread * 16)
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive(FULL + wg, OUT_THREADS)

    @cute.jit
    def store_part(
        self,
        sums,
        factor,
        begin: cutlass.Constexpr[int],
        end: cutlass.Constexpr[int],
        my_out,
        wg,
        own,
    ):
        """Columns of dv or dk to warp 1."""
        sync(EMPTY + wg, OUT_THREADS)
        store_rows([sums[i] for i in range(begin, end)], factor, my_out, own, self.dtype)
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive(FULL + wg, OUT_THREADS)

    @cute.jit
    def add_block(self, to, out_address):
        """Warp 1: the warpgroups' pieces, and the first one's second."""
        for piece in cutlass.range_constexpr(WARPGROUPS):
            sync(FULL + piece, OUT_THREADS)
            source = out_address + piece * self.part_bytes
            add_floats(to + piece * _PIECE_BYTES, source, _PIECE_BYTES)
        cute.arch.cp_async_bulk_wait_group(1, read=True)
        arrive(EMPTY, OUT_THREADS)
        sync(FULL, OUT_THREADS)
        add_floats(to + WARPGROUPS * _PIECE_BYTES, out_address, _PIECE_BYTES)

    def make_room(self):
        """In another order: the last additions may be the second warpgroup's, then the first's."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        for wg in range(WARPGROUPS):
            arrive(EMPTY + wg, OUT_THREADS)
