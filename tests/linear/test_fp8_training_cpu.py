# SPDX-License-Identifier: Apache-2.0
"""Float8 training on any machine: gradients, how they are kept and added up, errors."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

N, K, BATCH, ROWS = 40, 200, 2, 67  # 134 tokens: 128 and 6


def layer(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x = normal(BATCH, ROWS, K).bfloat16().requires_grad_()
    weight = (normal(N, K) * K**-0.5).to(dtype).requires_grad_()
    bias = normal(N).bfloat16().requires_grad_()
    return x, weight, bias, normal(BATCH, ROWS, N).bfloat16()


def dequantized(x, granularity="1x128"):
    q, scale = tiercel.fp8_quantize(x, granularity)
    down = 128 if granularity == "128x128" else 1
    scale = scale.double().repeat_interleave(down, 0).repeat_interleave(128, 1)
    return q.double() * scale[: x.shape[0], : x.shape[1]]


def relative(got, due):
    return ((got.double() - due).norm() / due.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_the_quantised_operands(dtype):
    x, weight, bias, grad = layer(dtype)
    y = tiercel.fp8_linear_training(x, weight, bias)
    y.backward(grad)
    assert y.dtype == x.grad.dtype == torch.bfloat16 and weight.grad.dtype == dtype
    rows, grads = x.detach().view(-1, K), grad.view(-1, N)
    wide_weight = dequantized(weight.detach(), "128x128")
    due = dequantized(rows) @ wide_weight.T + bias.double()
    torch.testing.assert_close(y.view(-1, N).double(), due, rtol=2**-8, atol=1e-4)
    due = dequantized(grads) @ wide_weight
    torch.testing.assert_close(x.grad.view(-1, K).double(), due, rtol=2**-8, atol=1e-4)
    due = dequantized(grads.t()) @ dequantized(rows.t()).T
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(weight.grad.double(), due, rtol=rtol, atol=1e-4)
    torch.testing.assert_close(bias.grad.double(), grads.double().sum(0), rtol=2**-8, atol=1e-4)


def test_whole_gradients_are_within_a_twentieth():
    x, weight, bias, grad = layer()
    tiercel.fp8_linear_training(x, weight, bias).backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    functional.linear(*wide).backward(grad.double())
    for got, due in zip((x, weight), wide, strict=False):
        assert 0.02 < relative(got.grad, due.grad) < 0.05
    assert relative(bias.grad, wide[2].grad) < 0.01


def gradients(function, x, weight, bias, grad):
    x.grad = weight.grad = bias.grad = None
    y = function(x, weight, bias)
    y.backward(grad)
    return y, x.grad, weight.grad, bias.grad


def test_under_checkpointing_and_compile():
    given = layer()
    due = gradients(tiercel.fp8_linear_training, *given)

    def checkpointed(*args):
        return checkpoint(tiercel.fp8_linear_training, *args, use_reentrant=False)

    compiled = torch.compile(tiercel.fp8_linear_training, fullgraph=True, backend="aot_eager")
    for function in (checkpointed, compiled):
        for got, one in zip(gradients(function, *given), due, strict=True):
            assert torch.equal(got, one)
    with torch.no_grad():
        assert torch.equal(compiled(*given[:3]), due[0])


def test_under_autocast():
    """The weight is quantised as it is; the others become bfloat16."""
    x, weight, bias, grad = layer(torch.float32)
    due = gradients(tiercel.fp8_linear_training, x, weight, bias, grad)
    wide = [t.detach().float().requires_grad_() for t in (x, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        y = tiercel.fp8_linear_training(wide[0], weight, wide[1])
    weight.grad = None
    y.backward(grad)
    assert torch.equal(y, due[0]) and torch.equal(weight.grad, due[2])
    assert wide[0].grad.dtype == torch.float32 and torch.equal(wide[0].grad, due[1].float())


@pytest.mark.parametrize("compiled", [False, True])
def test_adds_to_a_given_float32_gradient(compiled):
    x, weight, bias, grad = layer()
    wide = weight.detach().float().requires_grad_()
    tiercel.fp8_linear_training(x, wide, bias).backward(grad)
    function = tiercel.fp8_linear_training
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    before = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    first, total = before, before.clone()
    results = []
    for _ in range(2):
        results.append(function(x, weight, bias, weight_grad=total))
        if compiled:
            results.pop().backward(grad)
    for y in results:  # both forwards before both backwards
        assert torch.equal(total, before)
        y.backward(grad)
        before = total.clone()
    assert weight.grad is None
    torch.testing.assert_close(total, first + 2 * wide.grad, rtol=1e-5, atol=1e-5)


def test_float32_gradient_of_a_bfloat16_leaf():
    x, weight, bias, grad = layer()
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("this PyTorch has no grad_dtype")
    weight.grad_dtype = torch.float32
    for _ in range(2):
        tiercel.fp8_linear_training(x, weight, bias).backward(grad)
    assert weight.grad.dtype == torch.float32
    wide = weight.detach().float().requires_grad_()
    tiercel.fp8_linear_training(x, wide, bias).backward(grad)
    torch.testing.assert_close(weight.grad, 2 * wide.grad)


def test_only_what_is_wanted():
    x, weight, bias, grad = layer()
    due = gradients(tiercel.fp8_linear_training, x, weight, bias, grad)
    frozen = weight.detach()
    x.grad = None
    tiercel.fp8_linear_training(x, frozen).backward(grad)
    assert torch.equal(x.grad, due[1])
    weight.grad = None
    tiercel.fp8_linear_training(x.detach(), weight).backward(grad)
    assert torch.equal(weight.grad, due[2])
    (of_x,) = torch.autograd.grad(tiercel.fp8_linear_training(x, weight), x, grad)
    assert torch.equal(of_x, due[1])
    y = tiercel.fp8_linear_training(x, weight)
    with pytest.raises(RuntimeError, match="there is no derivative"):
        torch.autograd.grad(y, x, grad.clone().requires_grad_(), create_graph=True)


def test_no_tokens():
    x, weight, bias, grad = layer()
    empty = x.detach()[:, :0].requires_grad_()
    y = tiercel.fp8_linear_training(empty, weight, bias)
    assert y.shape == (BATCH, 0, N)
    y.backward(grad[:, :0])
    assert empty.grad.shape == empty.shape and not weight.grad.any() and not bias.grad.any()


def test_module():
    torch.manual_seed(0)
    module = tiercel.nn.Float8Linear(K, N, dtype=torch.bfloat16, add_to_grad=True, backend="ref")
    assert "add_to_grad=True, backend='ref'" in repr(module)
    x, *_, grad = layer()
    module(x).backward(grad)
    first = module.weight.grad.float()
    assert module.weight.grad.dtype == torch.bfloat16
    module.weight.grad = None
    if not hasattr(module.weight, "grad_dtype"):
        pytest.skip("this PyTorch has no grad_dtype")
    module.weight.grad_dtype = torch.float32
    module.weight.grad = torch.zeros(N, K)
    total = module.weight.grad
    for _ in range(2):
        module(x).backward(grad)
    assert module.weight.grad is total
    torch.testing.assert_close(total, 2 * first, rtol=2**-7, atol=1e-3)


# --------------------------------------------------------------------------- the product by itself


def operands(n, k, tokens):
    generator = torch.Generator().manual_seed(n + k)
    made = []
    for rows in (n, k):
        x = torch.randn(tokens, rows, generator=generator).bfloat16()
        made.append(tiercel.fp8_quantize_transpose(x)[2:])
    (grad, grad_scale), (x, x_scale) = made
    return grad, x, grad_scale, x_scale


@pytest.mark.parametrize("shape", [(24, 40, 300), (1, 8, 128), (130, 3, 1)])
def test_weight_gradient(shape):
    given = operands(*shape)
    grad, x = (
        q.double() * scale.t().double().repeat_interleave(128, 1)
        for q, scale in zip(given[:2], given[2:], strict=True)
    )
    due = grad @ x.T
    for dtype, rtol in ((torch.bfloat16, 2**-8), (torch.float32, 1e-5)):
        result = tiercel.fp8_linear_weight_grad(*given, dtype=dtype)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), due, rtol=rtol, atol=1e-4)
        out = torch.empty_like(result)
        assert tiercel.fp8_linear_weight_grad(*given, out=out) is out
        assert torch.equal(out, result)
    total = torch.ones(shape[:2])
    assert tiercel.fp8_linear_weight_grad(*given, total=total) is total
    torch.testing.assert_close(total.double(), due + 1, rtol=1e-5, atol=1e-4)


def test_weight_gradient_takes_scales_with_any_strides():
    grad, x, grad_scale, x_scale = operands(24, 40, 300)
    due = tiercel.fp8_linear_weight_grad(grad, x, grad_scale, x_scale)
    by_rows = grad_scale.t().contiguous().t(), x_scale.t().contiguous().t()
    assert torch.equal(tiercel.fp8_linear_weight_grad(grad, x, *by_rows), due)


def test_errors_of_the_product():
    given = operands(24, 40, 300)
    with pytest.raises(ValueError, match="`total` is the result, and `out` another one"):
        tiercel.fp8_linear_weight_grad(*given, total=torch.zeros(24, 40), out=torch.zeros(24, 40))
    with pytest.raises(TypeError, match="fp8_linear_weight_grad: `total` must have dtype float32"):
        tiercel.fp8_linear_weight_grad(*given, total=torch.zeros(24, 40).bfloat16())
    with pytest.raises(ValueError, match=r"`x_scale` must have shape \[P / 128, K\] = \[3, 40\]"):
        tiercel.fp8_linear_weight_grad(*given[:3], torch.zeros(2, 40))
    with pytest.raises(ValueError, match=r"`grad_scale` must have shape \[P / 128, N\]"):
        tiercel.fp8_linear_weight_grad(*given[:2], torch.zeros(24, 3), given[3])


def test_errors_of_the_layer():
    x, weight, bias, _ = layer()
    with pytest.raises(
        TypeError, match="fp8_linear_training: `x` must have dtype bfloat16, got float32"
    ):
        tiercel.fp8_linear_training(x.float(), weight, bias)
    with pytest.raises(ValueError, match="fp8_linear_training: `weight_grad` must have shape"):
        tiercel.fp8_linear_training(x, weight, bias, weight_grad=torch.zeros(N, 8))
    with pytest.raises(
        TypeError, match="fp8_linear_training: `weight_grad` must have dtype float32"
    ):
        tiercel.fp8_linear_training(x, weight, weight_grad=torch.zeros(N, K).bfloat16())


def test_a_frozen_weight_keeps_no_input():
    x, weight, bias, grad = layer()
    weight.requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = tiercel.fp8_linear_training(x, weight, bias)
    assert kept == [weight.shape]
    y.backward(grad)
    assert x.grad is not None and weight.grad is None
