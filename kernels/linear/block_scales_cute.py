# SPDX-License-Identifier: Apache-2.0
"""Shared by kernels of float8 operands with a scale per 1x128 and 128x128 values: copies of the
scales to shared memory, and products that are scaled into a second set of float32 sums."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

SCALE_BLOCK = 128


def copy_scale(to, source, real=None, size=4):
    """To shared memory; a size of 0 writes zero."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};",
        read_only_args=[to, source, Int32(size)],
        predicate=real,
    )


@cute.jit
def start_products(mmas, acc, rx, rw, of_x, of_w):
    """Begins the products of a stage of x and one of w, without what `acc` has had before."""
    start, mma = mmas
    warpgroup.fence()
    for at_k in cutlass.range_constexpr(cute.size(rx, mode=[2])):
        a, b = rx[None, None, at_k, of_x], rw[None, None, at_k, of_w]
        cute.gemm(start if const_expr(at_k == 0) else mma, acc, a, b, acc)
    warpgroup.commit_group()


@cute.jit
def add_scaled(sums, first, acc, by_row, at=0, count=None):
    """Adds `count` products from `at` on to the sums from `first` on, all by default; `by_row`: of
    this lane's upper and lower row."""
    for i in cutlass.range_constexpr(cute.size(acc) if count is None else count):
        sums[first + i] += acc[at + i] * by_row[i // 2 % 2]


def fixed(number):
    """The number, in a register: the compiler would compute it from the thread's index each step,
    and wait for that."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", read_only_args=[Int32(number)], write_only_types=[Int32]
    )
