# SPDX-License-Identifier: Apache-2.0
"""Attention's host functions and kernels, by how sequences lie in memory."""

import cutlass.cute as cute
from attention_forward_cute import AttentionForward
from attention_layouts_cute import PIECE, ROWS
from attention_packed_cute import Packed
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync


class Launcher(AttentionForward):
    @property
    def value_packed(self):
        """Whether v is packed as q, k and o are."""
        return self.packed

    def maps(self, pointers, batch, seq_q, seq_k, heads, kv_heads):
        """Of q, k, v and o as [batch, heads, rows, d]; for the build's checks, without gaps."""
        q_layout, k_layout, v_layout, o_layout = self.smem_layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        queries, keys, values = (seq_q, self.d), (seq_k, self.d), self.value_matrix(seq_k)
        kinds = (
            (load, q_layout, (self.tile_m, self.d), queries, heads, self.packed),
            (load, k_layout, (self.tile_n, self.d), keys, kv_heads, self.packed),
            (load, v_layout, self.value_tile(), values, kv_heads, self.value_packed),
            (store, o_layout, (ROWS, PIECE), queries, heads, self.packed),
        )
        atoms = []
        for pointer, (op, layout, tile, (rows, columns), count, packed) in zip(
            pointers, kinds, strict=True
        ):
            # Of packed sequences, what the launcher makes of the first of the outermost dimensions
            # is in attention_varlen.cc; here it has two elements.
            outer = (count, 2, batch) if packed else (count, batch)
            shape, stride = (rows, columns), (columns, 1)
            for extent in outer:
                stride = (*stride, rows * columns if len(shape) == 2 else stride[-1] * shape[-1])
                shape = (*shape, extent)
            tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
            smem = cute.slice_(layout, (None, None, 0))
            atoms.append(cpasync.make_tiled_tma_atom(op, tensor, smem, tile)[0])
        return atoms

    def launch(self, kernel, blocks, stream):
        kernel.launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )


class Attention(Launcher):
    """Sequences of one length: q is [batch, seq_q, heads, d]."""

    packed = False

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
        slope: Int32,
        left: Int32,
        right: Int32,
        band: Int32,
        blocks: Int32,
        stream,
    ):
        maps = self.maps((q, k, v, o), batch, seq_q, seq_k, heads, kv_heads)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        launch = self.kernel(
            *(*maps, lse),
            *(batch, seq_q, seq_k, heads, kv_heads, scale, slope, left, right, band),
        )
        self.launch(launch, blocks, stream)

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
        slope: Int32,
        left: Int32,
        right: Int32,
        band: Int32,
    ):
        self.run(
            *(tma_q, tma_k, tma_v, tma_o, lse, None, None),
            *(batch, seq_q, seq_k, heads, kv_heads, scale, slope, left, right, band),
        )


class AttentionPacked(Launcher):
    """Sequences of several lengths behind each other: the queries of sequence i are the rows from
    starts_q[i] to starts_q[i + 1]. The maps have PACKED_ROWS rows, of which a sequence's are the
    last ones, and two outermost dimensions that move them to where it ends: what follows a
    sequence is outside of the map."""

    packed = True

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        starts_q: cute.Pointer,
        starts_k: cute.Pointer,
        batch: Int32,
        seq_q: Int32,
        seq_k: Int32,
        heads: Int32,
        kv_heads: Int32,
        scale: Int32,
        slope: Int32,
        left: Int32,
        right: Int32,
        band: Int32,
        total_q: Int32,
        total_k: Int32,
        step_q: Int32,
        step_k: Int32,
        row_step: Int32,
        head_step: Int32,
        columns: Int32,
        blocks: Int32,
        stream,
    ):
        maps = self.maps((q, k, v, o), batch, seq_q, seq_k, heads, kv_heads)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        launch = self.kernel(
            *(*maps, lse, starts_q, starts_k, o),
            *(batch, seq_q, seq_k, heads, kv_heads, scale, slope, left, right, band),
            *(total_q, total_k, step_q, step_k, row_step, head_step, columns),
        )
        self.launch(launch, blocks, stream)

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        tma_o: cute.CopyAtom,
        lse: cute.Pointer,
        starts_q: cute.Pointer,
        starts_k: cute.Pointer,
        o: cute.Pointer,
        batch: Int32,
        seq_q: Int32,
        seq_k: Int32,
        heads: Int32,
        kv_heads: Int32,
        scale: Int32,
        slope: Int32,
        left: Int32,
        right: Int32,
        band: Int32,
        total_q: Int32,
        total_k: Int32,
        step_q: Int32,
        step_k: Int32,
        row_step: Int32,
        head_step: Int32,
        columns: Int32,
    ):
        packed = Packed(
            *(starts_q, starts_k, o),
            *(total_q, total_k, step_q, step_k, row_step, head_step, columns),
        )
        self.run(
            *(tma_q, tma_k, tma_v, tma_o, lse, packed, None),
            *(batch, seq_q, seq_k, heads, kv_heads, scale, slope, left, right, band),
        )
