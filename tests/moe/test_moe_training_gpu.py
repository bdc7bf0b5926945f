# SPDX-License-Identifier: Apache-2.0
"""The gradients of fused_moe on an H100 or H200, against float64."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

NAMES = ("out", "x", "w_up", "w_down", "topk_weights")
# The first product, its activation's gradient and the result are rounded: this is what they amount
# to, in units of one rounding.
ROUNDINGS = 1.6


def data(tokens, experts, k, hidden, inner, dtype=torch.bfloat16, everywhere=None):
    generator = torch.Generator("cuda").manual_seed(5)

    def random(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(dtype)

    scores = torch.rand(tokens, everywhere or experts, device="cuda", generator=generator)
    return [
        random(tokens, hidden),
        random(experts, 2 * inner, hidden, scale=hidden**-0.5),
        random(experts, hidden, inner, scale=inner**-0.5),
        torch.rand(tokens, k, device="cuda", generator=generator),
        scores.topk(k).indices.int(),
    ]


def step(function, values, grad, **options):
    inputs = [v.detach().requires_grad_() for v in values[:4]]
    out = function(*inputs, values[4], **options)
    out.backward(grad.to(out.dtype))  # which a reentrant checkpoint needs
    return out.detach(), *(t.grad for t in inputs)


def grad_of(values):
    generator = torch.Generator("cuda").manual_seed(6)
    x = values[0]
    return torch.randn(x.shape, device="cuda", generator=generator).to(x.dtype)


def check(values, **options):
    grad = grad_of(values)
    got = step(tiercel.fused_moe, values, grad, **options)
    wide = [v.double() for v in values[:4]] + values[4:]
    due = step(ref.fused_moe, wide, grad, **options)
    unit = torch.finfo(values[0].dtype).eps / 2
    for name, one, exact in zip(NAMES, got, due, strict=True):
        size = exact.square().mean().sqrt()
        error = (one.double() - exact).square().mean().sqrt()
        assert error <= ROUNDINGS * unit * size + 1e-7, (name, float(error / unit / size))
        assert (one.double() - exact).abs().max() <= 16 * unit * exact.abs().max() + 1e-6, name
    return got


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "gelu_residual"])
def test_activations(activation, dtype):
    check(data(300, 8, 2, 512, 384, dtype), activation=activation)


@pytest.mark.parametrize(
    "sizes",
    [(1, 4, 4, 64, 40), (37, 16, 8, 264, 136), (4096, 8, 2, 512, 256), (500, 64, 8, 2048, 96)],
)
def test_sizes(sizes):
    check(data(*sizes))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small(dtype):
    values = data(70, 5, 2, 72, 136, dtype)
    values[4][values[4] == 3] = 0
    values[4][0, 0], values[4][1], values[4][2, 1] = -1, 5, 2**31 - 1
    found = check(values)
    assert not found[2][3].any() and not found[3][3].any() and not found[4][1].any()


def test_experts_elsewhere():
    expert_map = torch.tensor([2, -1, 0, 7, 1], dtype=torch.int32, device="cuda")
    check(data(100, 3, 3, 128, 64, everywhere=5), expert_map=expert_map)


def test_all_tokens_at_one_expert():
    values = data(3000, 8, 2, 256, 128)
    values[4].fill_(6)
    found = check(values)
    others = [e for e in range(8) if e != 6]
    assert not found[2][others].any() and not found[3][others].any()


def test_the_same_bits_every_time():
    values = data(4096, 16, 4, 512, 256)
    first = step(tiercel.fused_moe, values, grad_of(values))
    for _ in range(3):
        again = step(tiercel.fused_moe, values, grad_of(values))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_no_errors_beyond_those_of_torch():
    """PyTorch's own products of the same dtype, an expert at a time."""
    values = data(2000, 8, 2, 512, 384)
    grad = grad_of(values)

    def loop(x, w_up, w_down, weights, ids):
        out = torch.zeros_like(x)
        for expert in range(len(w_up)):
            token, place = torch.where(ids == expert)
            a, b = torch.nn.functional.linear(x[token], w_up[expert]).chunk(2, -1)
            rows = torch.nn.functional.linear(torch.nn.functional.silu(a) * b, w_down[expert])
            out = out.index_add(0, token, rows * weights[token, place, None].to(x.dtype))
        return out

    exact = step(ref.fused_moe, [v.double() for v in values[:4]] + values[4:], grad)
    for name, mine, theirs, due in zip(
        NAMES,
        step(tiercel.fused_moe, values, grad),
        step(loop, values, grad),
        exact,
        strict=True,
    ):
        mine, theirs = ((r.double() - due).square().mean().sqrt() for r in (mine, theirs))
        assert mine <= 1.05 * theirs, (name, float(mine / theirs))


def test_captured_and_without_synchronisation():
    values = data(1000, 8, 2, 256, 128)
    grad = grad_of(values)
    due = step(tiercel.fused_moe, values, grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(tiercel.fused_moe, values, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(tiercel.fused_moe, values, grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(tiercel.fused_moe, values, grad)
    for result in results:
        result.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, due, strict=True))


def test_the_gradient_of_the_first_product_takes_its_place():
    values = data(4096, 8, 4, 512, 1024)
    leaves = [v.detach().requires_grad_() for v in values[:4]]
    grad = grad_of(values)

    def backward(keep):
        out = tiercel.fused_moe(*leaves, values[4])
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = torch.autograd.grad(out, leaves, grad, retain_graph=keep)
        peak = torch.cuda.max_memory_allocated() - before
        again = torch.autograd.grad(out, leaves, grad) if keep else found
        return found, again, peak

    due, again, with_both = backward(True)
    found, _, peak = backward(False)
    product = 4096 * 4 * 2 * 1024 * 2
    assert with_both - peak >= product // 2
    for one in (again, found):
        assert all(torch.equal(a, b) for a, b in zip(one, due, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    values = data(300, 8, 2, 256, 128)
    grad = grad_of(values)

    def saved(*inputs):
        return checkpoint(tiercel.fused_moe, *inputs, use_reentrant=use_reentrant)

    due, got = (step(f, values, grad) for f in (tiercel.fused_moe, saved))
    # The forward of a reentrant one has no grad mode, and rounds once less.
    torch.testing.assert_close(got[0], due[0], rtol=2**-6, atol=2**-5)
    assert all(torch.equal(a, b) for a, b in zip(got[1:], due[1:], strict=True))


def test_compiled_once_for_any_number_of_tokens():
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def call(x, w_up, w_down, weights, ids):
        return tiercel.fused_moe(x * 2, w_up, w_down, weights, ids)

    compiled = torch.compile(call, backend=counted, fullgraph=True, dynamic=True)
    for tokens in (200, 333, 1000):
        values = data(tokens, 8, 2, 256, 128)
        due, got = (step(f, values, grad_of(values)) for f in (call, compiled))
        for a, b in zip(got, due, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)
    assert counted.frame_count == 1


def test_autocast():
    values = [v.float() if v.is_floating_point() else v for v in data(300, 8, 2, 256, 128)]
    with torch.autocast("cuda", torch.bfloat16):
        found = step(tiercel.fused_moe, values, grad_of(values))
    assert found[0].dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 for t in found[1:])


def test_strided():
    """Weights that are parts of a larger tensor, rows at a distance, an expanded gradient."""
    x, w_up, w_down, weights, ids = data(200, 4, 2, 256, 128)
    values = [
        torch.cat([x, -x], 1)[:, :256],
        torch.cat([w_up, -w_up], 2)[..., :256],
        torch.cat([w_down, -w_down], 1)[:, :256],
        weights,
        ids,
    ]
    one = torch.ones(1, 1, device="cuda").bfloat16().expand(200, 256)
    due = step(tiercel.fused_moe, [x, w_up, w_down, weights, ids], one.contiguous())
    got = step(tiercel.fused_moe, values, one)
    assert all(torch.equal(a, b) for a, b in zip(got, due, strict=True))
