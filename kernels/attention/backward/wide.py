# SPDX-License-Identifier: Apache-2.0
"""The gradients for up to 256 columns of keys and of values.

A warpgroup's registers hold only one accumulator of 64 keys and 256 columns. So a tile has 64 keys,
the first warpgroup accumulates its dv, and the second its dk:

    first   s = k q^T    dv += p do     dq = ds^T k, 128 columns at a time
    second  s = k q^T    dp = v do^T    ds = p * (dp - delta)    dk += ds q

Both compute s. Only ds passes from one to the other, through shared memory, and the second may be a
block ahead. Pieces of 32 columns of dq, and of 64 of dv and dk, go to warp 1 through the two
buffers of `out`.

Lower bound of a step of 64 queries by 64 keys: products 6 * 64 * 64 * 256 / 2048 = 3072 cycles, of
which 2560 are needed. Shared memory at 128 bytes a cycle: s and dp 1536, dv and dk 512, dq 384, ds
64, dq in and out 1024, copies 512: 4032. Multiplying 64 columns of dq while 64 are passed to warp 1
was no faster. Shared memory: q and its gradient 128 KiB, k and v 64, ds 16, dq 16: 224 of 227.

One kernel serves attention and attention_varlen. Without packed sequences there is no list, and a
tile's place is computed; the maps are AttentionEntryRows in backward.cc, whose rows begin at the
map's row 2^30, and the batch index replaces a sequence's end.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from kernels.attention.backward.kernel import (
    DS_WRITTEN,
    EMPTY,
    FULL,
    OUT_THREADS,
    STAGES,
    WARPGROUPS,
    AttentionBackward,
    add_floats,
    anew,
)
from kernels.attention.backward.registers import (
    probabilities,
    score_gradients,
    sloped_probabilities,
    store_plain,
    store_rows,
    store_transposed,
    transposed_place,
)
from kernels.attention.backward.sequences import Tile, tile_at
from kernels.attention.backward.tile_queue import receive
from kernels.attention.backward.tiles import needs_mask, query_blocks, tile_position
from kernels.attention.common.layouts import PIECE, ROWS, WARPGROUP, transposed
from kernels.attention.common.pipelines import arrive, reader, sync
from kernels.attention.common.softmax import cap, to_operand

_COLUMNS = 32  # of a piece of dq
_PIECE_BYTES = ROWS * _COLUMNS * 4
_PARTS = 2  # of `out`
_SHARE = 128  # columns of dq that are multiplied at a time

# Named barriers, like EMPTY and FULL, for the second warpgroup.
_EMPTY_OF_KEYS = 6
_FULL_OF_KEYS = 8


class AttentionBackwardWide(AttentionBackward):
    """For 64 queries a block; scores go through tanh if there is a slope."""

    tile_n = ROWS

    def output_bytes(self):
        """32 columns of dq in float32, then 64 of dv or dk."""
        return _PIECE_BYTES

    def mma_sp(self):
        return self.mma(warpgroup.OperandMajorMode.K, self.tile_m)

    def mma_dq(self):
        return self.mma(warpgroup.OperandMajorMode.MN, _SHARE)

    def mma_sums(self):
        """dv += p do or dk += ds q, with p and ds from registers."""
        source = warpgroup.OperandSource.RMEM
        return self.mma(warpgroup.OperandMajorMode.MN, self.d, a_source=source)

    def mma(self, major, columns, **more):
        """Products of one warpgroup."""
        left = warpgroup.OperandMajorMode.K
        shape = (1, 1, 1), (ROWS, columns)
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, left, major, Float32, *shape, **more
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
        thread = cute.arch.thread_idx()[0]
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        rest = (stats_address, queue, order, sight, problem, shared_by, thread % WARPGROUP)
        if wg == 0:
            self.first(q, do, k, v, sds, out_address, *rest)
        else:
            self.second(q, do, k, v, ds_address, out_address, *rest)

    @cute.jit
    def first(
        self,
        q,
        do,
        k,
        v,
        sds,
        out_address,
        stats_address,
        queue,
        order,
        sight,
        problem,
        shared_by,
        wg_thread,
    ):
        """The warpgroup of dv and dq."""
        (sq, q_ring), (sdo, do_ring), (sk, k_ring), (_, v_ring) = q, do, k, v
        mma_sp, mma_dv, mma_dq = self.mma_sp(), self.mma_sums(), self.mma_dq()
        sp_part, dv_part, dq_part = (mma.get_slice(0) for mma in (mma_sp, mma_dv, mma_dq))
        rk = mma_sp.make_fragment_A(sp_part.partition_A(sk))[None, None, None, 0]
        rq = mma_sp.make_fragment_B(sp_part.partition_B(sq))
        do_columns = mma_dv.make_fragment_B(dv_part.partition_B(transposed(sdo)))
        rds = mma_dq.make_fragment_A(dq_part.partition_A(sds))

        def share_of_k(share):
            one = cute.local_tile(transposed(sk), (_SHARE, self.tile_n), (share, 0, None))
            return mma_dq.make_fragment_B(dq_part.partition_B(one))

        k_columns = share_of_k(0), share_of_k(1)

        scores = mma_sp.partition_shape_C((self.tile_n, self.tile_m))
        dv = cute.make_rmem_tensor(mma_dv.partition_shape_C((self.tile_n, self.d_v)), Float32)
        dq_sums = mma_dq.partition_shape_C((self.tile_m, _SHARE))
        p = mma_dv.make_fragment_A(mma_dv.partition_shape_A((self.tile_n, self.tile_m)))

        read, kv_read = reader(STAGES), reader(1)  # `read` is of both q and its gradient
        my_stats = stats_address + wg_thread % 4 * 8
        scale_log2, slope = problem.scale.bitcast(Float32), problem.slope.bitcast(Float32)

        turn, details = Int32(1), self.details()
        tile = receive(queue, Int32(0), details)
        while tile >= 0:
            (column, _, _), keys, _, seen = self.tile(tile, details, order, sight, problem)
            key = column * self.tile_n
            begin, end = query_blocks(key, self.tile_n, *seen)
            steps = (end - begin) * shared_by
            block = begin
            dv.fill(0.0)
            if steps > 0:
                k_ring.consumer_wait(kv_read)
                v_ring.consumer_wait(kv_read)
            for step in cutlass.range(steps, unroll=1):
                # New fragments, so that no register keeps the old ones.
                s = cute.make_rmem_tensor(scores, Float32)
                q_ring.consumer_wait(read)
                warpgroup.fence()
                self.multiply(mma_sp, s, rk, rq, read.index, self.d // 16)
                do_ring.consumer_wait(read)
                warpgroup.wait_group(0)
                q_ring.consumer_release(read)
                lse = my_stats + read.index * self.stats_bytes
                if slope != 0.0:
                    cap(s, slope)
                self.mask(s, key, block * self.tile_m, keys, seen)
                probabilities(s, lse, scale_log2)
                to_operand(s, p, self.dtype)
                warpgroup.fence()
                self.accumulate(mma_dv, dv, p, do_columns, read.index, self.tile_m // 16)
                sync(DS_WRITTEN, WARPGROUPS * WARPGROUP)
                part_of_ds = rds[None, None, None, read.index]
                for share in cutlass.range_constexpr(self.d // _SHARE):
                    dqs = cute.make_rmem_tensor(dq_sums, Float32)
                    warpgroup.fence()
                    of_k = k_columns[share]
                    self.multiply(mma_dq, dqs, part_of_ds, of_k, 0, self.tile_n // 16)
                    warpgroup.wait_group(0)
                    if const_expr(share == 0):  # dv is done too
                        do_ring.consumer_release(read)
                    self.hand_over(dqs, out_address, wg_thread)
                if step + 1 == steps:
                    k_ring.consumer_release(kv_read)
                    v_ring.consumer_release(kv_read)
                    kv_read.advance()
                read.advance()
                block += 1
                block = begin if block == end else block

            one = Float32(1.0)
            self.store_sums(dv, one, out_address, anew(wg_thread), EMPTY, FULL)
            tile = receive(queue, turn, details)
            turn += 1

    @cute.jit
    def second(
        self,
        q,
        do,
        k,
        v,
        ds_address,
        out_address,
        stats_address,
        queue,
        order,
        sight,
        problem,
        shared_by,
        wg_thread,
    ):
        """The warpgroup of ds and dk."""
        (sq, q_ring), (sdo, do_ring), (sk, k_ring), (sv, v_ring) = q, do, k, v
        mma_sp, mma_dk = self.mma_sp(), self.mma_sums()
        sp_part, dk_part = (mma.get_slice(0) for mma in (mma_sp, mma_dk))
        rk = mma_sp.make_fragment_A(sp_part.partition_A(sk))[None, None, None, 0]
        rv = mma_sp.make_fragment_A(sp_part.partition_A(sv))[None, None, None, 0]
        rq = mma_sp.make_fragment_B(sp_part.partition_B(sq))
        rdo = mma_sp.make_fragment_B(sp_part.partition_B(sdo))
        q_columns = mma_dk.make_fragment_B(dk_part.partition_B(transposed(sq)))

        scores = mma_sp.partition_shape_C((self.tile_n, self.tile_m))
        dk = cute.make_rmem_tensor(mma_dk.partition_shape_C((self.tile_n, self.d)), Float32)
        operand = mma_dk.partition_shape_A((self.tile_n, self.tile_m))
        ds = mma_dk.make_fragment_A(operand)

        read, kv_read = reader(STAGES), reader(1)  # `read` is of both q and its gradient
        my_stats = stats_address + wg_thread % 4 * 8
        my_ds = ds_address + transposed_place(wg_thread)
        scale_log2, slope = problem.scale.bitcast(Float32), problem.slope.bitcast(Float32)

        turn, details = Int32(1), self.details()
        tile = receive(queue, Int32(0), details)
        while tile >= 0:
            (column, _, _), keys, _, seen = self.tile(tile, details, order, sight, problem)
            key = column * self.tile_n
            begin, end = query_blocks(key, self.tile_n, *seen)
            steps = (end - begin) * shared_by
            block = begin
            dk.fill(0.0)
            if steps > 0:
                k_ring.consumer_wait(kv_read)
                v_ring.consumer_wait(kv_read)
            for step in cutlass.range(steps, unroll=1):
                last = step + 1 == steps
                s, dp = (cute.make_rmem_tensor(scores, Float32) for _ in range(2))
                q_ring.consumer_wait(read)
                warpgroup.fence()
                self.multiply(mma_sp, s, rk, rq, read.index, self.d // 16)
                do_ring.consumer_wait(read)
                warpgroup.fence()
                self.multiply(mma_sp, dp, rv, rdo, read.index, self.d_v // 16)
                warpgroup.wait_group(1)  # s
                lse = my_stats + read.index * self.stats_bytes
                if slope != 0.0:
                    cap(s, slope)
                self.mask(s, key, block * self.tile_m, keys, seen)
                if slope != 0.0:
                    sloped_probabilities(s, lse, scale_log2)
                else:
                    probabilities(s, lse, scale_log2)
                warpgroup.wait_group(0)  # dp
                if last:
                    v_ring.consumer_release(kv_read)
                    k_ring.consumer_release(kv_read)
                    kv_read.advance()
                score_gradients(s, dp, ds, lse + 4 * self.tile_m, self.dtype)
                store_transposed(ds, my_ds + read.index * (2 * self.tile_m * self.tile_n))
                cute.arch.fence_proxy("async.shared", space="cta")
                sync(DS_WRITTEN, WARPGROUPS * WARPGROUP)
                do_ring.consumer_release(read)  # after all lanes have read its rows' sums
                warpgroup.fence()
                self.accumulate(mma_dk, dk, ds, q_columns, read.index, self.tile_m // 16)
                warpgroup.wait_group(0)
                q_ring.consumer_release(read)
                read.advance()
                block += 1
                block = begin if block == end else block

            gain = problem.gain.bitcast(Float32)
            barriers = (_EMPTY_OF_KEYS, _FULL_OF_KEYS)
            self.store_sums(dk, gain, out_address, anew(wg_thread), *barriers)
            tile = receive(queue, turn, details)
            turn += 1

    # Tiles of both forms.

    @cute.jit
    def tile_count(self, packed, problem):
        count = problem.batch * cute.ceil_div(problem.seq_k, self.tile_n)
        if self.ends(packed) != 0:
            count = packed.count.load()
        return count

    def ends(self, packed):
        return cutlass.min(Int64(packed.tiles.toint()), Int64(1)).to(Int32)

    @cute.jit
    def look_up(self, tile, order, packed, problem):
        at = tile_position(tile, *order)[0]
        k_tiles = cute.ceil_div(problem.seq_k, self.tile_n)
        entry = at // k_tiles
        column = at - entry * k_tiles
        column = k_tiles - 1 - column if problem.descending != 0 else column
        first_block = entry * problem.heads * packed.room
        found = Tile(column, problem.seq_k, problem.seq_q, entry, first_block, entry)[:6]
        if self.ends(packed) != 0:
            found = tile_at(packed, at)[:6]
        return found

    @cute.jit
    def mask(self, s, key, query, keys, seen):
        """Hides the scores of keys that a query does not see, if there are any."""
        if needs_mask(key, self.tile_n, query, self.tile_m, keys, *seen[2:]):
            self.hide(s, key, query, keys, *seen[2:])

    @cute.jit
    def hand_over(self, dqs, out_address, wg_thread):
        """A share of a block's dq to warp 1."""
        for piece in cutlass.range_constexpr(_SHARE // _COLUMNS):
            part = piece % _PARTS
            size = cute.size(dqs) * _COLUMNS // _SHARE
            values = [dqs[i] for i in range(piece * size, (piece + 1) * size)]
            sync(EMPTY + part, OUT_THREADS)
            store_plain(values, out_address + part * _PIECE_BYTES + wg_thread * 16)
            cute.arch.fence_proxy("async.shared", space="cta")
            arrive(FULL + part, OUT_THREADS)

    @cute.jit
    def store_sums(
        self,
        sums,
        factor,
        out_address,
        own,
        empty: cutlass.Constexpr[int],
        full: cutlass.Constexpr[int],
    ):
        """A tile's dv or dk to warp 1."""
        for piece in cutlass.range_constexpr(self.d // PIECE):
            part = piece % _PARTS
            size = cute.size(sums) * PIECE // self.d
            values = [sums[i] for i in range(piece * size, (piece + 1) * size)]
            sync(empty + part, OUT_THREADS)
            store_rows(values, factor, out_address + part * _PIECE_BYTES, own, self.dtype)
            cute.arch.fence_proxy("async.shared", space="cta")
            arrive(full + part, OUT_THREADS)

    # Warp 1. Each part of `out` is read every other time, so room for the next piece is there when
    # one group of copies is left.

    def make_room(self):
        """For a block's first piece of dq."""
        self.make_room_in(EMPTY)

    def make_room_in(self, empty):
        cute.arch.cp_async_bulk_wait_group(_PARTS - 1, read=True)
        arrive(empty, OUT_THREADS)

    @cute.jit
    def add_block(self, to, out_address):
        for piece in cutlass.range_constexpr(self.d // _COLUMNS):
            part = piece % _PARTS
            if const_expr(piece > 0):
                self.make_room_in(EMPTY + part)
            sync(FULL + part, OUT_THREADS)
            source = out_address + part * _PIECE_BYTES
            add_floats(to + piece * _PIECE_BYTES, source, _PIECE_BYTES)

    @cute.jit
    def store_tile(self, maps, ways, column, kv_head, k_outer):
        for which in cutlass.range_constexpr(2):
            empty, full = ((EMPTY, FULL), (_EMPTY_OF_KEYS, _FULL_OF_KEYS))[which]
            for piece in cutlass.range_constexpr(self.d // PIECE):
                part = piece % _PARTS
                self.make_room_in(empty + part)
                sync(full + part, OUT_THREADS)
                from_so, to_gk = ways[part][which]
                to = (column, piece, kv_head, *k_outer)
                cute.copy(maps[which], from_so[None, 0], to_gk[None, to])
                cute.arch.cp_async_bulk_commit_group()
