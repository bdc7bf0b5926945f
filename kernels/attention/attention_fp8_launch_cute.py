# SPDX-License-Identifier: Apache-2.0
"""FP8 attention's host functions and kernels, by how sequences lie in memory."""

import cutlass.cute as cute
from attention_fp8_steps_cute import AttentionFp8Steps
from attention_packed_cute import Packed
from cutlass import Int32


class AttentionFp8(AttentionFp8Steps):
    """Sequences of one length."""

    packed = False

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        factors: cute.Pointer,
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
            *(*maps, lse, factors),
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
        factors: cute.Pointer,
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
            *(tma_q, tma_k, tma_v, tma_o, lse, None, factors),
            *(batch, seq_q, seq_k, heads, kv_heads, scale, slope, left, right, band),
        )


class AttentionFp8Packed(AttentionFp8Steps):
    """Sequences of several lengths behind each other, as AttentionPacked; but each one's transposed
    values begin with a tile."""

    packed = True

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        factors: cute.Pointer,
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
            *(*maps, lse, factors, starts_q, starts_k, o),
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
        factors: cute.Pointer,
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
            *(tma_q, tma_k, tma_v, tma_o, lse, packed, factors),
            *(batch, seq_q, seq_k, heads, kv_heads, scale, slope, left, right, band),
        )
