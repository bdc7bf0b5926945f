# SPDX-License-Identifier: Apache-2.0
"""Conversion of a float8 cache's pages to 16 bits, shared among the tiles' thread blocks.

Each page and head has a state for its keys and one for its values. A warp that changes it from 0 to
1 converts the page and sets it to 2. A warp that needs a page waits for state 2. Every block with a
tile has warps that convert pages nobody has begun and never wait, so no block depends on one that
does not run.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.attention.common.layouts import PIECE
from kernels.attention.common.packed import load_at

_PIECE_BYTES = 2 * PIECE


@cute.jit
def first_copy(paged, entry):
    """The first page of a sequence's copies, or -1."""
    first = Int32(-1)
    if paged.copied.toint() != 0:
        first = load_at(paged.copied, Int32(4), entry)
    return cute.arch.make_warp_uniform(first)


def wait_for(state):
    """Returns once a page is complete, for copies of it by the engine."""
    cute.arch.inline_ptx(
        "{ .reg .pred early; .reg .b32 state; "
        "AGAIN: ld.acquire.gpu.global.b32 state, [{$r0}]; setp.ne.s32 early, state, 2; "
        "@early bra AGAIN; fence.proxy.async.global; }",
        read_only_args=[state],
    )


def find(state, page):
    """The first lane whose page is in state 0, or 32 if none is. A negative page is skipped."""
    return cute.arch.inline_ptx(
        "{ .reg .pred free, some; .reg .b32 state, lanes; setp.ge.s32 free, {$r1}, 0; "
        "mov.b32 state, 1; @free ld.relaxed.gpu.global.b32 state, [{$r0}]; "
        "setp.eq.s32 free, state, 0; vote.sync.ballot.b32 lanes, free, -1; "
        "brev.b32 lanes, lanes; clz.b32 {$w0}, lanes; }",
        write_only_types=[Int32],
        read_only_args=[state, page],
    )


def claim(state):
    """The state of a page that one lane tries to change from 0 to 1."""
    return cute.arch.inline_ptx(
        "{ .reg .pred first; setp.eq.s32 first, {$r1}, 0; "
        "mov.b32 {$w0}, 1; @first atom.relaxed.gpu.global.cas.b32 {$w0}, [{$r0}], 0, 1; "
        "shfl.sync.idx.b32 {$w0}, {$w0}, 0, 31, -1; }",
        write_only_types=[Int32],
        read_only_args=[state, cute.arch.lane_idx()],
    )


@cute.jit
def publish(state):
    """A page is complete: all of this warp's stores come before."""
    cute.arch.inline_ptx("fence.proxy.async.global; fence.acq_rel.gpu;")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [{$r0}], 2;", read_only_args=[state]
        )


def widen_rows(rows, to, step, seen, inside, d, dtype):
    """Widens 8 columns of each 64 of several rows, 4 apart: loads first. Rows from `seen` on and
    columns from `inside` on are left out; `step` bytes lie between two rows of the copies."""
    count, pieces = len(rows), range(d // PIECE)
    chunks = [(r, piece) for r in range(count) for piece in pieces]
    lines = [
        ".reg .pred " + ", ".join(f"p{r}_{piece}" for r, piece in chunks) + ", column;",
        ".reg .b32 "
        + ", ".join(f"c{r}_{piece}_{i}" for r, piece in chunks for i in range(2))
        + ";",
        ".reg .b32 w<4>; .reg .b16 low, high; .reg .f32 f<2>; .reg .b64 to, step;",
        f"mov.b64 to, {{$r{count}}}; cvt.s64.s32 step, {{$r{count + 1}}};",
    ]
    for r, piece in chunks:
        lines += [
            f"setp.lt.s32 column, {piece * PIECE}, {{$r{count + 3}}};",
            f"setp.lt.and.s32 p{r}_{piece}, {r * 4}, {{$r{count + 2}}}, column;",
        ]
    # Without a value before, what a lane does not load would be kept for all of the loop.
    lines += [f"mov.b32 c{r}_{piece}_{i}, 0;" for r, piece in chunks for i in range(2)]
    for r, piece in chunks:
        lines.append(
            f"@p{r}_{piece} ld.global.v2.b32 {{c{r}_{piece}_0, c{r}_{piece}_1}}, "
            f"[{{$r{r}}} + {piece * PIECE}];"
        )
    for r, piece in chunks:
        for i in range(4):
            if i % 2 == 0:
                lines.append(f"mov.b32 {{low, high}}, c{r}_{piece}_{i // 2};")
            lines.append(f"cvt.rn.f16x2.e4m3x2 w{i}, {('low', 'high')[i % 2]};")
        if dtype is cutlass.BFloat16:
            for i in range(4):
                lines += [
                    f"mov.b32 {{low, high}}, w{i};",
                    "cvt.f32.f16 f0, low; cvt.f32.f16 f1, high;",
                    f"cvt.rn.bf16x2.f32 w{i}, f1, f0;",
                ]
        at = f"[to + {piece * _PIECE_BYTES}]"
        lines.append(f"@p{r}_{piece} st.global.v4.b32 {at}, {{w0, w1, w2, w3}};")
        if piece == pieces[-1]:
            lines.append("add.s64 to, to, step;")
    cute.arch.inline_ptx(
        "{ " + " ".join(lines) + " }", read_only_args=[*rows, to, step, seen, inside]
    )
