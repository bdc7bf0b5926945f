# SPDX-License-Identifier: Apache-2.0
"""The arithmetic on a block's scores, in the registers of one warpgroup.

A thread has two rows of a 64-row accumulator, 8 apart: value i is in row i // 2 % 2 and column
i // 4 * 8 + i % 2, counted from the thread's first one. Four neighbouring threads share the rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

_LOG2_E = 1.4426950408889634
_LOWEST = -(2.0**80)  # in place of minus infinity, where no key of a row is seen
_LARGEST = 3.4028234663852886e38  # a sink beyond it, after scaling, would give NaN


@cute.jit
def softmax(
    s,
    row_max,
    row_sum,
    rescale,
    scale,
    first: cutlass.Constexpr[bool],
    masked: cutlass.Constexpr[bool],
    lift: cutlass.Constexpr[float] = 0.0,
    summed: cutlass.Constexpr[bool] = True,
    as_integers: cutlass.Constexpr[bool] = False,
    which: cutlass.Constexpr = (0, 1),
):
    """Turns scores into probabilities up to a factor: the largest of a row becomes 2**lift. Updates
    the rows' maxima, which are kept times `scale`, and their sums if `summed`; `rescale` gets the
    factor of earlier sums. `which` selects of the thread's two rows.

    `as_integers` requires maxima so far that are not negative: integers and floats then compare
    alike, and one instruction finds the largest of three integers.

    `scale` is a number if the scores are known to be small, else the result of `with_limit`.

    Measured and left out, each slower: to rescale only when a maximum grows by much, and to compute
    some of the exponentials by a polynomial instead of the unit for special functions.
    """
    for r in cutlass.range_constexpr(2):
        if const_expr(r in which):
            values = [s[at] for at in row_places(s, r)]
            best = _largest_of(values) if const_expr(as_integers) else _tree(values, cute.arch.fmax)
            best = cute.arch.warp_reduction_max(best, threads_in_group=4)
            if const_expr(masked and not as_integers):
                best = cute.arch.fmax(best, Float32(_LOWEST))
            factor = scale
            if const_expr(isinstance(scale, tuple)):
                factor = _factor(best, *scale, as_integers)
            # Rounded as earlier shifts were: an unchanged maximum rescales by 1 exactly.
            top = _product(best, factor)
            if const_expr(not first):
                top = cute.arch.fmax(top, row_max[r])
            shift = top
            if const_expr(lift != 0.0):
                shift = top - lift
            for at in row_places(s, r):
                s[at] = cute.math.exp2(_fused(s[at], factor, -shift), fastmath=True)
            if const_expr(not first):
                rescale[r] = cute.math.exp2(row_max[r] - top, fastmath=True)
            if const_expr(summed):
                add_up(s, row_sum, rescale, r, first)
            row_max[r] = top


def with_limit(scale, lift=0.0):
    """(scale, power, limit): rows whose largest score reaches `limit` use `power` as their factor.

    From the limit on, products have no digits behind the point. The product of the largest score is
    rounded, those that it is subtracted from are not, so that score's probability would be
    arbitrary. `power`, the power of 2 above `scale`, rounds no product; and there, scores that
    differ at all differ by more than that changes."""
    places = 24 if lift else 27  # e4m3's probabilities may only double before they overflow
    power, limit = cute.arch.inline_ptx(
        "{ .reg .u32 bits, rest; mov.b32 bits, {$r0}; "
        "and.b32 bits, bits, 0x7f800000; add.u32 bits, bits, 0x00800000; "
        f"sub.u32 rest, {(254 + places) << 23}, bits; min.u32 rest, rest, 0x7f000000; "
        "mov.b32 {$w0}, bits; mov.b32 {$w1}, rest; }",
        write_only_types=[Float32, Float32],
        read_only_args=[scale],
    )
    return scale, power, limit


def largest(top, scale):
    """A row's largest score times `scale`, from the maximum that `softmax` keeps."""
    if not isinstance(scale, tuple):
        return top
    scale, power, limit = scale
    return cute.arch.inline_ptx(
        "{ .reg .pred large; .reg .f32 size, bound, back; abs.f32 size, {$r0}; "
        "mul.rn.f32 bound, {$r2}, {$r3}; setp.ge.f32 large, size, bound; "
        "rcp.approx.f32 back, {$r2}; mul.rn.f32 back, back, {$r1}; mul.rn.f32 back, back, {$r0}; "
        "selp.f32 {$w0}, back, {$r0}, large; }",
        write_only_types=[Float32],
        read_only_args=[top, scale, power, limit],
    )


def _factor(best, scale, power, limit, as_integers):
    """The factor of a row's scores. Comparing negative scores as integers finds the smallest one,
    but the maximum is then an earlier block's."""
    size = "mov" if as_integers else "abs"
    return cute.arch.inline_ptx(
        f"{{ .reg .pred large; .reg .f32 size; {size}.f32 size, {{$r0}}; "
        "setp.ge.f32 large, size, {$r3}; selp.f32 {$w0}, {$r2}, {$r1}, large; }",
        write_only_types=[Float32],
        read_only_args=[best, scale, power, limit],
    )


def _product(a, b):
    """a * b, rounded: the compiler does not fuse it with the next operation."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def _fused(a, b, c):
    """a * b + c, rounded once: otherwise ptxas decides."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


@cute.jit
def add_up(s, row_sum, rescale, r: cutlass.Constexpr[int], first: cutlass.Constexpr[bool]):
    total = _tree([s[at] for at in row_places(s, r)], lambda a, b: a + b)
    if const_expr(first):
        row_sum[r] = total
    else:
        row_sum[r] = row_sum[r] * rescale[r] + total


def row_places(s, r):
    return [i for i in range(cute.size(s)) if i // 2 % 2 == r]


@cute.jit
def some_negative(row_max):
    """True if one of the warp's rows has a negative maximum so far; warps may differ."""
    return cute.arch.vote_any_sync(_bits(row_max[0]) | _bits(row_max[1]) < 0)


def _bits(value):
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def _largest_of(values):
    """The largest of the values, compared as integers."""
    while len(values) > 1:
        values = [_largest(values[i : i + 3]) for i in range(0, len(values), 3)]
    return values[0]


def _largest(values):
    """The largest of one to three values, compared as integers."""
    if len(values) == 1:
        return values[0]
    last = len(values) - 1
    third = "max.s32 a, a, c; " if last == 2 else ""
    return cute.arch.inline_ptx(
        "{ .reg .s32 a, b, c; mov.b32 a, {$r0}; mov.b32 b, {$r1}; "
        f"mov.b32 c, {{$r{last}}}; max.s32 a, a, b; {third}mov.b32 {{$w0}}, a; }}",
        write_only_types=[Float32],
        read_only_args=values,
    )


def _tree(values, combine):
    """Combines all values, in four independent chains."""
    chains = values[:4]
    for i, value in enumerate(values[4:]):
        chains[i % 4] = combine(chains[i % 4], value)
    return combine(combine(chains[0], chains[1]), combine(chains[2], chains[3]))


@cute.jit
def hide_outside(s, begin, end):
    """Sets columns before `begin` (unless None) or from `end` on to minus infinity. Both are pairs,
    one value per row, counted from the thread's first column."""
    for r in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(cute.size(s) // 4):
            for e in cutlass.range_constexpr(2):
                at, column = 4 * i + 2 * r + e, 8 * i + e
                s[at] = s[at] if end[r] > column else -Float32.inf
                if const_expr(begin is not None):
                    s[at] = s[at] if begin[r] <= column else -Float32.inf


def cap(s, slope):
    """tanh(score * slope); relative error 2**-20 where it counts."""
    for i in range(cute.size(s)):
        power = cute.math.exp2(s[i] * slope * (2.0 * _LOG2_E), fastmath=True)
        s[i] = 1.0 - 2.0 * cute.arch.rcp_approx(power + 1.0)


@cute.jit
def join_sink(top, total, sink):
    """(top, total, shrink): a row's largest score, times log2 e, and its sum, both with the sink as
    one more score; `shrink` is the factor of the row's values."""
    scaled = sink * _LOG2_E
    scaled = Float32(_LARGEST) if scaled > _LARGEST else scaled
    above = cute.arch.fmax(top, scaled)
    shrink = cute.math.exp2(top - above, fastmath=True)
    return above, total * shrink + cute.math.exp2(scaled - above, fastmath=True), shrink


@cute.jit
def inverse(total):
    """1 / total; 0 for a row that sees no key."""
    return cute.arch.rcp_approx(total) if total != 0.0 else Float32(0.0)


def to_operand(s, p, dtype):
    """Accumulator values as the left operand of the next product: same places, half the width."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    pairs = cute.recast_tensor(p, Int32)
    for i in range(cute.size(s) // 2):
        pairs[i] = cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Int32],
            read_only_args=[s[2 * i + 1], s[2 * i]],
        )


def float_from_bits(bits):
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )


def hold(count):
    """Keeps the arithmetic above it there: otherwise the compiler moves a later wait ahead of it.
    The loop never repeats, since `count` is not negative."""
    cute.arch.inline_ptx(
        "{ .reg .pred again; setp.lt.s32 again, {$r0}, 0; "
        "AGAIN: @again nanosleep.u32 32; @again bra AGAIN; }",
        read_only_args=[count],
    )
