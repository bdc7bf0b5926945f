# SPDX-License-Identifier: Apache-2.0
"""Gradients of the gated delta rule, run by the emulator, against float64 autograd."""

import itertools

import pytest
import torch
from support.emulator import sm90
from support.index_fuzz import Draw, run
from support.near import BF16, F16, F32

import tiercel
from tiercel.ops.delta import reference as ref

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def problem(batch, tokens, heads, sizes, dtype=BF16, unit=True, seed=0, gate=2.0, channels=False):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = (random(batch, tokens, heads[0], sizes[0]) for _ in range(2))
    k = torch.nn.functional.normalize(k, dim=-1) if unit else k
    v, grad = (random(batch, tokens, heads[1], sizes[1]).to(dtype) for _ in range(2))
    g = random(*v.shape[:3], *([sizes[0]] if channels else []))
    g = torch.nn.functional.logsigmoid(g + gate)
    beta = random(*v.shape[:3]).sigmoid()
    return grad, q.to(dtype), k.to(dtype), v, g, beta


def states(*shape, seed=9):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def autograd(grad, inputs, grad_final, initial, starts, scale, l2norm):
    """Gradients of the float64 recurrence."""
    given = [t.double().requires_grad_() for t in inputs]
    first = None if initial is None else initial.double().requires_grad_()
    tensors = ref._inputs(*given, scale, l2norm)
    ends = [(i, i + 1, slice(None)) for i in range(len(grad))]
    if starts is not None:
        ends = [(0, 1, slice(a, b)) for a, b in itertools.pairwise(starts)]
    total = 0.0
    for i, (begin, end, part) in enumerate(ends):
        shape = (1, grad.shape[2], inputs[0].shape[3], grad.shape[3])
        state = torch.zeros(shape).double() if first is None else first[i : i + 1]
        state, out = ref._run(state, tuple(t[begin:end, part] for t in tensors))
        total = total + (out * grad[begin:end, part].double()).sum()
        if grad_final is not None:
            total = total + (state * grad_final[i].double()).sum()
    leaves = [*given, *([] if first is None else [first])]
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return [torch.zeros_like(t) for t in leaves]
    return torch.autograd.grad(total, leaves, materialize_grads=True)


def backward(inputs, grad_final=None, initial=None, starts=None, scale=None, l2norm=True):
    """Errors are parts of the gradients' own sizes: sums over many roundings, each 2^-9 for
    bfloat16. In those of gates products of whole states nearly cancel."""
    grad, *given = inputs
    got = sm90("gated_delta_rule_backward")(
        *(grad, *given, grad_final, initial, starts, scale, l2norm, None)
    )
    ends = None if starts is None else starts.tolist()
    due = autograd(grad, given, grad_final, initial, ends, scale, l2norm)
    of_size = 2**-7 if grad.dtype == BF16 else 2**-9
    for name, a, b in zip(NAMES, got, due, strict=False):
        assert torch.isfinite(a).all() and a.shape == b.shape, name
        if not b.numel():
            continue
        size = b.norm().clamp(min=1e-20)
        error = float((a.double() - b).norm() / size)
        due_error = of_size * (2.5 if name == "g" else 1.0)
        assert error < due_error, (name, error)
        worst = float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-20))
        assert worst < 4 * due_error, (name, worst)
    return got


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_lengths(tokens, channels):
    batch = 4 if tokens == 1 else 1  # a gradient that is one product may be near zero
    backward(problem(batch, tokens, (1, 2), (128, 32), channels=channels))
    initial, grad_final = states(batch, 2, 128, 32), states(batch, 2, 128, 32, seed=8)
    inputs = problem(batch, tokens, (2, 2), (128, 32), seed=1, channels=channels)
    backward(inputs, grad_final, initial, scale=0.3, l2norm=False)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(
    "sizes", [(64, 16), (64, 144), (128, 16), (128, 80), (128, 128), (128, 144)]
)
def test_sizes(sizes, channels):
    """Slices of the values have 64 columns, the last may have fewer; of many, two share a block."""
    heads = (1, 2) if sizes[1] <= 80 else (1, 1)
    inputs = problem(1, 70, heads, sizes, channels=channels)
    backward(inputs, states(1, heads[1], *sizes), states(1, heads[1], *sizes, seed=8))
    if sizes[1] == 80:
        backward(problem(4, 3, (9, 9), sizes, channels=channels), states(4, 9, *sizes))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("sizes", [(64, 32), (128, 32)])
def test_float16(sizes, channels):
    inputs = problem(2, 100, (1, 2), sizes, F16, channels=channels)
    backward(inputs, states(2, 2, *sizes), states(2, 2, *sizes, seed=8))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("heads", [(1, 4), (2, 4), (3, 3)])
def test_heads_that_share_keys(heads, channels):
    backward(problem(1, 80, heads, (128, 32), channels=channels))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_beta(dtype, channels):
    """Betas of 0 have a gradient, though their tokens write nothing."""
    *rest, beta = problem(1, 100, (1, 2), (128, 16), channels=channels)
    beta[:, ::3] = 0.0
    assert backward((*rest, beta.to(dtype)))[4].dtype == dtype
    backward((*rest, torch.ones_like(beta).to(dtype)))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("gate", [-300.0, -20.0, -3.0, 20.0])
def test_decay(gate, size, channels):
    """From states that are lost at once to such that stay."""
    more = states(1, 2, size, 16), states(1, 2, size, 16, seed=8)
    grad, q, k, v, g, beta = problem(1, 150, (1, 2), (size, 16), gate=gate, channels=channels)
    backward((grad, q, k, v, g, beta), *more)
    g[:, 40] = -float("inf")
    g[:, 41:60] = -50.0
    backward((grad, q, k, v, g, beta), *more)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("lengths", [(5, 0, 64, 130, 1), (0, 0), (200,), (63, 1, 65)])
def test_packed(lengths, channels):
    starts = torch.tensor([3, *lengths]).cumsum(0).to(torch.int32)
    begin, end, count = 3, int(starts[-1]), len(lengths)
    initial, grad_final = states(count, 2, 128, 16), states(count, 2, 128, 16, seed=8)
    inputs = problem(1, end + 70, (1, 2), (128, 16), channels=channels)
    got = backward(inputs, grad_final, initial, starts)
    for each in got[:5]:
        assert not each[:, :begin].any() and not each[:, end:].any()
    for i, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(got[5][i], grad_final[i])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("channels", [False, True])
def test_long_sequences_are_divided(channels, dtype):
    """With few heads, into segments of 8 chunks; of states that stay and such that are lost."""
    if dtype == BF16:
        inputs = problem(1, 2049, (1, 1), (128, 16), dtype, gate=6.0, channels=channels)
        backward(inputs, states(1, 1, 128, 16), states(1, 1, 128, 16, seed=8))
    else:
        backward(problem(1, 2048, (1, 1), (128, 16), dtype, gate=0.0, channels=channels))


def test_slices_of_segments():
    """Slices of the values, of which two share a block, beside those of what a segment does."""
    more = states(1, 1, 128, 80), states(1, 1, 128, 80, seed=8)
    backward(problem(1, 2048, (1, 1), (128, 80), gate=5.0), *more)


def test_segments_are_reproducible():
    """And in the batch-invariant mode sequences are not divided."""
    inputs = problem(1, 2048, (1, 1), (128, 16), gate=5.0)
    more = (states(1, 1, 128, 16), states(1, 1, 128, 16, seed=8), None, None, True, None)
    first, again = (sm90("gated_delta_rule_backward")(*inputs, *more) for _ in range(2))
    for each, other in zip(first, again, strict=True):
        assert torch.equal(each, other)
    with tiercel.batch_invariant():
        whole = sm90("gated_delta_rule_backward")(*inputs, *more)
    assert not torch.equal(first[5], whole[5])


@pytest.mark.parametrize("channels", [False, True])
def test_packed_sequences_are_divided(channels):
    """Into segments of 8 chunks, wherever they begin; such of one segment, and of no token."""
    starts = torch.tensor([3, 3, 1100, 1101, 2400], dtype=torch.int32)
    initial, grad_final = states(4, 1, 128, 16), states(4, 1, 128, 16, seed=8)
    inputs = problem(1, 32 * 64 * 4, (1, 1), (128, 16), gate=5.0, channels=channels)
    got = backward(inputs, grad_final, initial, starts)
    for each in got[:5]:
        assert not each[:, :3].any() and not each[:, 2400:].any()
    assert torch.equal(got[5][0], grad_final[0])


@pytest.mark.parametrize("channels", [False, True])
def test_no_tokens(channels):
    def given(batch, tokens):
        return problem(batch, tokens, (1, 2), (128, 16), channels=channels)

    initial, grad_final = states(2, 2, 128, 16), states(2, 2, 128, 16, seed=8)
    got = backward(given(2, 0), grad_final, initial)
    assert torch.equal(got[5], grad_final)
    assert not backward(given(2, 0), None, initial)[5].any()
    backward(given(0, 5))
    backward(given(1, 70), starts=torch.tensor([0], dtype=torch.int32))


@pytest.mark.parametrize("channels", [False, True])
def test_rows_of_zeros_and_of_any_length(channels):
    """With their lengths divided out, queries and keys of zeros have gradients that are numbers."""
    for dtype in (BF16, F16):
        grad, q, k, *rest = problem(1, 70, (1, 2), (128, 16), dtype, channels=channels)
        q[:, 3:5], k[:, 4:6] = 0.0, 0.0
        got = sm90("gated_delta_rule_backward")(
            *(grad, q, k, *rest, None, None, None, None, True, None)
        )
        assert all(torch.isfinite(each).all() for each in got)
        scaled = q * 64, k / 64
        backward((grad, *scaled, *rest))


@pytest.mark.parametrize("channels", [False, True])
def test_strided_inputs(channels):
    """Queries, keys and values are parts of one projection; the gradient is one of a sum."""
    whole = states(2, 80, 4 * 128 + 2 * 32).to(BF16)
    q, k, v = whole.split([256, 256, 64], dim=-1)
    q, k = (t.unflatten(-1, (2, 128)) for t in (q, k))
    grad, *_, g, beta = problem(2, 80, (2, 2), (128, 32), channels=channels)
    given = (q, k, v.unflatten(-1, (2, 32)), g, beta)
    backward((grad, *given))
    backward((torch.ones((), dtype=BF16).expand(grad.shape), *given))


@pytest.mark.parametrize("channels", [False, True])
def test_reproducible(channels):
    inputs = problem(1, 200, (1, 3), (128, 32), channels=channels)
    first = backward(inputs)
    for each, other in zip(first, backward(inputs), strict=True):
        assert torch.equal(each, other)


def test_reference():
    """The formulas of ref are autograd's."""
    for channels in (False, True):
        grad, *given = problem(1, 9, (1, 2), (128, 16))
        if channels:
            given[3] = given[3][..., None] * torch.linspace(0.5, 2.0, 128)
        given = [t.double() for t in given]
        starts, initial = torch.tensor([1, 4, 4, 8]), states(3, 2, 128, 16).double()
        last = states(3, 2, 128, 16, seed=8).double()
        got = ref.gated_delta_rule_backward(grad.double(), *given, last, initial, starts, 0.5, True)
        due = autograd(grad, given, last, initial, starts.tolist(), 0.5, True)
        for a, b in zip(got, due, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("case", range(8))
def test_any_contents_of_starts(case):
    """Kernels stay inside of the tensors, whatever starts hold; the last two divide sequences."""
    draw = Draw(case)
    rows, count = draw.of(1, 70, 150), draw.of(1, 3)
    if case >= 6:
        rows, count = 2048 * (case - 5), case - 5
    right = torch.linspace(0, rows, count + 1).long()
    starts = draw.strays(right, rows + 1, wide=False).int()
    inputs = problem(1, rows, (1, 2), (128, 16), seed=case, channels=case % 2 == 1)
    initial = states(count, 2, 128, 16)
    run("gated_delta_rule_backward", *inputs, None, initial, starts, None, True, None)
