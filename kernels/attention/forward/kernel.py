# SPDX-License-Identifier: Apache-2.0
"""o = softmax(q k^T * scale, masked) v for many queries: TMA, wgmma, persistent blocks.

A block works on tiles of 64 query rows per warpgroup, of one head. For each block of `tile_n` keys,
from the last one that the tile needs to the first:

    s = q k^T    p = exp2(s * scale - maximum)    o = o * rescale + p v

Warp roles: warp 0 loads q once per tile, and k and v through rings of stages. Warps 1 to 3 are
idle, except for packed sequences, where they clear the result's padding rows. The warpgroups
multiply, each with its scores, probabilities and sums of o in registers. They issue

    s of block i + 1, p v of block i

together, and compute block i + 1's softmax while p v is multiplied. Named barriers let the
warpgroups start in turn, so that one multiplies while the other computes exponentials. A tile's
last p v is issued with the next tile's first s, so the tensor cores stay busy between tiles: the
result is stored through shared memory, in 64x64 pieces, while the next tile is loaded.

`operands` has everything that depends on the operands' type: the layout of v, the accumulators,
when a softmax waits. HalfOperands is for 16 bits, Fp8Operands in fp8/operands.py for e4m3.

Lower bound with 16-bit operands: 2 * D multiply-adds per score, of 2048 per cycle and
multiprocessor: 16 scores per cycle at D = 64, as many as there are exponentials, and 8 at D = 128.
Keys of 192 columns with values of 128 are 320 multiply-adds: 6.4 scores per cycle.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from kernels.attention.common.layouts import (
    PACKED_ROWS,
    PIECE,
    ROWS,
    WARPGROUP,
    copy_places,
    outer_coordinates,
    sequence_coordinates,
    staged_layout,
)
from kernels.attention.common.packed import Packed, clear_rows_of_no_sequence, rows_between
from kernels.attention.common.pipelines import (
    arrive,
    fetch,
    reader,
    ring,
    sync,
    synchronize_block,
    writer,
)
from kernels.attention.common.problem import Problem
from kernels.attention.common.softmax import cap, hide_outside, inverse, join_sink, largest
from kernels.attention.common.tiles import (
    free_blocks,
    key_blocks,
    place,
    rounds_of_block,
    tile_position,
)

# Named barriers, one per warpgroup: within it, and its turn to start multiplying.
_WARPGROUP = 1
_TURN = 4

# The parts of a tile's keys in which a mask hides some, besides the first block: 0 is the upper
# edge, 2 the lower one.
_EDGES = (("causal", 0), ("window", 0), ("window", 2))

_LN2 = 0.6931471805599453


class Variant(NamedTuple):
    """The tiles of a compiled kernel, and the options it is compiled for."""

    d: int  # columns of tiles of q and k
    columns: int  # of q and k that are multiplied: the rest are zeros
    d_v: int  # columns of tiles of v, and of the result
    warpgroups: int
    tile_n: int  # keys per block
    stages: int  # of k and v
    q_stages: int
    o_stages: int  # 64x64 pieces of the result that a warpgroup has room for
    mask: str  # "none", "causal" or "window"
    capped: bool  # scores go through tanh
    packed: bool  # sequences of several lengths behind each other

    @property
    def tile_m(self):
        return ROWS * self.warpgroups

    @property
    def masked(self):
        return self.mask != "none"

    @property
    def q_parts(self):
        """Stages that a tile of q takes. With room for one tile only, each warpgroup has a stage
        of its own: the next tile's rows come while the other warpgroup still multiplies."""
        return self.warpgroups if self.d_v < self.d else 1

    @property
    def q_rows(self):
        return self.tile_m // self.q_parts


class AttentionForward:
    def __init__(self, name, operands, variant):
        self.name = name
        self.operands = operands
        self.variant = variant
        self.mask, self.masked, self.packed = variant.mask, variant.masked, variant.packed
        self.d, self.tile_m, self.tile_n = variant.d, variant.tile_m, variant.tile_n
        self.d_v = variant.d_v
        self.threads = (1 + variant.warpgroups) * WARPGROUP
        registers = {2: (24, 240), 3: (32, 160)}
        self.loader_registers, self.registers = registers[variant.warpgroups]

    # Shared memory.

    def smem_layouts(self):
        """Staged layouts of q, k and v, and o's pieces."""
        v, operands = self.variant, self.operands
        return (
            staged_layout(operands.dtype, v.q_rows, v.d, v.q_stages),
            staged_layout(operands.dtype, v.tile_n, v.d, v.stages),
            operands.value_layout(),
            staged_layout(operands.out_dtype, ROWS, PIECE, v.warpgroups * v.o_stages),
        )

    def value_size(self):
        """Elements of all stages of v."""
        values, columns = self.operands.value_tile()
        return self.variant.stages * (values + self.operands.counted) * columns

    def storage(self):
        dtype, out_dtype = self.operands.dtype, self.operands.out_dtype
        q_layout, k_layout, _, o_layout = self.smem_layouts()

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, self.value_size()], 1024]
            o: cute.struct.Align[cute.struct.MemRange[out_dtype, cute.cosize(o_layout)], 1024]
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.variant.q_stages]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.variant.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.variant.stages]

        return Storage

    def smem_bytes(self):
        """The size of the storage, for the launch."""
        v, element = self.variant, self.operands.dtype.width // 8
        tiles = element * v.d * (v.q_stages * v.q_rows + v.stages * v.tile_n)
        tiles += (element * self.value_size() + 1023) // 1024 * 1024
        tiles += 2 * PIECE * v.o_stages * v.tile_m
        return (tiles + 16 * (v.q_stages + 2 * v.stages) + 1023) // 1024 * 1024

    # The host function and the kernel.

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        sinks,
        factors,
        starts,
        problem,
        sizes,
        blocks: Int32,
        stream,
    ):
        """q and k are [batch, heads, rows, d] here and v and o [batch, heads, rows, d_v], without
        gaps, or with one more dimension if packed: the launch in C++ replaces the maps. `sinks`
        are those of 16 bits, a null pointer if a call has none; `factors` are FP8's, `starts` and
        `sizes` those of packed sequences. Each is None otherwise."""
        problem = Problem(*problem)  # the DSL's host functions take plain tuples
        maps = self.maps((q, k, v, o), problem)
        if const_expr(self.packed):
            starts = (*starts, o)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(*maps, lse, sinks, factors, starts, problem, sizes).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def map_kinds(self, problem):
        """Of each map: operation, shared memory, tile, matrix of a head, heads, and if packed."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_layout, k_layout, v_layout, o_layout = self.smem_layouts()
        queries, keys = (problem.seq_q, self.d), (problem.seq_k, self.d)
        values, results = self.operands.value_matrix(problem.seq_k), (problem.seq_q, self.d_v)
        heads, kv_heads = problem.heads, problem.kv_heads
        return (
            (load, q_layout, (self.variant.q_rows, self.d), queries, heads, self.packed),
            (load, k_layout, (self.tile_n, self.d), keys, kv_heads, self.packed),
            (
                *(load, v_layout, self.operands.value_tile(), values, kv_heads),
                self.operands.value_packed,
            ),
            (store, o_layout, (ROWS, PIECE), results, heads, self.packed),
        )

    def maps(self, pointers, problem):
        atoms = []
        for pointer, (op, layout, tile, (rows, columns), count, packed) in zip(
            pointers, self.map_kinds(problem), strict=True
        ):
            # Here the first of a packed map's outermost dimensions has two elements;
            # AttentionPackedRows in problem.h has the real one.
            outer = (count, 2, problem.batch) if packed else (count, problem.batch)
            shape, stride = (rows, columns), (columns, 1)
            for extent in outer:
                stride = (*stride, rows * columns if len(shape) == 2 else stride[-1] * shape[-1])
                shape = (*shape, extent)
            tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
            smem = cute.slice_(layout, (None, None, 0))
            atoms.append(cpasync.make_tiled_tma_atom(op, tensor, smem, tile)[0])
        return atoms

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        tma_o: cute.CopyAtom,
        lse: cute.Pointer,
        sinks,
        factors,
        starts,
        problem: Problem,
        sizes,
    ):
        packed = self.packed_rows(starts, sizes)
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_q, tma_k, tma_v, tma_o):
                cpasync.prefetch_descriptor(atom)

        v = self.variant
        storage = cutlass.utils.SmemAllocator().allocate(self.storage())
        sq, sk, sv, so = [
            range_.get_tensor(layout.outer, swizzle=layout.inner)
            for range_, layout in zip(
                (storage.q, storage.k, storage.v, storage.o), self.smem_layouts(), strict=True
            )
        ]
        warps, element = 4 * v.warpgroups, self.operands.dtype.width // 8
        values, columns = self.operands.value_tile()
        q_bytes = v.q_rows * self.d * element
        q_ring = ring(storage.q_barriers, v.q_stages, warps // v.q_parts, q_bytes)
        k_ring = ring(storage.k_barriers, v.stages, warps, self.tile_n * self.d * element)
        v_ring = ring(storage.v_barriers, v.stages, warps, values * columns * element)
        self.operands.prepare(storage, self.threads)
        synchronize_block()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        packed = self.measured(packed, problem)
        q_tiles, tiles = self.tiles(packed, problem)
        rounds = rounds_of_block(tiles, self.masked)

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.loader_registers)
            self.produce(
                *((tma_q, sq, q_ring), (tma_k, sk, k_ring), (tma_v, sv, v_ring)),
                *(packed, problem, q_tiles, rounds, lse, thread, warp_index),
            )
        else:
            cute.arch.setmaxregister_increase(self.registers)
            self.multiply(
                *((sq, q_ring), (sk, k_ring), (sv, v_ring), (tma_o, so)),
                *(lse, sinks, packed, factors, problem, q_tiles, rounds, thread, warp_index),
            )

    @cute.jit
    def produce(self, q, k, v, packed, problem, q_tiles, rounds, lse, thread, warp_index):
        """The warps that do not multiply."""
        if warp_index == 0:
            self.load(q, k, v, packed, problem, q_tiles, rounds)
        else:
            if const_expr(self.packed):
                self.clear(packed, problem, lse, q_tiles * self.tile_m, thread)

    @cute.jit
    def clear(self, packed, problem, lse, planned, thread):
        clear_rows_of_no_sequence(
            *(packed, lse, problem.batch, problem.heads, planned),
            *(self.operands.out_dtype, self.d_v // 8, thread),
        )

    @cute.jit
    def load(self, q, k, v, packed, problem, q_tiles, rounds):
        """Warp 0: q once per tile; k and v of each block, k one block ahead."""
        tma_q, sq, q_ring = q
        tma_k, sk, k_ring = k
        tma_v, sv, v_ring = v
        batch, seq_q, seq_k, heads, kv_heads = problem[:5]
        q_write, q_parts = writer(self.variant.q_stages), self.variant.q_parts
        k_write, v_write = writer(self.variant.stages), writer(self.variant.stages)
        for turn in cutlass.range(rounds, unroll=1):
            row, head, entry = self.tile(turn, q_tiles, packed, problem)
            kv_head = head // (heads // kv_heads)
            queries, keys, q_at, k_at, _ = self.sequence(packed, entry, problem)
            low, last = self.key_blocks(row, queries, keys, packed, problem)
            hidden_q, hidden_k = self.hidden(queries), self.hidden(keys)
            q_places = sequence_coordinates(seq_q, self.d, heads, batch, hidden_q)
            to_q, from_q = copy_places(tma_q, sq, (self.variant.q_rows, self.d), q_places)
            k_places = sequence_coordinates(seq_k, self.d, kv_heads, batch, hidden_k)
            to_k, from_k = copy_places(tma_k, sk, (self.tile_n, self.d), k_places)
            v_places = self.operands.value_coordinates(seq_k, kv_heads, batch, hidden_k)
            to_v, from_v = copy_places(tma_v, sv, self.operands.value_tile(), v_places)
            v_at = self.operands.value_start(entry, keys, k_at, batch)
            k_outer = (kv_head, *outer_coordinates(k_at, self.packed))
            q_outer = (head, *outer_coordinates(q_at, self.packed))

            k_ring.producer_acquire(k_write)
            fetch(k_ring, k_write, tma_k, from_k, (last - 1, 0, *k_outer), to_k)
            k_write.advance()
            for part in cutlass.range_constexpr(q_parts):
                q_ring.producer_acquire(q_write)
                at = row * q_parts + part
                fetch(q_ring, q_write, tma_q, from_q, (at, 0, *q_outer), to_q)
                q_write.advance()
            for step in cutlass.range(last - 1 - low, unroll=1):
                block = last - 1 - step
                k_ring.producer_acquire(k_write)
                fetch(k_ring, k_write, tma_k, from_k, (block - 1, 0, *k_outer), to_k)
                k_write.advance()
                v_ring.producer_acquire(v_write)
                v_place = self.operands.value_place(block, kv_head, v_at)
                fetch(v_ring, v_write, tma_v, from_v, v_place, to_v)
                v_write.advance()
            v_ring.producer_acquire(v_write)
            v_place = self.operands.value_place(low, kv_head, v_at)
            fetch(v_ring, v_write, tma_v, from_v, v_place, to_v)
            v_write.advance()
        v_ring.producer_tail(v_write)

    @cute.jit
    def multiply(
        self, q, k, v, o, lse, sinks, packed, factors, problem, q_tiles, rounds, thread, warp_index
    ):
        """A warpgroup: 64 rows of each tile."""
        sq, q_ring = q
        sk, k_ring = k
        sv, v_ring = v
        tma_o, so = o
        warpgroups, capped = self.variant.warpgroups, self.variant.capped
        batch, seq_q, heads = problem.batch, problem.seq_q, problem.heads

        wg = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        lane = thread % 32
        wg_thread = thread % WARPGROUP
        mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
        qk_part = mma_qk.get_slice(self.qk_thread(wg))
        pv_part = mma_pv.get_slice(wg * WARPGROUP)
        rq = mma_qk.make_fragment_A(qk_part.partition_A(sq))
        rk = mma_qk.make_fragment_B(qk_part.partition_B(sk))
        rv = mma_pv.make_fragment_B(pv_part.partition_B(self.operands.value_operand(sv)))
        s = cute.make_rmem_tensor(
            mma_qk.partition_shape_C((self.variant.q_rows, self.tile_n)), Float32
        )
        sums = self.operands.make_sums(
            mma_pv.partition_shape_C((self.tile_m, self.d_v + self.operands.counted))
        )
        p = mma_pv.make_fragment_A(mma_pv.partition_shape_A((self.tile_m, self.tile_n)))
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        rescale = cute.make_rmem_tensor(2, Float32)
        unused = cute.make_rmem_tensor(2, Float32)

        # The result goes from registers by stmatrix to 64x64 pieces in shared memory, and from
        # there by TMA stores.
        epi_mma = hopper.make_trivial_tiled_mma(
            self.operands.out_dtype,
            self.operands.out_dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (64, PIECE),
        )
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.operands.out_dtype)
        r2s = cute.make_tiled_copy_S(stmatrix, cute.make_tiled_copy_C_atom(stmatrix, epi_mma))
        to_so = r2s.get_slice(wg_thread).partition_D(so)
        piece = cute.make_rmem_tensor(to_so.shape[:3], self.operands.out_dtype)

        q_read, q_parts = self.q_reader(wg), self.variant.q_parts
        k_read, v_read = reader(self.variant.stages), reader(self.variant.stages)
        # A thread's first row in a tile, and its first column in a block of keys.
        my_row = self.own_row(wg, wg_thread // 32 * 16, lane // 4, packed)
        my_column = lane % 4 * 2
        rows = (row_max, row_sum, rescale)
        if wg == warpgroups - 1:
            self.give_turn(0)

        # The first tile's first block of keys: scores and softmax alone.
        row, head, entry = self.tile(Int32(0), q_tiles, packed, problem)
        queries, keys, q_at, _, start = self.sequence(packed, entry, problem)
        low, last = self.key_blocks(row, queries, keys, packed, problem)
        scale_log2, slope, gain = self.operands.scales(factors, entry, head, problem)
        q_ring.consumer_wait(q_read)
        k_ring.consumer_wait(k_read)
        warpgroup.fence()
        self.multiply_qk(s, rq, rk, q_read.index, k_read.index)
        self.operands.clear(sums)
        warpgroup.wait_group(0)
        k_ring.consumer_release(k_read)
        k_read.advance()
        if const_expr(capped):
            cap(s, slope)
        if self.needs_mask(last, keys):
            own = self.keys_of(self.row_of(row, my_row, packed), keys, queries)
            self.hide(s, (last - 1) * self.tile_n + my_column, own, keys, problem)
        self.operands.soften(s, rows, scale_log2, True, True)
        self.operands.to_operand(s, p)
        self.operands.count(s, rows, lse, True)

        for turn in cutlass.range(rounds, unroll=1):
            at_row = self.row_of(row, my_row, packed)
            offset = keys - queries
            bottom, top = self.free_blocks(row, offset, low, last, packed, problem)
            first = low
            passed = self.blocks_to_pass(row, wg, queries, low, last, packed)
            if const_expr(passed is not None):
                for _ in cutlass.range(passed, unroll=1):
                    self.pass_block(k_ring, k_read, v_ring, v_read, wg)
                    k_read.advance()
                    v_read.advance()
                first = low + passed
                bottom, top = cutlass.max(bottom, first), cutlass.max(top, first)
            # Blocks at the mask's upper edge, then free ones, then those at its lower edge.
            for part in cutlass.range_constexpr(3):
                masked = part != 1
                begin, end = ((top, last - 1), (bottom, top), (first, bottom))[part]
                if const_expr(part == 1 or (self.mask, part) in _EDGES):
                    for step in cutlass.range(end - begin, unroll=1):
                        k_ring.consumer_wait(k_read)
                        self.start(s, sums, p, rq, rk, rv, q_read, k_read, v_read, v_ring, wg)
                        warpgroup.wait_group(1)
                        k_ring.consumer_release(k_read)
                        if const_expr(q_parts > 1):
                            if end - 1 - step == low:
                                q_ring.consumer_release(q_read)
                        if const_expr(capped):
                            cap(s, slope)
                        if const_expr(masked):
                            column = (end - 1 - step) * self.tile_n + my_column
                            self.hide(s, column, self.moved(at_row, offset), keys, problem)
                        self.operands.absorb(
                            *(s, sums, p, rows, scale_log2, masked),
                            *(v_read, v_ring, lse, batch),
                        )
                        k_read.advance()
                        v_read.advance()
            if const_expr(q_parts == 1):
                q_ring.consumer_release(q_read)
            else:
                if last - 1 == low:
                    q_ring.consumer_release(q_read)
            for _ in cutlass.range_constexpr(q_parts):
                q_read.advance()

            # This tile's last values, and the next tile's first scores. After the last tile those
            # are of arbitrary data, and are not used.
            more = turn + 1 < rounds
            next_row, next_head, next_entry = self.tile(turn + 1, q_tiles, packed, problem)
            next_queries, next_keys, next_at, _, next_start = self.sequence(
                packed, next_entry, problem
            )
            next_low, next_last = self.key_blocks(
                next_row, next_queries, next_keys, packed, problem
            )
            next_scale, next_slope, next_gain = self.operands.scales(
                factors, next_entry, next_head, problem
            )
            if more:
                q_ring.consumer_wait(q_read)
                k_ring.consumer_wait(k_read)
            self.start(s, sums, p, rq, rk, rv, q_read, k_read, v_read, v_ring, wg)

            place = (entry, head, heads, seq_q, start)
            self.finish_rows(
                *(rows, scale_log2, gain, lse, sinks, packed, place, at_row, queries, lane)
            )

            warpgroup.wait_group(1)
            if more:
                k_ring.consumer_release(k_read)
            k_read.advance()
            if const_expr(capped):
                cap(s, next_slope)
            if self.needs_mask(next_last, next_keys):
                next_at_row = self.row_of(next_row, my_row, packed)
                own = self.keys_of(next_at_row, next_keys, next_queries)
                column = (next_last - 1) * self.tile_n + my_column
                self.hide(s, column, own, next_keys, problem)
            self.operands.soften(s, rows[:2] + (unused,), next_scale, True, True)

            warpgroup.wait_group(0)
            v_ring.consumer_release(v_read)
            v_read.advance()
            self.operands.to_operand(s, p)
            self.operands.count(s, rows, lse, True)
            self.operands.normalize(sums, rescale, gain)
            values = cute.size(piece)
            o_stages = self.variant.o_stages
            hidden_o = self.hidden_results(queries, row, wg, packed)
            o_places = sequence_coordinates(seq_q, self.d_v, heads, batch, hidden_o)
            from_so, to_o = copy_places(tma_o, so, (ROWS, PIECE), o_places)
            for chunk in cutlass.range_constexpr(self.d_v // PIECE):
                stage = chunk % o_stages
                if const_expr(stage == 0):
                    if warp_index % 4 == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    sync(_WARPGROUP + wg, WARPGROUP)
                for i in cutlass.range_constexpr(values):
                    value = self.operands.total(sums, chunk * values + i) * rescale[i // 2 % 2]
                    piece[i] = value.to(self.operands.out_dtype)
                cute.copy(r2s, piece, to_so[None, None, None, wg * o_stages + stage])
                if const_expr(stage == o_stages - 1):
                    cute.arch.fence_proxy("async.shared", space="cta")
                    sync(_WARPGROUP + wg, WARPGROUP)
                    if warp_index % 4 == 0:
                        for i in cutlass.range_constexpr(o_stages):
                            at, column = self.result_tile(row, wg), chunk - stage + i
                            outer = outer_coordinates(q_at, self.packed)
                            cute.copy(
                                tma_o,
                                from_so[None, wg * o_stages + i],
                                to_o[None, (at, column, head, *outer)],
                            )
                        cute.arch.cp_async_bulk_commit_group()
            self.operands.clear(sums)
            row, head, entry = next_row, next_head, next_entry
            low, last = next_low, next_last
            scale_log2, slope, gain = next_scale, next_slope, next_gain
            queries, keys, q_at, start = next_queries, next_keys, next_at, next_start
        if warp_index % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def finish_rows(self, rows, scale, gain, lse, sinks, packed, place, at_row, queries, lane):
        """The rows' factors of the result, and their logarithms."""
        row_max, row_sum, rescale = rows
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            rescale[r] = inverse(total)
            if const_expr(gain is not None):
                rescale[r] = rescale[r] * gain
            row_sum[r] = total
        if const_expr(sinks is not None):
            if sinks.toint() != 0:
                sink = (sinks + place[1]).load()
                for r in cutlass.range_constexpr(2):
                    top = largest(row_max[r], self.operands.limited(scale))
                    top, total, shrink = join_sink(top, row_sum[r], sink)
                    rescale[r] = inverse(total) * shrink
                    # The logarithm, which rounding alone would leave below the sink.
                    row_max[r] = cute.arch.fmax((top + cute.math.log2(total)) * _LN2, sink)
        if lse.toint() != 0:
            if lane % 4 == 0:
                to_lse = lse + self.lse_place(packed, *place)
                for r in cutlass.range_constexpr(2):
                    if at_row + 8 * r < queries:
                        value = largest(row_max[r], self.operands.limited(scale))
                        value += cute.math.log2(row_sum[r])
                        if const_expr(self.operands.lift != 0.0):
                            value -= self.operands.lift
                        value *= _LN2
                        if const_expr(sinks is not None):
                            value = row_max[r] if sinks.toint() != 0 else value
                        (to_lse + (at_row + 8 * r)).store(value)

    # The products.

    def mma_qk(self):
        return hopper.make_trivial_tiled_mma(
            self.operands.dtype,
            self.operands.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            (self.variant.warpgroups // self.variant.q_parts, 1, 1),
            (64, self.tile_n),
        )

    def qk_thread(self, wg):
        """A warpgroup's first thread among those that multiply one stage of q."""
        return wg * WARPGROUP if self.variant.q_parts == 1 else 0

    def q_reader(self, wg):
        stages = self.variant.q_stages
        if self.variant.q_parts == 1:
            return reader(stages)
        return pipeline.PipelineState(stages, Int32(0), wg, Int32(0))

    def mma_pv(self):
        return hopper.make_trivial_tiled_mma(
            self.operands.dtype,
            self.operands.dtype,
            warpgroup.OperandMajorMode.K,
            self.operands.value_major,
            Float32,
            (self.variant.warpgroups, 1, 1),
            (64, self.d_v + self.operands.counted),
            a_source=warpgroup.OperandSource.RMEM,
        )

    def multiply_qk(self, s, rq, rk, q_stage, stage):
        """Starts s = q k^T."""
        mma = self.mma_qk()
        for block in range(self.variant.columns // self.operands.depth):
            mma.set(warpgroup.Field.ACCUMULATE, block != 0)
            cute.gemm(mma, s, rq[None, None, block, q_stage], rk[None, None, block, stage], s)
        warpgroup.commit_group()

    @cute.jit
    def start(self, s, sums, p, rq, rk, rv, q_read, k_read, v_read, v_ring, wg):
        """Starts s of a block and p v of the one before it, in this warpgroup's turn."""
        self.take_turn(wg)
        warpgroup.fence()
        self.multiply_qk(s, rq, rk, q_read.index, k_read.index)
        v_ring.consumer_wait(v_read)
        self.operands.multiply_pv(self.mma_pv(), sums, p, rv, v_read.index)
        self.end_turn(wg)

    @cute.jit
    def pass_block(self, k_ring, k_read, v_ring, v_read, wg):
        """`start` of a warpgroup that has no rows in a tile: it multiplies nothing."""
        k_ring.consumer_wait(k_read)
        k_ring.consumer_release(k_read)
        self.take_turn(wg)
        v_ring.consumer_wait(v_read)
        v_ring.consumer_release(v_read)
        self.end_turn(wg)

    @cute.jit
    def end_turn(self, wg):
        next_wg = wg + 1
        if next_wg == self.variant.warpgroups:
            next_wg = Int32(0)
        self.give_turn(next_wg)

    def take_turn(self, wg):
        if self.operands.turns:
            sync(_TURN + wg, 2 * WARPGROUP)

    def give_turn(self, wg):
        if self.operands.turns:
            arrive(_TURN + wg, 2 * WARPGROUP)

    # Tiles, sequences and masks.

    def packed_rows(self, starts, sizes):
        return Packed(*starts, *sizes) if self.packed else None

    def measured(self, packed, problem):
        """The sizes, with what has to be read for them."""
        return packed

    def tiles(self, packed, problem):
        """The tiles of a head's longest sequence, and all of them."""
        q_tiles = cute.ceil_div(problem.seq_q, self.tile_m)
        return q_tiles, q_tiles * problem.heads * problem.batch

    def tile(self, turn, q_tiles, packed, problem):
        """This block's tile in a round: row of tiles, head and batch entry."""
        at = place(turn, self.masked)
        return tile_position(
            *(at, q_tiles, problem.heads, problem.batch, problem.band, self.masked)
        )

    def sequence(self, packed, entry, problem):
        """A sequence's numbers of queries and of keys, its two places in the maps, and its first
        query's row."""
        if not self.packed:
            return problem.seq_q, problem.seq_k, entry, entry, Int32(0)
        entry = cutlass.min(entry, problem.batch - 1)
        q_start, q_end = rows_between(
            packed.starts_q, packed.step_q, packed.total_q, entry, entry + 1
        )
        k_start, k_end = rows_between(
            packed.starts_k, packed.step_k, packed.total_k, entry, entry + 1
        )
        return q_end - q_start, k_end - k_start, q_end, k_end, q_start

    def hidden(self, length):
        """The map's rows before a packed sequence's; None if sequences have one length."""
        return PACKED_ROWS - length if self.packed else None

    def lse_place(self, packed, entry, head, heads, seq_q, start):
        if not self.packed:
            return cutlass.Int64(entry * heads + head) * seq_q
        return cutlass.Int64(head) * packed.total_q + start

    # A thread's first row: in a tile, in a sequence, and the key that it stands at.

    def own_row(self, wg, of_warp, of_lane, packed):
        return wg * ROWS + of_warp + of_lane

    def row_of(self, tile, row, packed):
        return tile * self.tile_m + row

    def keys_of(self, row, keys, queries):
        return row + keys - queries

    def moved(self, row, offset):
        return row + offset

    def hidden_results(self, queries, row, wg, packed):
        """As `hidden`, of the result's map."""
        return self.hidden(queries)

    def result_tile(self, row, wg):
        return row * self.variant.warpgroups + wg

    def free_blocks(self, row, offset, low, last, packed, problem):
        return free_blocks(
            row * self.tile_m + offset,
            *(self.tile_m, self.tile_n, low, last, problem.left, problem.right, self.mask),
        )

    @cute.jit
    def key_blocks(self, row, queries, keys, packed, problem):
        """The blocks of keys that a tile needs: the first, and one more than the last."""
        own = row * self.tile_m + keys - queries
        low, last = key_blocks(
            *(own, self.tile_m, self.tile_n, keys, problem.left, problem.right, self.mask)
        )
        if const_expr(self.packed):
            # A tile after a short sequence's end: one block, and nothing is stored.
            last = cutlass.max(last, 1)
            last = last if row * self.tile_m < queries else Int32(1)
            low = cutlass.min(low, last - 1)
        return low, last

    def blocks_to_pass(self, row, wg, queries, low, last, packed):
        """How many blocks a warpgroup need not multiply; None if it has rows in every tile."""
        return None

    def needs_mask(self, last, seq_k):
        """True if a tile's first block may have keys that some row does not see."""
        return True if self.masked else last * self.tile_n > seq_k

    def hide(self, s, column, own, seq_k, problem):
        """Sets the scores of keys that a row does not see to minus infinity; `own` is the key that
        a thread's first row stands at."""
        begin, end = None, (seq_k - column,) * 2
        if self.masked:
            end = [cutlass.min(end[r], own + 8 * r + problem.right + 1 - column) for r in range(2)]
        if self.mask == "window":
            begin = [own + 8 * r - problem.left - column for r in range(2)]
        hide_outside(s, begin, end)
