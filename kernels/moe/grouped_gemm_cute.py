# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm and its gradients: groups of consecutive rows, each with its own matrix.

The kinds, for a group e of rows of a:
  "plain"        out[rows] = a[rows] @ b[e]^T,  a[m, k], b[groups, n, k]
  "grad_x"       out[rows] = a[rows] @ b[e],    a[m, k], b[groups, k, n]
  "grad_weight"  out[e] = a[rows]^T @ b[rows],  a[m, k], b[m, n], out[groups, k, n]

Only the device knows how many rows a group has, so thread blocks are persistent and find their
tiles there. For the first two kinds they search a table in shared memory of how many tiles begin
before each group. Rows outside of all groups make two more groups, for which nothing is multiplied.
The tile of a group's last rows also reads rows of the next group, and does not store their
products. "grad_weight" sums over a group's rows: in its last step, rows of the next group become
zeros.

Warp 0 loads tiles of a and b into a ring of stages (full[stage]: the copy engine's bytes;
empty[stage]: one arrival per multiplying warp). Two warpgroups multiply, 64 rows of a tile each.
Their results are staged in shared memory, instead of a fourth stage of the ring, while the copy
engine stores them and the next tile is multiplied.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from gemm_parts_cute import (
    box_copies,
    group_places,
    next_stage,
    release,
    result_copies,
    result_piece,
    sync,
    tensor_in,
    tiled_mma,
)
from linear_layouts_cute import (
    EPI,
    MAJORS,
    ROW,
    WARPGROUP,
    coordinates,
    matrix,
    round_up,
    swizzled,
)

CONSUMERS = 2  # warpgroups that multiply
MOST_GROUPS = 512
_BOTH = 1  # named barriers: of the two warpgroups,
_WARPGROUP = 2  # and 3: within one
_MOST_SEARCHED = 512  # the search's first step


class Arguments(NamedTuple):
    """The kernel's parameters after its tensor maps, in order. This is the only such list in
    Python; GroupedGemmArguments in grouped_gemm_kernels.h has members of the same names."""

    offsets: cute.Pointer
    out: cute.Pointer
    groups: Int32
    m: Int32
    n: Int32
    k: Int32
    offset_words: Int32  # 2 for int64 offsets, else 1


class GroupedGemm:
    arguments = Arguments
    scaled = False  # float8 with scales of blocks: grouped_blocks_cute.py

    def __init__(self, name, dtype, kind, tile_m, tile_n, stages):
        self.name = name
        self.dtype = self.out_dtype = dtype
        self.of_weight = kind == "grad_weight"
        self.majors = MAJORS.get(kind, ("k", "k"))
        self.tile_m, self.tile_n = tile_m, tile_n
        self.tile_k = ROW * 8 // dtype.width  # elements of the sum per stage
        self.unit = 128 // dtype.width  # elements in 16 bytes
        self.stages = stages
        self.threads = (1 + CONSUMERS) * WARPGROUP
        self.pieces = tile_n // EPI  # stored per warpgroup
        self.buffers = self.pieces  # in shared memory, per warpgroup
        self.words = MOST_GROUPS + 4  # of the table of tiles
        assert self.scaled or tile_m == CONSUMERS * EPI

    def smem_layouts(self):
        """Staged layouts of a, b and the output's pieces."""
        return (
            swizzled(self.dtype, self.tile_m, self.tile_k, self.stages, self.majors[0]),
            swizzled(self.dtype, self.tile_n, self.tile_k, self.stages, self.majors[1]),
            swizzled(self.out_dtype, EPI, EPI, self.buffers * CONSUMERS),
        )

    def storage(self):
        def tiles(dtype, layout):
            return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], 1024]

        a_layout, b_layout, y_layout = self.smem_layouts()

        @cute.struct
        class Storage:
            a: tiles(self.dtype, a_layout)
            b: tiles(self.dtype, b_layout)
            y: tiles(self.out_dtype, y_layout)
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            words: cute.struct.MemRange[Int32, self.words]  # first how many tiles begin before

        return Storage

    def smem_bytes(self):
        """The size of storage() as the launch requests it."""
        ring = self.stages * ((self.tile_m + self.tile_n) * ROW + 16)
        return round_up(ring + self.buffers * CONSUMERS * EPI * EPI * 2 + self.words * 4)

    def matrices(self, groups, n, k):
        """The groups' matrices in memory, as (column of the result, element of the sum, group)."""
        n8, k8 = cute.assume(n, divby=8), cute.assume(k, divby=self.unit)
        stride = (k8, 1, n8 * k8) if self.majors[1] == "k" else (1, n8, n8 * k8)
        return cute.make_layout((n8, k8, groups), stride=stride)

    def places(self, groups, n, k):
        """The coordinates of their tensor map."""
        if self.majors[1] == "mn":
            return cute.make_identity_tensor((n, k, groups))
        return group_places(groups, n, k)

    def results(self, m, groups, n, k):
        """The coordinates of the result's map: (row, column), or (row, column, group)."""
        if self.of_weight:
            return group_places(groups, k, n)
        return coordinates(m, n)

    @cute.jit
    def __call__(self, a, b, *arguments):
        *values, blocks, stream = arguments
        p = self.arguments(*values)
        groups, m, n, k = p.groups, p.m, p.n, p.k
        load = cpasync.CopyBulkTensorTileG2SOp()
        a_layout, b_layout, y_layout = self.smem_layouts()
        n8 = cute.assume(n, divby=8)
        out_matrix = cute.make_layout((m, n8), stride=(n8, 1))
        if const_expr(self.of_weight):
            a_matrix, b_matrix = matrix(k, m, "mn"), matrix(n, m, "mn")
            out_matrix = cute.make_layout((k, n8, groups), stride=(n8, 1, n8 * k))
        else:
            a_matrix, b_matrix = matrix(m, k, "k", self.unit), self.matrices(groups, n, k)
        tma_a, _ = cpasync.make_tiled_tma_atom(
            load,
            cute.make_tensor(a, a_matrix),
            cute.slice_(a_layout, (None, None, 0)),
            (self.tile_m, self.tile_k),
        )
        tma_b, _ = cpasync.make_tiled_tma_atom(
            load,
            cute.make_tensor(b, b_matrix),
            cute.slice_(b_layout, (None, None, 0)),
            (self.tile_n, self.tile_k),
        )
        tma_out = None
        if const_expr(not self.scaled):
            tma_out, _ = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                cute.make_tensor(p.out, out_matrix),
                cute.slice_(y_layout, (None, None, 0)),
                (EPI, EPI),
            )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(tma_a, tma_b, tma_out, p).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        tma_b: cute.CopyAtom,
        tma_out: cute.CopyAtom | None,
        p: tuple,
    ):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        storage = cutlass.utils.SmemAllocator().allocate(self.storage())
        full = storage.barriers.data_ptr()
        empty = full + self.stages
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + i, 1 + 32 * self.scaled)
                    cute.arch.mbarrier_init(empty + i, 4 * CONSUMERS)
            cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(not self.of_weight):
            if warp_index == 0:
                self.count_tiles(storage, p, thread)
        cute.arch.sync_threads()

        columns = cute.ceil_div(p.n, self.tile_n)
        first = cute.arch.block_idx()[0]
        grid = cute.arch.grid_dim()[0]
        tiles = Int32(0)
        if const_expr(self.of_weight):
            tiles = p.groups * cute.ceil_div(p.k, self.tile_m) * columns
        else:
            tiles = storage.words.data_ptr()[p.groups + 2] * columns
        search = (storage, p, columns)
        ring = (full, empty)
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(40)
            if warp_index == 0:
                self.load(tma_a, tma_b, ring, search, (first, grid, tiles))
            if const_expr(self.scaled):
                if warp_index == 1:
                    self.load_scales(ring, search, (first, grid, tiles), thread - 32)
        else:
            cute.arch.setmaxregister_increase(232)
            consumer = warpgroup_index - 1
            self.multiply(thread, consumer, ring, search, (first, grid, tiles), tma_out)

    # -- which tile --------------------------------------------------------------------------------

    @cute.jit
    def bound(self, p, index):
        """Where part `index` begins: 0 are the rows before all groups, groups + 1 those after."""
        row = self.nearest(p, cutlass.min(cutlass.max(index - 1, 0), p.groups), p.m)
        row = Int32(0) if index == 0 else row
        return p.m if index > p.groups + 1 else row

    @cute.jit
    def nearest(self, p, index, most):
        """The number from 0 to `most` that is nearest to an offset, whatever that is."""
        words = p.offset_words
        at = index * words
        low, high = (p.offsets + at).load(), (p.offsets + (at + words - 1)).load()
        high = high if words == 2 else low >> 31
        row = Int32(cutlass.min(Uint32(low), Uint32(most))) if high == 0 else most
        return row if high >= 0 else Int32(0)

    @cute.jit
    def begin(self, p, part):
        """The first row of a part."""
        return self.bound(p, part)

    @cute.jit
    def end(self, p, part):
        """The row behind its last one."""
        return self.bound(p, part + 1)

    @cute.jit
    def count_tiles(self, storage, p, lane):
        """One warp: how many tiles of rows begin before each part."""
        begins = storage.words.data_ptr()
        parts = p.groups + 2
        before = Int32(0)
        if lane == 0:
            begins[0] = 0
        for start in cutlass.range(0, parts, 32, unroll=1):
            part = start + lane
            rows = self.end(p, part) - self.begin(p, part)
            upto = cute.ceil_div(cutlass.max(rows, 0), self.tile_m)
            for i in cutlass.range_constexpr(5):
                below = cute.arch.shuffle_sync_up(upto, 1 << i, mask_and_clamp=0)
                upto += below if lane >= 1 << i else 0
            if part < parts:
                begins[part + 1] = before + upto
            before += cute.arch.shuffle_sync(upto, 31)

    @cute.jit
    def find(self, search, number):
        """A tile's group, its first row and column and the row that ends it, the first row of the
        sum and what ends that, and steps."""
        storage, p, columns = search
        groups, k = p.groups, p.k
        row_tile, column = number // columns, number % columns
        group, row, end, low, high = Int32(0), Int32(0), k, Int32(0), k
        if const_expr(self.of_weight):
            rows = cute.ceil_div(k, self.tile_m)
            group = row_tile // rows
            row = (row_tile - group * rows) * self.tile_m
            low = self.bound(p, group + 1)
            high = cutlass.max(self.bound(p, group + 2), low)
        else:
            begins = storage.words.data_ptr()
            part, step = Int32(0), Int32(_MOST_SEARCHED)
            for _ in cutlass.range_constexpr(_MOST_SEARCHED.bit_length()):
                probe = part + step
                before = begins[cutlass.min(probe, groups + 2)]
                part = probe if (probe <= groups + 1) & (before <= row_tile) else part
                step = step // 2
            group = part - 1
            row = self.begin(p, part) + (row_tile - begins[part]) * self.tile_m
            end = self.end(p, part)
            high = k if (group >= 0) & (group < groups) else Int32(0)
        return group, row, end, column, low, high, cute.ceil_div(high - low, self.tile_k)

    # -- to shared memory --------------------------------------------------------------------------

    @cute.jit
    def load(self, tma_a, tma_b, ring, search, place):
        full, empty = ring
        storage, p, _ = search
        groups, m, n, k = p.groups, p.m, p.n, p.k
        first, grid, tiles = place
        a_layout, b_layout, _ = self.smem_layouts()
        sa, sb = tensor_in(storage.a, a_layout), tensor_in(storage.b, b_layout)
        index, phase = Int32(0), Int32(1)
        for number in cutlass.range(first, tiles, grid, unroll=1):
            group, row, _, column, low, _, steps = self.find(search, number)
            column = column * self.tile_n
            if const_expr(self.of_weight):
                of_a = cute.domain_offset((row, low), coordinates(k, m, "mn"))
                of_b = cute.domain_offset((column, low), coordinates(n, m, "mn"))
            else:
                of_a = cute.domain_offset((row, 0), coordinates(m, k))
                of_b = cute.domain_offset((column, 0, group), self.places(groups, n, k))
            to_a, from_a = box_copies(tma_a, sa, of_a, (self.tile_m, self.tile_k))
            to_b, from_b = box_copies(tma_b, sb, of_b, (self.tile_n, self.tile_k))
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + index, phase)
                barrier = full + index
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        barrier, (self.tile_m + self.tile_n) * ROW
                    )
                at_b = (0, step) if const_expr(self.of_weight) else (0, step, 0)
                cute.copy(tma_a, from_a[None, (0, step)], to_a[None, index], tma_bar_ptr=barrier)
                cute.copy(tma_b, from_b[None, at_b], to_b[None, index], tma_bar_ptr=barrier)
                index, phase = next_stage(self.stages, index, phase)

    # -- products ----------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, thread, consumer, ring, search, place, tma_out):
        """A warpgroup: its rows of its tiles, from the ring to the result."""
        full, empty = ring
        storage, p, _ = search
        first, grid, tiles = place
        a_layout, b_layout, _ = self.smem_layouts()
        sa, sb = tensor_in(storage.a, a_layout), tensor_in(storage.b, b_layout)
        mma = tiled_mma(self.dtype, CONSUMERS, self.tile_n, self.majors)
        part = mma.get_slice(consumer * WARPGROUP)
        ra = mma.make_fragment_A(part.partition_A(sa))
        rb = mma.make_fragment_B(part.partition_B(sb))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((self.tile_m, self.tile_n)), Float32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        index, phase = Int32(0), Int32(0)
        for number in cutlass.range(first, tiles, grid, unroll=1):
            group, row, end, column, low, high, steps = self.find(search, number)
            acc.fill(0.0)
            warpgroup.fence()
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(full + index, phase)
                if const_expr(self.of_weight):
                    rows = high - low - step * self.tile_k
                    if rows < self.tile_k:
                        self.clear_rows(storage, index, rows, thread - WARPGROUP)
                for at_k in cutlass.range_constexpr(cute.size(ra, mode=[2])):
                    at = (None, None, at_k, index)
                    cute.gemm(mma, acc, ra[at], rb[at], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if step > 0:
                    release(empty, index - 1 if index > 0 else self.stages - 1)
                index, phase = next_stage(self.stages, index, phase)
            warpgroup.wait_group(0)
            if steps > 0:
                release(empty, index - 1 if index > 0 else self.stages - 1)
            at = (row + consumer * EPI, column * self.tile_n, group)
            self.put_out(p, storage, thread % WARPGROUP, consumer, acc, tma_out, at, end)
        if thread % WARPGROUP < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def clear_rows(self, storage, index, rows, thread):
        """Zeros the next group's rows of a stage in both operands: they need not be finite. In
        shared memory a row has 128 bytes per 64 columns."""
        threads = CONSUMERS * WARPGROUP
        vector = cute.make_layout(8)
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        pieces = (self.tile_k - rows) * 8
        for tensor, size in ((storage.a, self.tile_m), (storage.b, self.tile_n)):
            for block in cutlass.range_constexpr(size // EPI):
                to = tensor.data_ptr() + (index * (size // EPI) + block) * (self.tile_k * EPI)
                to = to + rows * EPI
                for piece in cutlass.range(thread, pieces, threads, unroll=1):
                    cute.make_tensor((to + piece * 8).align(16), vector).store(zeros.load())
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=_BOTH, number_of_threads=threads)

    # -- from registers ----------------------------------------------------------------------------

    @cute.jit
    def put_out(self, p, storage, wg_thread, consumer, acc, tma_out, at, end):
        """A warpgroup's 64 rows, stored by the copy engine while the next tile is multiplied, or by
        the threads where a group ends among them."""
        row, column, _ = at
        _, _, layout = self.smem_layouts()
        sy, r2s, to_sy, piece = result_copies(self.dtype, storage.y, layout, wg_thread)
        storing = wg_thread < 32
        if storing:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        sync(_WARPGROUP + consumer, WARPGROUP)
        for chunk in cutlass.range_constexpr(self.pieces):
            for i in cutlass.range_constexpr(EPI // 2):
                piece[i] = acc[chunk * (EPI // 2) + i].to(self.dtype)
            cute.copy(r2s, piece, to_sy[None, None, None, consumer * self.pieces + chunk])
        # A group's matrix ends where its map does.
        whole = True if const_expr(self.of_weight) else row + EPI <= end
        if whole:
            cute.arch.fence_proxy("async.shared", space="cta")
            sync(_WARPGROUP + consumer, WARPGROUP)
            if storing:
                places = self.results(p.m, p.groups, p.n, p.k)
                first = at if const_expr(self.of_weight) else (row, column)
                places = cute.domain_offset(first, places)
                from_sy, to = box_copies(tma_out, sy, places, (EPI, EPI))
                for chunk in cutlass.range_constexpr(self.pieces):
                    there = (0, chunk, 0) if const_expr(self.of_weight) else (0, chunk)
                    here = consumer * self.pieces + chunk
                    cute.copy(tma_out, from_sy[None, here], to[None, there])
                cute.arch.cp_async_bulk_commit_group()
        else:
            cute.arch.sync_warp()
            for chunk in cutlass.range_constexpr(self.pieces):
                here = consumer * self.pieces + chunk
                self.store_rows(p, storage, here, wg_thread, row, end, column + chunk * EPI)

    @cute.jit
    def store_rows(self, p, storage, piece, wg_thread, row, end, column):
        """A warp's 16 rows of a piece: 8 lanes store 128 neighbouring bytes."""
        lane = wg_thread % 32
        vector = cute.make_layout(8)
        from_y = storage.y.data_ptr() + piece * (EPI * EPI)
        at_column = column + lane % 8 * 8
        for i in cutlass.range_constexpr(4):
            at_row = wg_thread // 32 * 16 + lane // 8 + i * 4
            values = cute.make_tensor(result_piece(from_y, at_row, lane).align(16), vector)
            if (row + at_row < end) & (at_column < p.n):
                to = p.out + (Int64(row + at_row) * p.n + at_column)
                cute.make_tensor(to.align(16), vector).store(values.load())
