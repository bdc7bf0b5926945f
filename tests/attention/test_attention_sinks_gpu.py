# SPDX-License-Identifier: Apache-2.0
"""Sinks, and packed sequences of wide heads or with a cap, on an H100 or H200, against float64."""

import pytest
import torch
from support.attention import compare

import tiercel
from tiercel.ops.attention.reference import sinks_backward

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.bfloat16, torch.float16]
MASKS = [{}, {"causal": True}, {"causal": True, "window": (127, 0)}, {"softcap": 5.0}]
SINKS = [-torch.inf, 0.0, 3.0, 1e30]


def rand(*shape, dtype=torch.bfloat16, seed=7):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def draw(batch, seq_q, seq_k, d, dtype=torch.bfloat16):
    """q, k, v and a gradient, of four heads of queries and two of keys."""
    shapes = ((seq_q, 4), (seq_k, 2), (seq_k, 2), (seq_q, 4))
    return [rand(batch, *shape, d, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("options", MASKS[:3])
def test_small(d, options):
    for sizes in ((1, 1, 1), (2, 130, 70), (1, 200, 300)):
        q, k, v, grad = draw(*sizes, d)
        leaves = [x.requires_grad_() for x in (q, k, v, torch.zeros(4, device="cuda"))]
        tiercel.attention(q, k, v, sinks=leaves[3], **options).backward(grad)
        assert all(x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("sizes", [(2, 300, 300), (1, 2000, 1100), (1, 65, 4000)])
def test_attention(sizes, d, dtype, options):
    q, k, v, _ = draw(*sizes, d, dtype)
    sinks = torch.tensor(SINKS, device="cuda")
    found = tiercel.attention(q, k, v, sinks=sinks, return_lse=True, **options)
    doubles = [x.double() for x in (q, k, v)]
    compare(*found, *tiercel.ref.attention(*doubles, sinks=sinks, return_lse=True, **options))


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_sink_of_minus_infinity_is_none(d, options):
    q, k, v, _ = draw(2, 700, 700, d)
    sinks = torch.full((4,), -torch.inf, device="cuda")
    found = tiercel.attention(q, k, v, sinks=sinks, return_lse=True, **options)
    due = tiercel.attention(q, k, v, return_lse=True, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, due, strict=True))


LENGTHS = [[1000, 1, 300, 129], [200] * 20, [2048, 100, 1000]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (128, 128), (256, 256), (200, 64)])
@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_varlen(lengths, sinks, options, d, d_v, dtype):
    if "softcap" in options and dtype != torch.bfloat16:
        pytest.skip("there is no kernel")
    rows = sum(lengths) + 7  # behind the last sequence
    q, k = (rand(rows, heads, d, dtype=dtype, seed=heads) for heads in (4, 2))
    v = rand(rows, 2, d_v, dtype=dtype, seed=3)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    options = {**options, "sinks": torch.tensor(SINKS, device="cuda") if sinks else None}
    rest = (starts, starts, max(lengths), max(lengths))
    found = tiercel.attention_varlen(q, k, v, *rest, return_lse=True, **options)
    doubles = [x.double() for x in (q, k, v)]
    compare(*found, *tiercel.ref.attention_varlen(*doubles, *rest, return_lse=True, **options))


def gradients(run, tensors, grad, **options):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = run(*leaves[:3], sinks=leaves[3], return_lse=True, **options)
    found = torch.autograd.grad([out, lse], leaves, [grad.to(out.dtype), torch.ones_like(lse)])
    return found, out.detach(), lse.detach()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("options", MASKS)
def test_gradients(d, dtype, options):
    q, k, v, grad = draw(2, 300, 500, d, dtype)
    tensors = (q, k, v, torch.tensor([-2.0, 0.0, 3.0, 1.0], device="cuda"))
    found, _, _ = gradients(tiercel.attention, tensors, grad, **options)
    doubles = [x.double() for x in tensors]
    truth, _, _ = gradients(tiercel.ref.attention, doubles, grad, **options)
    unit = torch.finfo(dtype).eps / 2
    for one, other in zip(found[:3], truth[:3], strict=True):
        assert (one.double() - other).norm() <= 5 * unit * other.norm()
    assert found[3].dtype == torch.float32
    error = (found[3].double() - truth[3]).abs().max()
    assert error <= 4 * unit * (d * 600) ** 0.5, error.item()


@pytest.mark.parametrize("sizes", [(3, 5000, 700), (1, 33_000, 64), (70, 40, 40)])
def test_the_sum_over_rows(sizes):
    """From the logarithms and results that the backward sees, in float64."""
    q, k, v, grad = draw(*sizes, 64)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], device="cuda")
    found, out, lse = gradients(tiercel.attention, (q, k, v, sinks), grad, causal=True)
    delta = (grad.double() * out.double()).sum(-1).transpose(1, 2) - 1
    most = (grad.double() * out.double()).abs().sum(-1).transpose(1, 2) + 1
    terms = sinks_backward(-most, lse.double(), sinks.double())
    error = (found[3].double() - sinks_backward(delta, lse.double(), sinks.double())).abs()
    assert (error <= 4e-6 * terms).all(), (error / terms).max().item()
    again, _, _ = gradients(tiercel.attention, (q, k, v, sinks), grad, causal=True)
    assert torch.equal(found[3], again[3])


def test_gradients_of_packed_sequences():
    lengths = [300, 1, 0, 140]
    rows = sum(lengths) + 7
    q, k, v, grad = (x[0] for x in draw(1, rows, rows, 64))
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    sinks = torch.tensor([-2.0, 0.0, 3.0, 1.0], device="cuda")

    def run(of):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
        if of is tiercel.ref.attention_varlen:
            leaves = [x.detach().double().requires_grad_() for x in leaves]
        given = (*leaves[:3], starts, starts, 300, 300)
        out = of(*given, sinks=leaves[3], causal=True)
        return torch.autograd.grad(out, leaves, grad.to(out.dtype))

    found, truth = map(run, (tiercel.attention_varlen, tiercel.ref.attention_varlen))
    for one, other in zip(found[:3], truth[:3], strict=True):
        assert (one.double() - other).norm() <= 5 * 2**-9 * other.norm()
    assert (found[3].double() - truth[3]).abs().max() <= 4 * 2**-9 * (64 * rows) ** 0.5


def test_graphs():
    """The whole step in a CUDA graph, whose sinks change between replays."""
    q, k, v, grad = draw(1, 300, 300, 64)
    sinks = torch.zeros(4, device="cuda")

    def step():
        return gradients(tiercel.attention, (q, k, v, sinks), grad, causal=True)[0]

    due = {}
    for value in (0.0, 2.0):
        sinks.fill_(value)
        due[value] = step()[3]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for value in (2.0, 0.0):
        sinks.fill_(value)
        graph.replay()
        assert torch.equal(found[3], due[value])
