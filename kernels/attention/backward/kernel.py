# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention's q, k and v: TMA, wgmma, persistent blocks.

A block works on tiles of 128 keys of one head, 64 per warpgroup, for all query heads that read it:
so dk and dv are accumulated in registers, also for grouped heads, and written once, in a fixed
order. For each block of `tile_m` queries, with p = exp2(s * scale - lse) and delta = rowsum(do *
o):

    s = k q^T    dp = v do^T    dv += p do    ds = p * (dp - delta)    dk += ds q    dq = ds^T k

Keys are rows and queries columns of all of these, so that p and ds are left operands in the
registers that they are computed in. Only ds goes through shared memory, because dq needs it from
both warpgroups. dq is added in float32 to a workspace, in the layout of the accumulators.

Warp roles: warp 0 loads k and v once per tile, each as soon as the previous tile has released it,
and q, do and the rows' sums through rings of stages. Warp 1 moves the warpgroups' results out of
shared memory: it adds dq, and stores dv and dk. The warpgroups multiply: for each block they issue

    s, dp        dp while exponentials are computed
    dv           while ds is exchanged
    dq, dk       dk while dq is handed to warp 1

and the other warpgroup fills the gaps. Issuing the next block's s beside dk was 5 % slower, dv
before ds no faster.

Lower bound of a step of 64 queries by 128 keys. D = 128: products 5 * 64 * 128 * 128 / 2048 = 2560
cycles. Shared memory at 128 bytes a cycle: s and dp, whose operands are both 64 rows, 1024; dv and
dk 512, dq 512, ds 128, dq in and out 512, copies 256, rows' sums 128: 3072. Exponentials 512. D =
64, for which a step has 128 queries, so half as many exchanges: products 1280, shared memory 1408,
exponentials 512. A query and 64 columns send 256 bytes of dq to the L2, and fetch half as much.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.attention.backward.problem import BackwardProblem
from kernels.attention.backward.registers import (
    capped_probabilities,
    probabilities,
    score_gradients,
    store_plain,
    store_rows,
    store_transposed,
    transposed_place,
)
from kernels.attention.backward.sequences import DETAILS, Packed, Tile, tile_at
from kernels.attention.backward.tile_queue import hand_out, queue_words, receive, set_up_queue, take
from kernels.attention.backward.tiles import needs_mask, query_blocks, tile_position, turn_of
from kernels.attention.common.layouts import (
    PIECE,
    ROWS,
    WARPGROUP,
    copy_places,
    outer_coordinates,
    sequence_coordinates,
    staged_layout,
    transposed,
)
from kernels.attention.common.pipelines import (
    arrive,
    fetch,
    reader,
    ring,
    sync,
    synchronize_block,
    writer,
)
from kernels.attention.common.softmax import cap, hide_outside, to_operand

WARPGROUPS = 2  # that multiply, each 64 of a tile's keys
TILE_N = ROWS * WARPGROUPS
STAGES = 2  # of q, do, its rows' sums and ds

# Named barriers.
DS_WRITTEN = 1  # both warpgroups have written their part of ds
EMPTY = 2  # one per warpgroup: warp 1 has read the warpgroup's part of `out`
FULL = 4  # one per warpgroup: it has written its part
OUT_THREADS = WARPGROUP + 32


class AttentionBackward:
    """`capped`: scores go through tanh; `columns`: those of q and k that are multiplied, the rest
    are zeros; `packed`: sequences of several lengths behind each other (sequences.py)."""

    tile_n = TILE_N

    def __init__(self, name, dtype, d, tile_m, capped=False, columns=None, packed=False, d_v=None):
        self.name = name
        self.dtype = dtype
        self.d = d
        self.d_v = d_v or d
        self.columns = columns or d
        self.tile_m = tile_m
        self.capped = capped
        self.packed = packed
        self.queue_words = queue_words(DETAILS if packed else 0)
        self.threads = (1 + WARPGROUPS) * WARPGROUP
        self.stats_bytes = 2 * 4 * tile_m
        self.part_bytes = self.output_bytes()
        self.loader_registers, self.registers = 24, 240

    # Shared memory.

    def q_layout(self):
        return staged_layout(self.dtype, self.tile_m, self.d, STAGES)

    def do_layout(self):
        return staged_layout(self.dtype, self.tile_m, self.d_v, STAGES)

    def k_layout(self):
        return staged_layout(self.dtype, self.tile_n, self.d, 1)

    def v_layout(self):
        return staged_layout(self.dtype, self.tile_n, self.d_v, 1)

    def ds_layout(self):
        return staged_layout(self.dtype, self.tile_m, self.tile_n, STAGES)

    def out_layout(self):
        """Rows of dv or dk, in pieces, in a part of `out`."""
        return staged_layout(self.dtype, ROWS, PIECE, self.part_bytes // (ROWS * PIECE * 2))

    def output_bytes(self):
        """A warpgroup's part of `out`: its part of dq in float32, then its rows of dv and of dk."""
        return max(self.tile_m * self.d * 4 // WARPGROUPS, ROWS * self.d * 2)

    def storage(self):
        def tile(layout):
            return cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        @cute.struct
        class Storage:
            q: tile(self.q_layout())
            do: tile(self.do_layout())
            k: tile(self.k_layout())
            v: tile(self.v_layout())
            ds: tile(self.ds_layout())
            out: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, WARPGROUPS * self.part_bytes], 1024
            ]
            stats: cute.struct.Align[
                cute.struct.MemRange[Float32, STAGES * self.stats_bytes // 4], 128
            ]
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            do_barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            queue: cute.struct.MemRange[cutlass.Int64, self.queue_words]

        return Storage

    def smem_bytes(self):
        """The size of the storage, for the launch."""
        tiles = 2 * (self.d + self.d_v) * (STAGES * self.tile_m + self.tile_n)
        tiles += 2 * STAGES * self.tile_m * self.tile_n
        rest = WARPGROUPS * self.part_bytes + STAGES * self.stats_bytes
        barriers = 8 * (4 * STAGES + 4 + self.queue_words)
        return (tiles + rest + barriers + 1023) // 1024 * 1024

    # The host function and the kernel.

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
        lists,
        problem,
        sizes,
        blocks: Int32,
        stream,
    ):
        """`lists` and `sizes` are Packed's pointers and numbers, None unless packed."""
        problem = BackwardProblem(*problem)  # the DSL's host functions take plain tuples
        batch, seq_q, seq_k, heads, kv_heads = problem[:5]
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def atom(op, pointer, rows, columns, count, layout, tile):
            shape = (rows, columns, count, batch)
            stride = (columns, 1, rows * columns, count * rows * columns)
            if const_expr(self.packed):  # AttentionPackedRows in problem.h has the real map
                shape = (*shape[:3], 2, batch)
                stride = (*stride, 2 * stride[3])
            tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
            one_stage = cute.slice_(layout, (None, None, 0))
            return cpasync.make_tiled_tma_atom(op, tensor, one_stage, tile)[0]

        d, d_v, out_tile = self.d, self.d_v, (ROWS, PIECE)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            atom(load, q, seq_q, d, heads, self.q_layout(), (self.tile_m, d)),
            atom(load, k, seq_k, d, kv_heads, self.k_layout(), (self.tile_n, d)),
            atom(load, v, seq_k, d_v, kv_heads, self.v_layout(), (self.tile_n, d_v)),
            atom(load, do, seq_q, d_v, heads, self.do_layout(), (self.tile_m, d_v)),
            atom(store, dk, seq_k, d, kv_heads, self.out_layout(), out_tile),
            atom(store, dv, seq_k, d_v, kv_heads, self.out_layout(), out_tile),
            *(stats, dq, turns, counter, lists, problem, sizes),
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
        lists,
        problem: BackwardProblem,
        sizes,
    ):
        packed = Packed(*lists, *sizes) if self.packed else None
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_q, tma_k, tma_v, tma_do, tma_dk, tma_dv):
                cpasync.prefetch_descriptor(atom)

        storage = cutlass.utils.SmemAllocator().allocate(self.storage())

        def tensor(range_, layout):
            return range_.get_tensor(layout.outer, swizzle=layout.inner)

        sq, sdo = tensor(storage.q, self.q_layout()), tensor(storage.do, self.do_layout())
        sk, sv = tensor(storage.k, self.k_layout()), tensor(storage.v, self.v_layout())
        sds = tensor(storage.ds, self.ds_layout())

        warps = 4 * WARPGROUPS
        do_bytes = 2 * self.tile_m * self.d_v + self.stats_bytes
        q_ring = ring(storage.q_barriers, STAGES, warps, 2 * self.tile_m * self.d)
        do_ring = ring(storage.do_barriers, STAGES, warps, do_bytes)
        k_ring = ring(storage.k_barriers, 1, warps, 2 * self.tile_n * self.d)
        v_ring = ring(storage.v_barriers, 1, warps, 2 * self.tile_n * self.d_v)
        queue = storage.queue.data_ptr()
        if warp_index == 0:
            with cute.arch.elect_one():
                set_up_queue(queue)
        synchronize_block()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        order, tiles, sight, q_blocks, shared_by = self.tiling(packed, problem)
        stats_address = storage.stats.data_ptr().toint()
        out_address = storage.out.data_ptr().toint()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.loader_registers)
            if warp_index == 0:
                self.load(
                    *((tma_q, sq, q_ring), (tma_do, sdo, do_ring)),
                    *((tma_k, sk, k_ring), (tma_v, sv, v_ring), stats, stats_address),
                    *(queue, counter.toint(), tiles, order, sight, problem, q_blocks, packed),
                )
            if warp_index == 1:
                self.take_out(
                    *(tma_dk, tma_dv, dq, turns, out_address),
                    *(queue, order, sight, problem, q_blocks),
                )
        else:
            cute.arch.setmaxregister_increase(self.registers)
            self.consume(
                *((sq, q_ring), (sdo, do_ring), (sk, k_ring), (sv, v_ring), sds, out_address),
                *(storage.ds.data_ptr().toint(), stats_address, queue, order, sight, problem),
                shared_by,
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
        """The warpgroups that multiply."""
        (sq, q_ring), (sdo, do_ring), (sk, k_ring), (sv, v_ring) = q, do, k, v
        thread = cute.arch.thread_idx()[0]
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        wg_thread = thread % WARPGROUP
        mma_sp, mma_kv, mma_dq = self.mma_sp(), self.mma_kv(self.d), self.mma_dq()
        sp_part = mma_sp.get_slice(wg * WARPGROUP)
        kv_part = mma_kv.get_slice(wg * WARPGROUP)
        dq_part = mma_dq.get_slice(wg * WARPGROUP)

        rk = mma_sp.make_fragment_A(sp_part.partition_A(sk))[None, None, None, 0]
        rv = mma_sp.make_fragment_A(sp_part.partition_A(sv))[None, None, None, 0]
        rq = mma_sp.make_fragment_B(sp_part.partition_B(sq))
        rdo = mma_sp.make_fragment_B(sp_part.partition_B(sdo))
        q_columns = mma_kv.make_fragment_B(kv_part.partition_B(transposed(sq)))
        do_columns = mma_kv.make_fragment_B(kv_part.partition_B(transposed(sdo)))
        rds = mma_dq.make_fragment_A(dq_part.partition_A(sds))
        k_columns = mma_dq.make_fragment_B(dq_part.partition_B(transposed(sk)))

        scores = mma_sp.partition_shape_C((self.tile_n, self.tile_m))
        sums = mma_kv.partition_shape_C((self.tile_n, self.d))
        dk = cute.make_rmem_tensor(sums, Float32)
        dv = cute.make_rmem_tensor(sums, Float32)
        dq_sums = mma_dq.partition_shape_C((self.tile_m, self.d))
        operand = mma_kv.partition_shape_A((self.tile_n, self.tile_m))
        p, ds = mma_kv.make_fragment_A(operand), mma_kv.make_fragment_A(operand)

        q_read = reader(STAGES)
        do_read = reader(STAGES)
        kv_read = reader(1)

        my_stats = stats_address + wg_thread % 4 * 8
        my_ds = ds_address + wg * self.tile_m * 2 * PIECE
        my_ds += transposed_place(wg_thread)
        my_out = out_address + wg * self.part_bytes
        scale_log2, slope_float = problem.scale.bitcast(Float32), problem.slope.bitcast(Float32)
        columns, depth = self.columns // 16, self.tile_m // 16

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
                if needs_mask(
                    *(key, self.tile_n, query, self.tile_m, keys),
                    *seen[2:],
                ):
                    self.hide(s, key, query, keys, *seen[2:])
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
                store_transposed(ds, my_ds + stage * (2 * self.tile_m * self.tile_n))

                warpgroup.fence()
                self.accumulate(mma_kv, dv, p, do_columns, stage, depth)
                cute.arch.fence_proxy("async.shared", space="cta")
                sync(DS_WRITTEN, WARPGROUPS * WARPGROUP)
                warpgroup.fence()
                part_of_ds = rds[None, None, None, stage]
                self.multiply(mma_dq, dqs, part_of_ds, k_columns, 0, self.tile_n // 16)
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

            own = anew(wg_thread)
            for which in cutlass.range_constexpr(2):
                factor = Float32(1.0) if which == 0 else problem.gain.bitcast(Float32)
                sync(EMPTY + wg, OUT_THREADS)
                store_rows((dv, dk)[which], factor, my_out, own, self.dtype)
                cute.arch.fence_proxy("async.shared", space="cta")
                arrive(FULL + wg, OUT_THREADS)
            tile = receive(queue, turn, details)
            turn += 1

    @cute.jit
    def load(
        self,
        q,
        do,
        k,
        v,
        stats,
        stats_address,
        queue,
        counter,
        tiles,
        order,
        sight,
        problem,
        q_blocks,
        packed,
    ):
        """Warp 0: k and v once per tile, if any query sees them; q, do and the rows' sums once per
        head and block."""
        tma_q, _, q_ring = q
        tma_do, _, do_ring = do
        tma_k, _, k_ring = k
        tma_v, _, v_ring = v
        heads, kv_heads = problem.heads, problem.kv_heads
        parts = (q, do, k, v)
        fixed = self.unless_packed(self.ways_in, parts, problem)
        q_write = writer(STAGES)
        do_write = writer(STAGES)
        kv_write = writer(1)
        shared_by = heads // kv_heads
        turn, tile = Int32(0), take(counter)
        while tile < tiles:
            details = self.look_up(tile, order, packed, problem)
            hand_out(queue, turn, tile, details[:DETAILS])
            turn += 1
            (column, kv_head, entry), _, at, seen = self.tile(tile, details, order, sight, problem)
            first, end = query_blocks(column * self.tile_n, self.tile_n, *seen)
            ways = self.of_sequence(fixed, self.ways_in, parts, problem, at)
            (to_q, from_q), (to_do, from_do), (to_k, from_k), (to_v, from_v) = ways
            q_outer, k_outer = self.outer(entry, at)
            keys_at = (column, 0, kv_head, *k_outer)
            for shared in cutlass.range(shared_by, unroll=1):
                head = kv_head * shared_by + shared
                pair = self.first_block(entry * heads + head, q_blocks, at)
                stats_row = stats.toint() + pair * self.stats_bytes
                for block in cutlass.range(first, end, unroll=1):
                    queries_at = (block, 0, head, *q_outer)
                    q_ring.producer_acquire(q_write)
                    fetch(q_ring, q_write, tma_q, from_q, queries_at, to_q)
                    q_write.advance()
                    do_ring.producer_acquire(do_write)
                    fetch(do_ring, do_write, tma_do, from_do, queries_at, to_do)
                    with cute.arch.elect_one():
                        _load_bytes(
                            stats_address + do_write.index * self.stats_bytes,
                            stats_row + Int64(block) * self.stats_bytes,
                            self.stats_bytes,
                            do_ring.producer_get_barrier(do_write),
                        )
                    do_write.advance()
                    # After the first q and do, which have free stages earlier.
                    if shared == 0 and block == first:
                        v_ring.producer_acquire(kv_write)
                        fetch(v_ring, kv_write, tma_v, from_v, keys_at, to_v)
                        k_ring.producer_acquire(kv_write)
                        fetch(k_ring, kv_write, tma_k, from_k, keys_at, to_k)
                        kv_write.advance()
            tile = take(counter)
        hand_out(queue, turn, Int32(-1), (Int32(0),) * (DETAILS if self.packed else 0))
        k_ring.producer_tail(kv_write)

    @cute.jit
    def take_out(
        self, tma_dk, tma_dv, dq, turns, out_address, queue, order, sight, problem, q_blocks
    ):
        """Warp 1: adds dq to the workspace, in the tiles' order if there are turns, and stores dv
        and dk."""
        heads, kv_heads = problem.heads, problem.kv_heads
        lane = cute.arch.lane_idx()
        maps = (tma_dv, tma_dk)
        fixed = self.unless_packed(self.ways_out, out_address, maps, problem)
        shared_by = heads // kv_heads
        dq_bytes = self.tile_m * self.d * 4
        turn, details = Int32(1), self.details()
        tile = receive(queue, Int32(0), details)
        while tile >= 0:
            (column, kv_head, entry), _, at, seen = self.tile(tile, details, order, sight, problem)
            first, end = query_blocks(column * self.tile_n, self.tile_n, *seen)
            ways = self.of_sequence(fixed, self.ways_out, out_address, maps, problem, at)
            _, k_outer = self.outer(entry, at)
            for shared in cutlass.range(shared_by, unroll=1):
                pair = self.first_block(entry * heads + kv_head * shared_by + shared, q_blocks, at)
                for block in cutlass.range(first, end, unroll=1):
                    self.make_room()
                    flag = turns.toint() + (pair + block) * 4
                    if turns.toint() != 0:
                        mine_is = turn_of(
                            *(column, self.tile_n, self.k_tiles(order, at)),
                            *(block * self.tile_m, self.tile_m, *seen[2:], problem.descending),
                        )
                        if lane == 0:
                            _wait_for(flag, mine_is)
                        cute.arch.sync_warp()
                    self.add_block(dq.toint() + (pair + block) * dq_bytes, out_address)
                    if turns.toint() != 0:
                        cute.arch.cp_async_bulk_wait_group(0)
                        cute.arch.sync_warp()
                        if lane == 0:
                            _pass_on(flag)
            self.store_tile(maps, ways, column, kv_head, k_outer)
            tile = receive(queue, turn, details)
            turn += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def add_block(self, to, out_address):
        """Adds a block's dq to the workspace, after `make_room`."""
        size = self.tile_m * self.d * 4 // WARPGROUPS
        for wg in cutlass.range_constexpr(WARPGROUPS):
            sync(FULL + wg, OUT_THREADS)
            add_floats(to + wg * size, out_address + wg * self.part_bytes, size)

    @cute.jit
    def store_tile(self, maps, ways, column, kv_head, k_outer):
        """Stores a tile's dv and dk."""
        for which in cutlass.range_constexpr(2):
            pieces = (self.d_v, self.d)[which] // PIECE
            at_once = self.part_bytes // (ROWS * PIECE * 2)
            for first in cutlass.range_constexpr(0, pieces, at_once):
                self.make_room()
                for wg in cutlass.range_constexpr(WARPGROUPS):
                    sync(FULL + wg, OUT_THREADS)
                    from_so, to_gk = ways[wg][which]
                    for piece in cutlass.range_constexpr(min(at_once, pieces - first)):
                        to = (column * WARPGROUPS + wg, first + piece, kv_head, *k_outer)
                        cute.copy(maps[which], from_so[None, piece], to_gk[None, to])
                    cute.arch.cp_async_bulk_commit_group()

    def ways_out(self, out_address, maps, problem, at):
        """Like `ways_in`, for dv and dk from each warpgroup's part; `at` is None unless packed."""
        hidden = None if at is None else at.hidden_k
        places = [
            sequence_coordinates(problem.seq_k, columns, problem.kv_heads, problem.batch, hidden)
            for columns in (self.d_v, self.d)
        ]
        return [self.way_out(wg, out_address, maps, places) for wg in range(WARPGROUPS)]

    def way_out(self, wg, out_address, maps, places):
        """The copy of one warpgroup's part to global memory."""
        layout = self.out_layout()
        address = out_address + wg * self.part_bytes
        start = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        so = cute.make_tensor(cute.recast_ptr(start, layout.inner), layout.outer)
        pairs = zip(maps, places, strict=True)
        return [copy_places(tma, so, (ROWS, PIECE), to) for tma, to in pairs]

    def make_room(self):
        """Tells each warpgroup that its part has been read."""
        for wg in range(WARPGROUPS):
            cute.arch.cp_async_bulk_wait_group(WARPGROUPS - 1 - wg, read=True)
            arrive(EMPTY + wg, OUT_THREADS)

    # Tiles, and their sequences. `at` is a packed sequence's Tile.

    def tiling(self, packed, problem):
        """The order of the tiles and their number, which queries see keys, the blocks of queries
        of a head in the workspace, and the heads of queries that share keys."""
        batch, seq_q, seq_k, heads, kv_heads = problem[:5]
        if self.packed:
            # The list has each sequence's tiles in their order already.
            order = (self.tile_count(packed, problem), kv_heads, Int32(1), problem.band, Int32(0))
            ends = self.ends(packed)
            return order, order[0] * kv_heads, ends, packed.room, heads // kv_heads
        offset = seq_k - seq_q
        q_blocks, k_tiles = cute.ceil_div(seq_q, self.tile_m), cute.ceil_div(seq_k, self.tile_n)
        shared_by = heads // kv_heads
        order = (k_tiles, kv_heads, batch, problem.band, problem.descending)
        sight = (self.tile_m, seq_q, offset, problem.left, problem.right)
        return order, k_tiles * kv_heads * batch, sight, q_blocks, shared_by

    def tile_count(self, packed, problem):
        """A head's tiles, if sequences are packed."""
        return packed.count.load()

    def ends(self, packed):
        """Tile's `ends`, if sequences are packed."""
        return 1

    def details(self):
        """Registers for what the queue hands out beside a tile."""
        return cute.make_rmem_tensor(DETAILS, Int32) if self.packed else None

    def look_up(self, tile, order, packed, problem):
        """The details that the queue hands out with a tile; only warp 0 needs them."""
        return tile_at(packed, tile_position(tile, *order)[0]) if self.packed else ()

    def tile(self, tile, details, order, sight, problem):
        """A tile's (column, head of keys, batch entry), the sequence's number of keys, its Tile,
        and which queries see keys."""
        place = tile_position(tile, *order)
        if not self.packed:
            return place, problem.seq_k, None, sight
        at = Tile(*details) if isinstance(details, tuple) else self.from_registers(details)
        at = at._replace(ends=sight)
        offset = at.seq_k - at.seq_q
        seen = (self.tile_m, at.seq_q, offset, problem.left, problem.right)
        return (at.column, place[1], Int32(0)), at.seq_k, at, seen

    def from_registers(self, details):
        return Tile(*(details[i] for i in range(DETAILS)), None)

    def k_tiles(self, order, at):
        return order[0] if at is None else cute.ceil_div(at.seq_k, self.tile_n)

    def first_block(self, pair, q_blocks, at):
        """The place of a head's first block in the workspace."""
        first = Int64(pair) * q_blocks
        return first if at is None else first + at.first_block

    def outer(self, entry, at):
        """The coordinates of a sequence in the maps of q and of k."""
        if at is None:
            return (entry,), (entry,)
        return outer_coordinates(at.q_end, True), outer_coordinates(at.k_end, True)

    def unless_packed(self, ways, *arguments):
        """The ends of all tiles' copies, if no sequence has its own."""
        return None if self.packed else ways(*arguments, None)

    def of_sequence(self, fixed, ways, *arguments):
        return ways(*arguments) if self.packed else fixed

    def ways_in(self, parts, problem, at):
        """The two ends of the copies of q, do, k and v; of one sequence's unless `at` is None."""
        batch, seq_q, seq_k, heads, kv_heads = problem[:5]
        hidden_q = hidden_k = None
        if at is not None:
            hidden_q, hidden_k = at.hidden_q, at.hidden_k
        of_q, of_k = (self.tile_m, seq_q, heads, hidden_q), (self.tile_n, seq_k, kv_heads, hidden_k)
        ends = (*of_q, self.d), (*of_q, self.d_v), (*of_k, self.d), (*of_k, self.d_v)
        return [
            copy_places(tma, smem, (tile, d), sequence_coordinates(rows, d, count, batch, hidden))
            for (tma, smem, _), (tile, rows, count, hidden, d) in zip(parts, ends, strict=True)
        ]

    # The products.

    def mma_sp(self):
        """s = k q^T and dp = v do^T: keys are rows, queries columns, as dv and dk take them."""
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            (WARPGROUPS, 1, 1),
            (64, self.tile_m),
        )

    def mma_kv(self, columns):
        """dv += p do and dk += ds q, with p and ds from registers."""
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.MN,
            Float32,
            (WARPGROUPS, 1, 1),
            (64, columns),
            a_source=warpgroup.OperandSource.RMEM,
        )

    def mma_dq(self):
        """dq = ds^T k: the warpgroups share its rows or, if it has 64, its columns."""
        rows = self.tile_m // ROWS
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.MN,
            Float32,
            (rows, WARPGROUPS // rows, 1),
            (64, self.d * rows // WARPGROUPS),
        )

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

    # The mask.

    def hide(self, s, key, query, seq_k, offset, left, right):
        """Sets the scores of keys that a query does not see to minus infinity."""
        thread = anew(cute.arch.thread_idx()[0] - WARPGROUP)
        if const_expr(self.tile_n == ROWS):
            thread %= WARPGROUP
        key += thread // 32 * 16 + thread % 32 // 4
        query += thread % 4 * 2
        begin, end = [], []
        for r in range(2):
            at = key + 8 * r
            begin.append(at - offset - right - query)
            there = cutlass.min(seq_k - at, 1) * 256  # more than the columns, or 0
            end.append(cutlass.min(at - offset + left + 1 - query, there))
        hide_outside(s, begin, end)


def anew(value):
    """`value`; results computed from it are not hoisted and kept in registers."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def _load_bytes(to_shared, from_global, size, barrier):
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[{{$r0}}], [{{$r1}}], {size}, [{{$r2}}];",
        read_only_args=[to_shared, from_global, barrier.toint()],
    )


@cute.jit
def add_floats(to_global, from_shared, size: cutlass.Constexpr[int]):
    """Starts an addition of the copy engine, a group of its own."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
            f"[{{$r0}}], [{{$r1}}], {size};",
            read_only_args=[to_global, from_shared],
        )
    cute.arch.cp_async_bulk_commit_group()


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
