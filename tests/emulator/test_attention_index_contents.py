# SPDX-License-Identifier: Apache-2.0
"""Attention with any contents of its index tensors, on the emulator.

Tensors are views in the middle of larger buffers: what a kernel touches outside of a view is an
error, and a loop that goes on for longer than the tensors are exceeds the instruction limit.
Results are compared wherever they are specified. TIERCEL_FUZZ_CASES says how many cases an op gets.
"""

import itertools
import os
import random

import pytest
import torch
from support.emulator import kernels, sm90
from support.emulator import options as running

import tiercel
from tiercel.ops.attention.reference import attention_varlen_backward as reference

pytestmark = pytest.mark.torch

# Operators whose index tensors this file fuzzes: see tests/api/test_index_checks.py.
FUZZED = ("attention_varlen", "decode_attention", "paged_attention")

CASES = int(os.environ.get("TIERCEL_FUZZ_CASES", "50"))
FLOAT8 = torch.float8_e4m3fn
EXTREMES = (-(2**31), -(2**30), -40, -1, 0, 1, 2**29 - 1, 2**29, 2**30, 2**31 - 1)
LIMIT = 40_000_000  # warp instructions of a launch; the largest honest one here has a tenth


def inside(tensor):
    """The same, amid memory that no kernel may touch."""
    around = 4096  # elements
    buffer = torch.full((tensor.numel() + 2 * around,), 7, dtype=tensor.dtype)
    view = buffer[around:-around].view(tensor.shape)
    view.copy_(tensor)
    return view


def untouched(view):
    buffer = view._base.view(torch.uint8).view(-1, view.element_size())
    rest = torch.cat([buffer[:4096], buffer[-4096:]])
    return bool((rest == rest[0]).all())


def integers(draw, values):
    """int32, of any stride."""
    step = draw.choice((1, 1, 2, 3))
    wide = torch.full((len(values), step), 2**31 - 1, dtype=torch.int32)
    wide[:, 0] = torch.tensor(values, dtype=torch.int64).int()
    return inside(wide)[:, 0]


def starts(draw, sequences, rows):
    """Those of honest sequences, some of which are replaced; rows before and after may be left."""
    honest = sorted(draw.randint(0, rows) for _ in range(sequences + 1))
    if draw.random() < 0.5:
        honest[0], honest[-1] = 0, rows
    kind = draw.choice(("honest", "one", "any", "extreme"))
    near = (rows - 1, rows, rows + 1, 2 * rows)
    for i in range(len(honest)):
        if kind == "any" or (kind == "one" and i == draw.randrange(len(honest))):
            honest[i] = draw.choice((draw.randint(-2 * rows, 3 * rows), *EXTREMES, *near))
        elif kind == "extreme":
            honest[i] = draw.choice(EXTREMES)
    return honest


def do_not_decrease(values, rows):
    cut = [min(max(value, 0), rows) for value in values]
    return all(a <= b for a, b in itertools.pairwise(cut))


class Packed:
    """A call of attention_varlen."""

    def __init__(self, seed, dtype, sizes=(64, 64, 128), sinks=False):
        self.draw = draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.rows = queries, keys = draw.randint(1, 220), draw.randint(1, 300)
        self.heads, self.kv_heads = draw.choice(((1, 1), (2, 1), (3, 3)))
        columns = draw.choice(sizes)  # of q and k, or a pair of those and of v's
        self.d, self.d_v = columns if isinstance(columns, tuple) else (columns, columns)
        self.sequences = draw.randint(1, 5)

        def rand(rows, heads, columns):
            return inside(torch.randn(rows, heads, columns, generator=generator).to(dtype))

        self.inputs = (
            rand(queries, self.heads, self.d),
            rand(keys, self.kv_heads, self.d),
            rand(keys, self.kv_heads, self.d_v),
        )
        self.values = [starts(draw, self.sequences, rows) for rows in self.rows]
        self.starts = [integers(draw, values) for values in self.values]
        self.longest = [draw.choice((rows, rows, 2**62, 70)) for rows in self.rows]
        self.mask = draw.choice(({}, {"causal": True}, {"window": (30, 5)}, {"window": (-1, 7)}))
        left, right = self.mask.get("window", (-1, -1))
        self.limits = (left, 0 if self.mask.get("causal") else right)
        self.out = inside(torch.full((queries, self.heads, self.d_v), torch.nan).bfloat16())
        self.lse = None
        if draw.random() < 0.7:
            self.lse = inside(torch.full((self.heads, queries), torch.nan))
        self.sinks = None
        if sinks and draw.random() < 0.5:
            self.sinks = inside(torch.randn(self.heads, generator=generator))

    def truth(self, *inputs):
        wide = [x.double() for x in inputs or self.inputs]
        options = {**self.mask, "sinks": self.sinks, "return_lse": True}
        return tiercel.ref.attention_varlen(*wide, *self.starts, *self.longest, **options)

    def check(self, close, by_key_order=False):
        """`close(result, truth)` of those rows that are specified; of rows after the longest
        sequence's, either they are as for no sequence."""
        tensors = (*self.inputs, *self.starts, self.out, self.lse, self.sinks)
        assert all(untouched(x) for x in tensors if x is not None)
        if not do_not_decrease(self.values[0], self.rows[0]):
            return
        if by_key_order and not do_not_decrease(self.values[1], self.rows[1]):
            return
        truth, sums = self.truth()
        assert self.out.isfinite().all()
        left_out = self.left_out()
        assert (self.out[left_out] == 0).all()
        close(self.out, truth, ~left_out)
        if self.lse is not None:
            assert (self.lse[:, left_out] == -torch.inf).all()
            torch.testing.assert_close(
                self.lse.double()[:, ~left_out], sums[:, ~left_out], rtol=1e-5, atol=3e-5
            )

    def left_out(self):
        """Rows in no sequence, and those that came out as such, where they may."""
        cut = [min(max(value, 0), self.rows[0]) for value in self.values[0]]
        found = torch.ones(self.rows[0], dtype=torch.bool)
        for first, last in itertools.pairwise(cut):
            found[first:last] = False
            late = slice(min(first + self.longest[0], last), last)
            found[late] = (self.out[late] == 0).flatten(1).all(1)
            if self.lse is not None:
                found[late] &= (self.lse[:, late] == -torch.inf).all(0)
        return found


@pytest.mark.parametrize("seed", range(CASES))
def test_attention_varlen(seed):
    call = Packed(seed, torch.bfloat16, (40, 64, 128, 256), sinks=True)
    arguments = (*call.inputs, *call.starts, call.out, call.lse, *call.longest, *call.limits)
    with running(max_instructions=LIMIT):
        kernels.attention_varlen(*arguments, call.d**-0.5, 0.0, call.sinks)

    def close(result, truth, rows):
        error = (result.double() - truth).abs()[rows]
        assert error.numel() == 0 or error.max() <= 8 * 2**-9

    call.check(close)


@pytest.mark.parametrize("seed", range(CASES))
def test_attention_varlen_of_float8(seed):
    call = Packed(seed, FLOAT8)
    rest = (*call.limits, call.d**-0.5, 0.0, *call.starts, *call.longest)
    given = (*call.inputs, call.out, call.lse, None, None, None)
    size = kernels.attention_varlen_fp8_plan(*given, None, *rest)["workspace"]
    workspace = inside(torch.full((size,), 0x7F, dtype=torch.uint8))  # NaN
    with running(max_instructions=LIMIT):
        kernels.attention_varlen_fp8(*given, workspace, *rest)
    assert untouched(workspace)
    q, k, v = (x.double() for x in call.inputs)
    largest = call.truth(q, k, v.abs())[0]

    def close(result, truth, rows):
        error = (result.double() - truth).abs()[rows]
        assert bool((error <= 1.01 * (2**-4 + 2**-9) * largest[rows] + 1e-6).all())

    call.check(close, by_key_order=True)


@pytest.mark.parametrize("seed", range(CASES))
def test_attention_varlen_backward(seed):
    call = Packed(seed, torch.bfloat16, (40, 64, 128, (192, 128), 256))
    out, lse = call.truth()
    out, lse = out.bfloat16(), lse.float()
    generator = torch.Generator().manual_seed(seed)
    grad = inside(torch.randn(out.shape, generator=generator).bfloat16())
    window = call.mask.get("window")
    in_order = call.draw.random() < 0.5
    options = (call.mask.get("causal", False), window and list(window), None, None, in_order)
    with running(max_instructions=LIMIT):
        found = sm90("attention_varlen_backward")(
            grad, *call.inputs, *call.starts, inside(out), inside(lse), None, *options, None
        )
    assert all(untouched(x) for x in (grad, *call.inputs, *call.starts))
    # Rows before the first start and after the largest one are in no sequence.
    for gradient, values in zip(found, (call.values[0], *call.values[1:] * 2), strict=True):
        cut = [min(max(value, 0), len(gradient)) for value in values]
        assert (gradient[: cut[0]] == 0).all() and (gradient[max(cut) :] == 0).all()
    pairs = zip(call.values, call.rows, strict=True)
    if not all(do_not_decrease(values, rows) for values, rows in pairs):
        return
    wide = [x.double() for x in (grad, *call.inputs)]
    truth = reference(*wide, *call.starts, *call.truth(), **call.mask)
    for one, other in zip(found, truth, strict=True):
        assert one.isfinite().all()
        terms = call.inputs[0].numel() ** 0.5
        size = other.norm() if other.norm() > 0.02 * terms else terms
        assert (one.double() - other).norm() <= 5 * 2**-9 * size


@pytest.mark.parametrize("seed", range(CASES))
def test_decode_attention(seed):
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = draw.choice((torch.bfloat16, torch.float16))
    cache = draw.choice((dtype, FLOAT8))
    batch, queries = draw.randint(1, 5), draw.choice((1, 1, 2))
    heads, kv_heads = draw.choice(((1, 1), (4, 1), (4, 2)))
    d, page = draw.choice((64, 128, 96)), draw.choice((1, 4, 16, 64))
    pages, columns = draw.randint(1, 9), draw.randint(1, max(1, 200 // page))
    q = inside(torch.randn(batch, queries, heads, d, generator=generator).to(dtype))
    shape = (pages, page, kv_heads, d)
    k, v = (inside(torch.randn(shape, generator=generator).to(cache)) for _ in range(2))
    room = columns * page

    def any_of(honest, limit):
        if draw.random() < 0.5:
            return honest
        return draw.choice((draw.randint(-2 * limit, 3 * limit), *EXTREMES, limit, limit + 1))

    entries = [any_of(draw.randrange(pages), pages) for _ in range(batch * columns)]
    table = integers(draw, entries).view(batch, columns)
    if columns > 1 and draw.random() < 0.3:
        table = integers(draw, entries).view(columns, batch).T
    lengths = integers(draw, [any_of(draw.randint(0, room), room) for _ in range(batch)])
    prefix = None
    if draw.random() < 0.4:
        prefix = integers(draw, [any_of(draw.randint(0, room), room) for _ in range(batch)])
    window = draw.choice((None, None, (10, 0), (40, 3)))
    causal = draw.random() < 0.7
    out = inside(torch.full_like(q, torch.nan))
    lse = inside(torch.full((batch, heads, queries), torch.nan))
    left, right = window or (-1, -1)
    given = (q, k, v, table, lengths, out, prefix, None, None, lse)
    rest = (left, 0 if causal else right, d**-0.5, 0.0, -1, draw.choice((0, -1, 1, 2)))
    with running(max_instructions=LIMIT):
        needed = kernels.decode_attention(*given, None, *rest)
        if needed:
            workspace = inside(torch.full((needed,), torch.nan))
            assert kernels.decode_attention(*given, workspace, *rest) == 0
            assert untouched(workspace)
    assert all(untouched(x) for x in (q, k, v, out, lse, lengths, table))
    wide = [x.double() for x in (q, k, v)]
    options = {"window": window, "causal": causal, "prefix": prefix, "return_lse": True}
    truth, sums = tiercel.ref.decode_attention(*wide, table, lengths, **options)
    unit = torch.finfo(dtype).eps / 2
    assert ((out.double() - truth).abs() / (truth.abs() + 1)).max() <= 4 * unit
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("seed", range(CASES))
def test_paged_attention(seed):
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = draw.choice((torch.bfloat16, torch.float16))
    batch, rows = draw.randint(1, 5), draw.randint(1, 150)
    heads, kv_heads = draw.choice(((1, 1), (4, 1), (4, 2)))
    d, page = draw.choice((64, 128, 96)), draw.choice((1, 4, 16, 64))
    d = 4 * d if seed % 6 == 1 else d
    fixed = seed % 4 == 3  # parts of a fixed size: the batch-invariant mode
    most = 2600 if fixed else 200
    pages, columns = draw.randint(1, 9), draw.randint(1, max(1, most // page))
    q = inside(torch.randn(rows, heads, d, generator=generator).to(dtype))
    shape = (pages, page, kv_heads, d)
    # One multiprocessor, so that some float8 caches are copied to 16 bits before.
    float8 = seed % 5 == 4
    if float8 and seed % 3 == 0:
        dtype, q = torch.bfloat16, inside(q.to(FLOAT8))
    stored = FLOAT8 if float8 else dtype
    k, v = (inside(torch.randn(shape, generator=generator).to(stored)) for _ in range(2))
    room = columns * page

    def any_of(honest, limit):
        if draw.random() < 0.5:
            return honest
        return draw.choice((draw.randint(-2 * limit, 3 * limit), *EXTREMES, limit, limit + 1))

    entries = [any_of(draw.randrange(pages), pages) for _ in range(batch * columns)]
    table = integers(draw, entries).view(batch, columns)
    lengths = integers(draw, [any_of(draw.randint(0, room), room) for _ in range(batch)])
    values = starts(draw, batch, rows)
    begins = integers(draw, values)
    sinks = draw.choice((None, inside(torch.randn(heads, generator=generator))))
    window = draw.choice((None, None, (10, 0), (40, 3)))
    causal = draw.random() < 0.7
    out = inside(torch.full(q.shape, torch.nan, dtype=dtype))
    lse = inside(torch.full((heads, rows), torch.nan))
    cut = [min(max(x, 0), rows) for x in values]
    longest = max(1, *(end - first for first, end in itertools.pairwise(cut)))
    longest = draw.choice((rows, longest))
    given = (q, k, v, table, lengths, begins, sinks, longest, None, None, out, lse)
    tree = None
    if causal and longest <= 64:
        words = torch.randint(-(2**63), 2**63 - 1, (rows, 2), generator=generator)
        words[torch.rand(rows, generator=generator) < 0.2] = draw.choice((0, -1, 1))
        tree = draw.choice((None, inside(words)[:, 0]))
    prefix = None
    if tree is None and window is None and draw.random() < 0.5:
        prefix = integers(draw, [any_of(draw.randint(0, room), room) for _ in range(batch)])
    options = (causal, window, None, None, None, tree, prefix, None)
    of_multiprocessors = {"multiprocessors": 1} if float8 else {}
    with (
        tiercel.batch_invariant(fixed),
        running(max_instructions=LIMIT, **of_multiprocessors),
    ):
        floats = kernels.paged_attention_plan(*given, *options)["workspace"]
        workspace = inside(torch.full((floats,), torch.nan)) if floats else None
        kernels.paged_attention(*given, *options, workspace)
    tensors = (*given, tree, prefix, workspace)
    assert all(untouched(x) for x in tensors if isinstance(x, torch.Tensor))
    if not do_not_decrease(values, rows):
        return
    wide = [x.double() for x in (q, k, v)]
    options = {"window": window, "causal": causal, "sinks": sinks, "return_lse": True}
    options |= {"tree_mask": tree, "prefix": prefix}
    truth, sums = tiercel.ref.paged_attention(*wide, table, lengths, begins, rows, **options)
    unit = torch.finfo(dtype).eps / 2
    assert ((out.double() - truth).abs() / (truth.abs() + 1)).max() <= 4 * unit
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=5e-5)
