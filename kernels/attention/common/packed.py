# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: the rows of a sequence, and the result's rows outside all sequences.

Starts are unchecked data. Rows computed from them are clamped to the tensors here, so that no value
makes a kernel access other memory, or loop beyond the tensors' length.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

CLEARERS = 3  # warps per block, which neither load nor multiply


class Packed(NamedTuple):
    """The parameters of packed sequences beside the maps; AttentionPackedArgs in problem.h. The
    pointers come before the Problem in a kernel's parameters, the sizes after it."""

    starts_q: cute.Pointer
    starts_k: cute.Pointer
    o: cute.Pointer
    total_q: Int32  # rows of q, and of k
    total_k: Int32
    step_q: Int32  # from one of the starts to the next, in bytes
    step_k: Int32
    row_step: Int32  # of o, in 16 bytes
    head_step: Int32
    columns: Int32  # of o


SIZES = Packed._fields[3:]


def rows_between(starts, step, total, begin, end):
    """(first, end) of the rows from starts[begin] to starts[end]; empty if that is less."""
    first = cutlass.min(cutlass.max(load_at(starts, step, begin), 0), total)
    return first, cutlass.max(cutlass.min(load_at(starts, step, end), total), first)


def load_at(starts, step, at):
    """starts[at]; `step` is in bytes, so that the address takes one instruction."""
    address = starts.toint() + Int64(at) * step
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4).load()


@cute.jit
def clear_rows_of_no_sequence(packed, lse, batch, heads, planned, dtype, lanes, thread):
    """Stores zeros, and minus infinity as logarithms, to the rows before the first sequence, after
    the last one, and of each sequence after the `planned` ones. `lanes` store one head's row."""
    lane = thread % 32
    worker = cute.arch.block_idx()[0] * CLEARERS + (thread // 32 - 1)
    workers = cute.arch.grid_dim()[0] * CLEARERS
    begin, end = rows_between(packed.starts_q, packed.step_q, packed.total_q, 0, batch)
    behind = begin + packed.total_q - end
    for i in cutlass.range(worker, behind, workers, unroll=1):
        row = i
        if i >= begin:
            row = i + end - begin
        _clear(packed, lse, heads, row, dtype, lanes, lane)
    for entry in cutlass.range(worker, batch, workers, unroll=1):
        first, last = rows_between(packed.starts_q, packed.step_q, packed.total_q, entry, entry + 1)
        for row in cutlass.range(first + planned, last, unroll=1):
            _clear(packed, lse, heads, row, dtype, lanes, lane)


@cute.jit
def _clear(packed, lse, heads, row, dtype, lanes, lane):
    zeros = cute.make_rmem_tensor(8, dtype)
    zeros.fill(0.0)
    column = lane % lanes * 8
    if column < packed.columns:
        for head in cutlass.range(lane // lanes, heads, 32 // lanes, unroll=1):
            offset = Int64(row) * packed.row_step + Int64(head) * packed.head_step
            to = packed.o + (offset * 8 + column)
            cute.make_tensor(to.align(16), cute.make_layout(8)).store(zeros.load())
    if lse.toint() != 0:
        for head in cutlass.range(lane, heads, 32, unroll=1):
            (lse + (Int64(head) * packed.total_q + row)).store(-Float32.inf)
