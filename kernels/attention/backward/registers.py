# SPDX-License-Identifier: Apache-2.0
"""The backward's arithmetic in registers, and copies between registers and shared memory.

Value i of an accumulator is in row i // 2 % 2 of a thread's two, 8 apart, and in column i // 4 *
8 + i % 2 from its first one on. For scores, rows are keys and columns queries; a column's lse is
infinite if there is no query or it sees no key, so that p is 0.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.attention.common.layouts import PIECE, ROWS


@cute.jit
def probabilities(s, lse, scale):
    """exp2(s * scale - lse); `lse` is the address of a thread's first column's."""
    for i in cutlass.range_constexpr(cute.size(s) // 4):
        column = _pair(lse, 32 * i)
        for at in cutlass.range_constexpr(4):
            s[4 * i + at] = cute.math.exp2(s[4 * i + at] * scale - column[at % 2], fastmath=True)


@cute.jit
def capped_probabilities(s, p, lse, scale, dtype):
    """`s` is tanh(score / cap): p as an operand; s becomes p times the cap's derivative."""
    kind = _KINDS[dtype]
    pairs = cute.recast_tensor(p, Int32)
    for i in cutlass.range_constexpr(cute.size(s) // 4):
        column = _pair(lse, 32 * i)
        values = [
            cute.math.exp2(s[4 * i + at] * scale - column[at % 2], fastmath=True) for at in range(4)
        ]
        for half in cutlass.range_constexpr(2):
            pairs[2 * i + half] = _packed(kind, values[2 * half], values[2 * half + 1])
        for at in cutlass.range_constexpr(4):
            s[4 * i + at] = values[at] * _slope(s[4 * i + at])


@cute.jit
def sloped_probabilities(s, lse, scale):
    """`s` is tanh(score / cap); it becomes p times the cap's derivative."""
    for i in cutlass.range_constexpr(cute.size(s) // 4):
        column = _pair(lse, 32 * i)
        for at in cutlass.range_constexpr(4):
            value = s[4 * i + at]
            power = cute.math.exp2(value * scale - column[at % 2], fastmath=True)
            s[4 * i + at] = power * _slope(value)


@cute.jit
def score_gradients(s, dp, ds, delta, dtype):
    """ds = p * (dp - delta) as an operand, where `s` holds p."""
    kind = _KINDS[dtype]
    pairs = cute.recast_tensor(ds, Int32)
    for i in cutlass.range_constexpr(cute.size(s) // 4):
        column = _pair(delta, 32 * i)
        values = [s[4 * i + at] * (dp[4 * i + at] - column[at % 2]) for at in range(4)]
        for half in cutlass.range_constexpr(2):
            pairs[2 * i + half] = _packed(kind, values[2 * half], values[2 * half + 1])


@cute.jit
def score_gradients_of_operand(p, dp, ds, delta, dtype):
    """`score_gradients` where p is an operand; bfloat16 is the upper half of a float32."""
    kind = _KINDS[dtype]
    probabilities, pairs = cute.recast_tensor(p, Int32), cute.recast_tensor(ds, Int32)
    for i in cutlass.range_constexpr(cute.size(dp) // 4):
        column = _pair(delta, 32 * i)
        for half in cutlass.range_constexpr(2):
            at = 2 * i + half
            low, high = _unpacked(probabilities[at])
            low, high = low * (dp[2 * at] - column[0]), high * (dp[2 * at + 1] - column[1])
            pairs[at] = _packed(kind, low, high)


@cute.jit
def store_transposed(operand, address):
    """An operand of keys by queries to rows of queries: `address` from `transposed_place`."""
    pairs = cute.recast_tensor(operand, Int32)
    for i in cutlass.range_constexpr(cute.size(pairs) // 4):
        _stmatrix(".trans", address, 16 * 2 * PIECE * i, [pairs[4 * i + j] for j in range(4)])


@cute.jit
def transposed_place(thread):
    """Where in a 64-column piece, swizzled, a thread of a warpgroup begins."""
    lane, warp = thread % 32, thread // 32
    row = lane // 16 * 8 + lane % 8
    return row * 2 * PIECE + ((2 * warp + lane // 8 % 2) ^ (lane % 8)) * 16


@cute.jit
def store_rows(sums, factor, address, thread, dtype):
    """Accumulators of 64 rows, times a factor, to swizzled pieces of 64 columns."""
    kind = _KINDS[dtype]
    row, chunk = _matrix_place(thread)
    for i in cutlass.range_constexpr(_count(sums) // 8):
        at = address + row * 2 * PIECE + (chunk ^ (2 * i % 8)) * 16
        values = [sums[8 * i + j] * factor for j in range(8)]
        packed = [_packed(kind, values[2 * j], values[2 * j + 1]) for j in range(4)]
        _stmatrix("", at, 2 * i // 8 * ROWS * 2 * PIECE, packed)


@cute.jit
def store_plain(sums, address):
    """Accumulators as they lie: four of a thread, then those of the next thread."""
    for i in cutlass.range_constexpr(_count(sums) // 4):
        cute.arch.inline_ptx(
            f"st.shared.v4.f32 [{{$r0}} + {2048 * i}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
            read_only_args=[address, *[sums[4 * i + j] for j in range(4)]],
        )


def _slope(value):
    """The cap's derivative where its tangent is `value`. Hidden scores are minus infinity; the
    derivative must stay finite."""
    return cute.arch.fmax(1.0 - value * value, Float32(0.0))


def _count(sums):
    """The number of values in a register tensor, or in a list of some of them."""
    return len(sums) if isinstance(sums, list) else cute.size(sums)


_KINDS = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}


def _matrix_place(thread):
    """The row of 64 that a thread gives four 8x8 matrices by, and its first swizzled 16 bytes."""
    lane, warp = thread % 32, thread // 32
    return warp * 16 + lane // 8 % 2 * 8 + lane % 8, (lane // 16) ^ (lane % 8)


def _pair(address, offset):
    return cute.arch.inline_ptx(
        f"ld.shared.v2.f32 {{{{$w0}}, {{$w1}}}}, [{{$r0}} + {offset}];",
        write_only_types=[Float32, Float32],
        read_only_args=[address],
    )


def _packed(kind, low, high):
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[high, low],
    )


def _unpacked(pair):
    """Two bfloat16 as float32."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def _stmatrix(form, address, offset, values):
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x4{form}.shared.b16 [{{$r0}} + {offset}], "
        "{{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )
