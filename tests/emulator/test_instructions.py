# SPDX-License-Identifier: Apache-2.0
"""Scalar instructions, one at a time, against what the PTX manual says of them."""

import math

import pytest
import torch
from support.ptx import kernel, zeros

ONES = 2**32 - 1
SPECIAL = [0, 1, 2, 5, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, ONES, ONES - 1]


def signed(x):
    return x - 2**32 if x >> 31 else x


def quotient(a, b):
    """Towards zero; by zero, all ones."""
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(a, b):
    position, length = b & 0xFF, b >> 8 & 0xFF
    return a >> position & (1 << length) - 1


def signed_field(a, b):
    position, length = b & 0xFF, b >> 8 & 0xFF
    sign = length and signed(a) >> min(position + length - 1, 31) & 1
    return field(signed(a), b) | (-1 << length if sign else 0)


def permuted(a, b, selector):
    both = (b << 32 | a).to_bytes(8, "little")
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    made = [(255 if both[n & 7] & 128 else 0) if n & 8 else both[n] for n in chosen]
    return int.from_bytes(made, "little")


INTEGER = {
    "add.u32 %r4, %r2, %r3;": lambda a, b: a + b,
    "sub.s32 %r4, %r2, %r3;": lambda a, b: a - b,
    "add.sat.s32 %r4, %r2, %r3;": lambda a, b: min(max(signed(a) + signed(b), -(2**31)), 2**31 - 1),
    "mul.lo.s32 %r4, %r2, %r3;": lambda a, b: a * b,
    "mul.hi.u32 %r4, %r2, %r3;": lambda a, b: a * b >> 32,
    "mul.hi.s32 %r4, %r2, %r3;": lambda a, b: signed(a) * signed(b) >> 32,
    "mad.lo.u32 %r4, %r2, %r3, %r2;": lambda a, b: a * b + a,
    "mul.wide.s32 %rd5, %r2, %r3; shr.u64 %rd5, %rd5, 16; cvt.u32.u64 %r4, %rd5;": (
        lambda a, b: signed(a) * signed(b) >> 16
    ),
    "add.cc.u32 %r5, %r2, %r3; addc.u32 %r4, %r2, 0;": lambda a, b: a + (a + b >> 32),
    "sub.cc.u32 %r5, %r2, %r3; subc.u32 %r4, %r2, 0;": lambda a, b: a - (a < b),
    "div.u32 %r4, %r2, %r3;": lambda a, b: quotient(a, b),
    "div.s32 %r4, %r2, %r3;": lambda a, b: quotient(signed(a), signed(b)),
    "rem.u32 %r4, %r2, %r3;": lambda a, b: a - b * quotient(a, b) if b else a,
    "min.s32 %r4, %r2, %r3;": lambda a, b: min(signed(a), signed(b)),
    "max.u32 %r4, %r2, %r3;": max,
    "abs.s32 %r4, %r2;": lambda a, b: abs(signed(a)),
    "shl.b32 %r4, %r2, %r3;": lambda a, b: a << b if b < 32 else 0,
    "shr.u32 %r4, %r2, %r3;": lambda a, b: a >> min(b, 32),
    "shr.s32 %r4, %r2, %r3;": lambda a, b: signed(a) >> min(b, 31),
    "shf.l.wrap.b32 %r4, %r2, %r3, 7;": lambda a, b: (b << 32 | a) << 7 >> 32,
    "shf.r.clamp.b32 %r4, %r2, %r3, 40;": lambda a, b: b,
    "bfe.u32 %r4, %r2, %r3, 5;": lambda a, b: field(a, b & 0xFF | 5 << 8),
    "bfe.s32 %r4, %r2, %r3, 5;": lambda a, b: signed_field(a, b & 0xFF | 5 << 8),
    "bfi.b32 %r4, %r2, %r3, 4, 9;": lambda a, b: b & ~(0x1FF << 4) | (a & 0x1FF) << 4,
    "prmt.b32 %r4, %r2, %r3, 0x7B42;": lambda a, b: permuted(a, b, 0x7B42),
    "lop3.b32 %r4, %r2, %r3, 0xF0F0F0F0, 0xE2;": (
        # c where a is 0 and b is 1; else b ? a : ... by the table's bits
        lambda a, b: sum(
            (0xE2 >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (0xF0F0F0F0 >> i & 1)) & 1) << i
            for i in range(32)
        )
    ),
    "popc.b32 %r4, %r2;": lambda a, b: a.bit_count(),
    "clz.b32 %r4, %r2;": lambda a, b: 32 - a.bit_length(),
    "brev.b32 %r4, %r2;": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %r4, %r2;": lambda a, b: a.bit_length() - 1,
    "bfind.shiftamt.u32 %r4, %r2;": lambda a, b: 32 - a.bit_length() if a else -1,
    "setp.lt.s32 %p1, %r2, %r3; selp.u32 %r4, 5, 9, %p1;": (
        lambda a, b: 5 if signed(a) < signed(b) else 9
    ),
    "setp.hi.and.u32 %p1|%p2, %r2, %r3, %p0; selp.u32 %r4, 5, 9, %p2;": (
        lambda a, b: 9  # %p0 is never set
    ),
    "set.ge.u32.f16x2 %r4, %r2, %r3;": lambda a, b: at_least(a, b, torch.float16),
    "set.ge.u32.bf16x2 %r4, %r2, %r3;": lambda a, b: at_least(a, b, torch.bfloat16),
    "dp4a.s32.u32 %r4, %r2, %r3, 7;": (
        lambda a, b: (
            7
            + sum(
                int.from_bytes([a >> i & 255], signed=True) * (b >> i & 255)
                for i in range(0, 32, 8)
            )
        )
    ),
    "cvt.s32.s8 %r4, %r2;": lambda a, b: (a & 255) - 256 * (a >> 7 & 1),
    "cvt.sat.u8.s32 %r4, %r2;": lambda a, b: min(max(signed(a), 0), 255),
    "cvt.rz.f32.u32 %f1, %r2; mov.b32 %r4, %f1;": lambda a, b: bits(
        a if a < 2**24 else a >> a.bit_length() - 24 << a.bit_length() - 24
    ),
}


def at_least(a, b, dtype):
    """All bits of each half where a >= b."""
    halves = [torch.tensor([x & ONES]).to(torch.uint32).view(dtype).float() for x in (a, b)]
    return sum(0xFFFF << 16 * i for i in range(2) if halves[0][i] >= halves[1][i])


def bits(x):
    return torch.tensor(float(x)).view(torch.int32).item()


@pytest.mark.parametrize("code", INTEGER)
def test_integers(code, tmp_path):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 2**32, (60,), generator=generator).tolist()
    values = SPECIAL + drawn
    pairs = [(a, b) for a in values for b in SPECIAL + drawn[:5]]
    data = torch.tensor(pairs).to(torch.uint32).view(torch.int32).contiguous()
    out = zeros(len(pairs))
    body = f"""mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x; mad.lo.u32 %r1, %r0, 64, %r1;
    setp.ge.u32 %p1, %r1, {len(pairs)}; @%p1 ret; setp.ne.u32 %p0, %r1, %r1;
    mul.wide.u32 %rd6, %r1, 8; add.s64 %rd6, %rd0, %rd6; ld.global.v2.u32 {{%r2, %r3}}, [%rd6];
    {code} mul.wide.u32 %rd7, %r1, 4; add.s64 %rd7, %rd1, %rd7; st.global.u32 [%rd7], %r4;"""
    kernel(tmp_path, body, parameters=2)(data, out, grid=-(-len(pairs) // 64), block=64)
    due = [INTEGER[code](a, b) & ONES for a, b in pairs]
    assert [x & ONES for x in out.tolist()] == due


def rounded(x, up, towards_zero=False):
    """A double as the float32 next to it in a direction."""
    nearest = torch.tensor(x, dtype=torch.float64).float()
    if towards_zero:
        up = x < 0
    off = x - nearest.double().item()
    if math.isfinite(x) and off != 0 and (off > 0) == up:
        nearest = torch.nextafter(nearest, torch.tensor(math.inf if up else -math.inf))
    return nearest.item()


FLOAT = {
    "add.rn.f32 %f3, %f1, %f2;": lambda a, b: torch.tensor(a + b).float().item(),
    "mul.rz.f32 %f3, %f1, %f2;": lambda a, b: rounded(a * b, False, towards_zero=True),
    "mul.rm.f32 %f3, %f1, %f2;": lambda a, b: rounded(a * b, False),
    "mul.rp.f32 %f3, %f1, %f2;": lambda a, b: rounded(a * b, True),
    "mul.sat.f32 %f3, %f1, %f2;": lambda a, b: min(max(torch.tensor(a * b).float().item(), 0), 1),
    "max.f32 %f3, %f1, %f2;": max,
    "cvt.rni.f32.f32 %f3, %f1;": lambda a, b: float(round(a)),
    "cvt.rzi.s32.f32 %r1, %f1; cvt.rn.f32.s32 %f3, %r1;": lambda a, b: (
        torch.tensor(min(max(math.trunc(a), -(2**31)), 2**31 - 1)).float().item()
    ),
    "cvt.rn.f16.f32 %h1, %f1; cvt.f32.f16 %f3, %h1;": lambda a, b: (
        torch.tensor(a).half().float().item()
    ),
    "cvt.rn.bf16x2.f32 %r1, %f1, %f2; shl.b32 %r1, %r1, 16; mov.b32 %f3, %r1;": lambda a, b: (
        torch.tensor(b).bfloat16().float().item()
    ),
    "cvt.rn.satfinite.e4m3x2.f32 %h1, %f2, %f1; cvt.rn.f16x2.e4m3x2 %r1, %h1;"
    "mov.b32 {%h2, %h3}, %r1; cvt.f32.f16 %f3, %h2;": lambda a, b: (
        torch.tensor(min(max(a, -448.0), 448.0)).to(torch.float8_e4m3fn).float().item()
    ),
    "copysign.f32 %f3, %f1, %f2;": lambda a, b: math.copysign(b, a),
    "div.rn.f32 %f3, %f1, %f2;": lambda a, b: (
        torch.tensor(a).float() / torch.tensor(b).float()
    ).item(),
    "sqrt.rn.f32 %f3, %f1;": lambda a, b: (
        torch.tensor(math.sqrt(a) if a >= 0 else math.nan).float().item()
    ),
}


@pytest.mark.parametrize("code", FLOAT)
def test_floats(code, tmp_path):
    generator = torch.Generator().manual_seed(1)
    values, sizes = torch.randn(2, 64, generator=generator)
    values *= sizes.mul(6).exp()
    values[:8] = torch.tensor([0.5, 1.5, 2.5, -0.5, 448.0, 1e-30, 3e38, -7.0])
    data = torch.stack([values, values.roll(5)], 1).contiguous()
    out = zeros(64, torch.float32)
    body = f"""mov.u32 %r1, %tid.x; mul.wide.u32 %rd6, %r1, 8; add.s64 %rd6, %rd0, %rd6;
    ld.global.v2.f32 {{%f1, %f2}}, [%rd6]; mul.wide.u32 %rd7, %r1, 4; add.s64 %rd7, %rd1, %rd7;
    {code} st.global.f32 [%rd7], %f3;"""
    kernel(tmp_path, body, parameters=2)(data, out, block=64)
    due = torch.tensor([FLOAT[code](a, b) for a, b in data.double().tolist()]).float()
    assert torch.equal(out.nan_to_num(7.25), due.nan_to_num(7.25))


def test_lanes_that_part_meet_again(tmp_path):
    """Collatz steps: a loop of another length in each lane, a sum of all behind it."""
    body = """mov.u32 %r1, %tid.x; add.u32 %r2, %r1, 1; mov.u32 %r3, 0;
    LOOP: setp.eq.u32 %p1, %r2, 1; @%p1 bra DONE; add.u32 %r3, %r3, 1; and.b32 %r4, %r2, 1;
    setp.eq.u32 %p2, %r4, 0; @%p2 bra EVEN; mad.lo.u32 %r2, %r2, 3, 1; bra LOOP;
    EVEN: shr.u32 %r2, %r2, 1; bra LOOP;
    DONE: redux.sync.add.u32 %r5, %r3, 0xffffffff; mul.wide.u32 %rd5, %r1, 4;
    add.s64 %rd5, %rd0, %rd5; st.global.u32 [%rd5], %r5;"""
    out = zeros(32)
    kernel(tmp_path, body)(out)

    def steps(n):
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    assert out.tolist() == [sum(steps(n) for n in range(1, 33))] * 32


def test_shuffles_stay_in_their_segments(tmp_path):
    body = """mov.u32 %r1, %tid.x; shfl.sync.up.b32 %r2|%p1, %r1, 3, 0x1800, 0xffffffff;
    selp.u32 %r3, 100, 0, %p1; add.u32 %r2, %r2, %r3; mul.wide.u32 %rd5, %r1, 4;
    add.s64 %rd5, %rd0, %rd5; st.global.u32 [%rd5], %r2;"""
    out = zeros(32)
    kernel(tmp_path, body)(out)
    assert out.tolist() == [i - 3 + 100 if i % 8 >= 3 else i for i in range(32)]
