# SPDX-License-Identifier: Apache-2.0
"""Residuals, gated layers, the MLP of both and gradients on an H100 or H200, against float64."""

import pytest
import torch
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
GATES = ["silu", "gelu", "gelu_tanh"]
SIZES = [(1, 4096, 512), (7, 264, 72), (64, 1032, 520), (129, 520, 136), (1000, 1032, 1032)]


def rand(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(11)


def layer(m, n, k, dtype=torch.bfloat16, parts=1):
    return (
        rand(m, k, dtype=dtype),
        rand(parts * n, k, dtype=dtype, scale=k**-0.5),
        rand(parts * n, dtype=dtype),
    )


def assert_rounded_once(result, truth, k):
    """Half a unit of the result, and what float32 sums and activations add."""
    unit = torch.finfo(result.dtype).eps / 2
    error = (result.double() - truth).abs()
    allowed = 1.02 * unit * truth.abs() + 2**-20 * k**0.5 + 5e-5
    assert (error <= allowed).all(), (error / allowed).max().item()


def sums_of(x, weight, bias):
    return functional.linear(x.double(), weight.double(), bias.double())


def gate(act, both):
    a, b = both.chunk(2, dim=-1)
    return ACTIVATIONS[act](a) * b


@pytest.mark.sanitize
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_residual(act, dtype):
    for m, n, k in SIZES:
        tensors, residual = layer(m, n, k, dtype), rand(m, n, dtype=dtype)
        out = torch.full((m, n), torch.nan, device="cuda", dtype=dtype)
        truth = ACTIVATIONS[act](sums_of(*tensors)) + residual.double()
        result = tiercel.linear_act(*tensors, activation=act, residual=residual)
        assert_rounded_once(result, truth, k)
        tiercel.linear_act(*tensors, activation=act, residual=residual, out=out)
        assert torch.equal(out, result)
        apart = rand(m, 2 * n, dtype=dtype)[:, n:]
        result = tiercel.linear_act(*tensors, activation=act, residual=apart)
        assert_rounded_once(result, truth - residual.double() + apart.double(), k)


@pytest.mark.sanitize
@pytest.mark.parametrize("act", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gated(act, dtype, with_bias):
    for m, n, k in SIZES:
        x, weight, bias = layer(m, n, k, dtype, parts=2)
        bias = bias if with_bias else None
        out = torch.full((m, n), torch.nan, device="cuda", dtype=dtype)
        tiercel.gated_linear(x, weight, bias, activation=act, out=out)
        truth = functional.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        )
        truth = gate(act, truth)
        scale = truth.abs().mean().item()
        assert_rounded_once(out, truth, k * max(1.0, scale))
        assert torch.equal(tiercel.gated_linear(x, weight, bias, activation=act), out)


@pytest.mark.parametrize("m", [1, 8, 33, 64, 128, 256, 777, 2048])
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1536, 4096), (14336, 256)])
def test_gated_sizes(m, n, k):
    tensors = layer(m, n, k, parts=2)
    assert_rounded_once(tiercel.gated_linear(*tensors), gate("silu", sums_of(*tensors)), 4 * k)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 8, 8), (7, 264, 72), (128, 4096, 512), (999, 1032, 520), (4096, 512, 2048)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_the_backward(m, n, k, dtype):
    grad, x, weight = rand(m, n, dtype=dtype), rand(m, k, dtype=dtype), rand(n, k, dtype=dtype)
    of_x = torch.ops.tiercel.linear_act_backward_x(grad, weight, "sm90")
    of_weight = torch.ops.tiercel.linear_act_backward_weight(grad, x, "sm90")
    assert_rounded_once(of_x, grad.double() @ weight.double(), 64 * n)
    assert_rounded_once(of_weight, grad.double().T @ x.double(), 64 * m)


def gradients(function, tensors, grad):
    tensors = [t.detach().requires_grad_() for t in tensors]
    result = function(*tensors)
    result.backward(grad)
    return result, [t.grad for t in tensors]


def assert_near(found, due):
    """Sums of products that were rounded once or twice: errors of a unit of their RMS."""
    for ours, truth in zip(found, due, strict=True):
        unit = torch.finfo(ours.dtype).eps / 2
        scale = truth.square().mean().sqrt()
        error = (ours.double() - truth).abs()
        assert error.square().mean().sqrt() <= 3 * unit * scale
        assert (error <= 14 * unit * scale + 3 * unit * truth.abs()).all()


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("m", "n", "k"), [(40, 264, 136), (1000, 1032, 520)])
def test_gradients(act, m, n, k):
    tensors, grad = (*layer(m, n, k), rand(m, n)), rand(m, n)

    def ours(x, weight, bias, residual):
        return tiercel.linear_act(x, weight, bias, activation=act, residual=residual)

    def exact(x, weight, bias, residual):
        return tiercel.ref.linear_act(x, weight, bias, activation=act, residual=residual)

    doubles = [t.double() for t in tensors]
    result, found = gradients(ours, tensors, grad)
    truth, due = gradients(exact, doubles, grad.double())
    # With a gradient wanted the result is the same, bit for bit.
    assert torch.equal(result, ours(*tensors))
    assert_rounded_once(result, truth, k)
    assert_near(found, due)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True)
    assert_near(gradients(compiled, tensors, grad)[1], due)
    without = gradients(lambda *t: ours(*t, None), tensors[:3], grad)[1]
    assert_near(without, due[:3])


@pytest.mark.parametrize("gated", [True, False])
def test_mlp_and_its_gradients(gated):
    m, n, h = 300, 264, 520
    x, up = layer(m, h * (1 + gated), n)[:2]
    tensors, grad = (x, up, rand(n, h, scale=h**-0.5)), rand(m, n)

    def ours(x, up, down):
        return tiercel.fused_mlp(x, up, down, gated=gated, residual=x)

    def exact(x, up, down):
        return tiercel.ref.fused_mlp(x, up, down, gated=gated, residual=x)

    truth, due = gradients(exact, [t.double() for t in tensors], grad.double())
    assert_near([ours(*tensors)], [truth])
    assert_near(gradients(ours, tensors, grad)[1], due)


@pytest.mark.parametrize("m", [1, 2048])
def test_a_training_step_in_a_graph(m):
    tensors = [t.requires_grad_() for t in layer(m, 512, 256)]
    grad = rand(m, 512)

    def step():
        return torch.autograd.grad(tiercel.linear_act(*tensors), tensors, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        due = [g.clone() for g in step()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(2):
        for g in found:
            g.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, due, strict=True))


def test_no_rows():
    x, weight, bias = (t.requires_grad_() for t in layer(8, 64, 128))
    result = tiercel.linear_act(x[:0], weight, bias)
    result.sum().backward()
    assert (weight.grad == 0).all() and (bias.grad == 0).all() and (x.grad == 0).all()
    assert tiercel.gated_linear(x[:0].detach(), weight.detach()).shape == (0, 32)
