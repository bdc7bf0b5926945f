# SPDX-License-Identifier: Apache-2.0
"""The two warps of attention's backward that copy: what they bring in and what they take out."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from attention_backward_layouts_cute import STAGES, TILE_N, WARPGROUPS, AttentionBackwardLayouts
from attention_backward_tiles_cute import query_blocks, tile_position, turn_of
from attention_backward_turns_cute import hand_out, receive, take
from attention_layouts_cute import PIECE, ROWS, WARPGROUP
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

# Named barriers, one of each for a warpgroup: its part of the way out.
EMPTY = 2
FULL = 4

OUT_THREADS = WARPGROUP + 32


class AttentionBackwardCopies(AttentionBackwardLayouts):
    @cute.jit
    def load(
        self,
        q,
        do,
        k,
        v,
        stats,
        stats_address,
        mail,
        counter,
        tiles,
        order,
        sight,
        sizes,
        q_blocks,
    ):
        """Warp 0: k and v once a tile, if any query sees them; q, do and its rows' sums of each
        head and block."""
        batch, seq_q, seq_k, heads, kv_heads = sizes
        tma_q, sq, q_ring = q
        tma_do, sdo, do_ring = do
        tma_k, sk, k_ring = k
        tma_v, sv, v_ring = v
        one = cute.make_layout(1)
        gq = cute.zipped_divide(coordinates(self.d, seq_q, heads, batch), (self.tile_m, self.d))
        gk = cute.zipped_divide(coordinates(self.d, seq_k, kv_heads, batch), (TILE_N, self.d))
        to_q, from_q = cpasync.tma_partition(tma_q, 0, one, cute.group_modes(sq, 0, 2), gq)
        to_do, from_do = cpasync.tma_partition(tma_do, 0, one, cute.group_modes(sdo, 0, 2), gq)
        to_k, from_k = cpasync.tma_partition(tma_k, 0, one, cute.group_modes(sk, 0, 2), gk)
        to_v, from_v = cpasync.tma_partition(tma_v, 0, one, cute.group_modes(sv, 0, 2), gk)
        q_write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        do_write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        kv_write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        shared_by = heads // kv_heads
        turn, tile = Int32(0), take(counter)
        while tile < tiles:
            hand_out(mail, turn, tile)
            turn += 1
            column, kv_head, entry = tile_position(tile, *order)
            first, end = query_blocks(column * TILE_N, TILE_N, *sight)
            keys_at = (column, 0, kv_head, entry)
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
                    # Not before the first q and do: there is room for them earlier.
                    if shared == 0 and block == first:
                        for tma, source, to, ring in (
                            (tma_v, from_v, to_v, v_ring),
                            (tma_k, from_k, to_k, k_ring),
                        ):
                            ring.producer_acquire(kv_write)
                            barrier = ring.producer_get_barrier(kv_write)
                            cute.copy(tma, source[None, keys_at], to[None, 0], tma_bar_ptr=barrier)
                        kv_write.advance()
            tile = take(counter)
        hand_out(mail, turn, Int32(-1))
        k_ring.producer_tail(kv_write)

    @cute.jit
    def take_out(self, tma_dk, tma_dv, dq, turns, out_address, mail, order, sight, sizes, q_blocks):
        """Warp 1: adds dq to the workspace, in the tiles' order if there are turns; stores dv and
        dk."""
        batch, seq_k, heads, kv_heads = sizes
        lane = cute.arch.lane_idx()
        gk = cute.zipped_divide(coordinates(self.d, seq_k, kv_heads, batch), (ROWS, PIECE))
        ways = [self.way_out(wg, out_address, (tma_dv, tma_dk), gk) for wg in range(WARPGROUPS)]
        shared_by = heads // kv_heads
        dq_bytes = self.tile_m * self.d * 4
        turn = Int32(1)
        tile = receive(mail, Int32(0))
        while tile >= 0:
            column, kv_head, entry = tile_position(tile, *order)
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
                        sync(FULL + wg, OUT_THREADS)
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
                    sync(FULL + wg, OUT_THREADS)
                    from_so, to_gk = ways[wg][which]
                    for piece in cutlass.range_constexpr(self.d // PIECE):
                        at = (column * WARPGROUPS + wg, piece, kv_head, entry)
                        cute.copy((tma_dv, tma_dk)[which], from_so[None, piece], to_gk[None, at])
                    cute.arch.cp_async_bulk_commit_group()
            tile = receive(mail, turn)
            turn += 1
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
            arrive(EMPTY + wg, OUT_THREADS)


def coordinates(d, rows, heads, batch):
    """What a map of [batch, heads, rows, d] is indexed with: (rows, d, heads, batch)."""
    identity = cute.make_identity_tensor((d, rows, heads, batch))
    return cute.make_tensor(identity.iterator, cute.select(identity.layout, [1, 0, 2, 3]))


def sync(barrier, threads):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def arrive(barrier, threads):
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)


def _load_bytes(to_shared, from_global, size, barrier):
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[{{$r0}}], [{{$r1}}], {size}, [{{$r2}}];",
        read_only_args=[to_shared, from_global, barrier.toint()],
    )


def _add_floats(to_global, from_shared, size):
    cute.arch.inline_ptx(
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{{$r0}}], [{{$r1}}], {size};",
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
