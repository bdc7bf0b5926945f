# SPDX-License-Identifier: Apache-2.0
"""Float8 training on an H100 or H200: the weight's gradient, and layers against float64."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

# Rows and columns of the result, tokens.
SMALL = [(300, 136, 272), (1, 8, 16), (129, 264, 1300), (1410, 1672, 144)]
LARGE = [(4096, 4096, 4096), (7168, 2048, 1000), (2112, 7168, 2048), (1000, 1032, 16384)]


def operands(n, k, tokens):
    """Transposes and their scales, which differ by powers of ten, and the values in float64."""
    torch.manual_seed(n + k + tokens)
    made, wide = [], []
    for rows in (n, k):
        x = torch.randn(tokens, rows, device="cuda")
        x *= 10.0 ** (torch.arange(tokens, device="cuda")[:, None] // 128 % 3)
        # The reference's: the kernel takes multiples of 8 only.
        _, _, q, scale = tiercel.fp8_quantize_transpose(x.bfloat16(), backend="ref")
        made.append((q, scale))
        wide.append(q.double() * scale.t().double().repeat_interleave(128, 1))
    (grad, grad_scale), (x, x_scale) = made
    return (grad, x, grad_scale, x_scale), *wide


def assert_near(out, grad, x, before=0.0):
    # Half a unit, and what the adders drop of 128 products, as for fp8_linear.
    truth = grad @ x.T + before
    unit = 2**-8 if out.dtype == torch.bfloat16 else 2**-22
    allowed = unit * truth.abs() + 2**-12 * (grad.abs() @ x.abs().T)
    error = (out.double() - truth).abs()
    assert (error <= allowed).all(), (error / allowed).max().item()


@pytest.mark.sanitize
@pytest.mark.parametrize("shape", SMALL)
def test_weight_gradient(shape):
    given, *wide = operands(*shape)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full(shape[:2], torch.nan, device="cuda", dtype=dtype)
        assert tiercel.fp8_linear_weight_grad(*given, out=out) is out
        assert_near(out, *wide)
        assert torch.equal(tiercel.fp8_linear_weight_grad(*given, dtype=dtype), out)
    before = torch.randn(shape[:2], device="cuda") * 100
    total = before.clone()
    assert tiercel.fp8_linear_weight_grad(*given, total=total) is total
    assert_near(total, *wide, before.double())


@pytest.mark.parametrize("shape", LARGE)
def test_large_weight_gradients(shape):
    given, *wide = operands(*shape)
    assert_near(tiercel.fp8_linear_weight_grad(*given, dtype=torch.float32), *wide)
    before = torch.randn(shape[:2], device="cuda") * 100
    total = before.clone()
    tiercel.fp8_linear_weight_grad(*given, total=total)
    assert_near(total, *wide, before.double())


def test_no_tokens():
    grad, x = (torch.zeros(rows, 0, device="cuda").to(torch.float8_e4m3fn) for rows in (24, 16))
    scales = torch.zeros(0, 24, device="cuda"), torch.zeros(0, 16, device="cuda")
    out = torch.full((24, 16), torch.nan, device="cuda")
    assert not tiercel.fp8_linear_weight_grad(grad, x, *scales, out=out).any()
    total = torch.ones(24, 16, device="cuda")
    assert tiercel.fp8_linear_weight_grad(grad, x, *scales, total=total).eq(1).all()


def layer(tokens, n, k, dtype=torch.bfloat16):
    torch.manual_seed(tokens + n + k)
    x = torch.randn(2, tokens // 2, k, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).to(dtype).requires_grad_()
    bias = torch.randn(n, device="cuda").bfloat16().requires_grad_()
    return x, weight, bias, torch.randn(2, tokens // 2, n, device="cuda").bfloat16()


def relative(got, due):
    return ((got.double() - due).norm() / due.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(300, 272, 400), (2048, 1024, 2048)])
def test_layer(sizes, dtype):
    x, weight, bias, grad = layer(*sizes, dtype)
    y = tiercel.fp8_linear_training(x, weight, bias)
    y.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    due = functional.linear(*wide)
    due.backward(grad.double())
    assert relative(y, due) < 0.05
    for got, one in zip((x, weight, bias), wide, strict=True):
        assert got.grad.dtype == got.dtype
        assert relative(got.grad, one.grad) < 0.05


@pytest.mark.parametrize("frozen", ["x", "weight", None])
def test_operands_that_lie_anywhere(frozen):
    """Gradients, inputs and weights that begin at any address, or lie the other way round."""
    given = layer(300, 272, 400)
    for t, name in zip(given, ("x", "weight", "bias", "grad"), strict=True):
        t.requires_grad_(name not in (frozen, "grad"))
    x, weight, bias, grad = given
    wanted = [t for t in (x, weight, bias) if t.requires_grad]
    due = torch.autograd.grad(tiercel.fp8_linear_training(x, weight, bias), wanted, grad)

    def moved(t):
        flat = torch.empty(t.numel() + 1, device="cuda", dtype=t.dtype)[1:]
        return flat.view(t.shape).copy_(t.detach()).requires_grad_(t.requires_grad)

    x, weight, bias = moved(x), moved(weight), moved(bias)
    wanted = [t for t in (x, weight, bias) if t.requires_grad]
    for other in (moved(grad), grad.mT.contiguous().mT):
        y = tiercel.fp8_linear_training(x, weight, bias)
        for got, one in zip(torch.autograd.grad(y, wanted, other), due, strict=True):
            assert torch.equal(got, one)
    one = torch.ones((), device="cuda", dtype=torch.bfloat16)
    y = tiercel.fp8_linear_training(x, weight, bias)
    of_ones = torch.autograd.grad(y, wanted, one.expand(y.shape).contiguous())
    y = tiercel.fp8_linear_training(x, weight, bias)
    for got, due_one in zip(
        torch.autograd.grad(y, wanted, one.expand(y.shape)), of_ones, strict=True
    ):
        assert torch.equal(got, due_one)


def test_checkpointing_adding_and_graphs():
    x, weight, bias, grad = layer(512, 272, 400)
    tiercel.fp8_linear_training(x, weight, bias).backward(grad)
    due = x.grad, weight.grad
    x.grad = weight.grad = None
    checkpoint(tiercel.fp8_linear_training, x, weight, bias, use_reentrant=False).backward(grad)
    assert torch.equal(x.grad, due[0]) and torch.equal(weight.grad, due[1])
    total = torch.zeros(272, 400, device="cuda")
    weight.grad = None
    for _ in range(2):
        tiercel.fp8_linear_training(x, weight, bias, weight_grad=total).backward(grad)
    assert weight.grad is None
    torch.testing.assert_close(total / 2, due[1].float(), rtol=2**-8, atol=1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        eager = tiercel.fp8_linear_training(x, weight, bias)
        with torch.cuda.graph(graph):
            captured = tiercel.fp8_linear_training(x, weight, bias)
    graph.replay()
    assert torch.equal(captured, eager)
