# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy with entropies, with PyTorch and without a GPU."""

import pytest
import torch
from torch.nn import functional

import tiercel
from tiercel.ops.loss import chunks, reference

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

ROWS, HIDDEN, CLASSES = 21, 12, 37


@pytest.fixture(params=[False, True])
def _chunked(request, monkeypatch):
    """One chunk, or eight rows of logits at a time."""
    if request.param:
        monkeypatch.setattr(chunks, "_ROW_BYTES", 8)
        monkeypatch.setattr(chunks, "_TILE", 4)
        monkeypatch.setattr(chunks, "_LEAST_ROWS", 1000)
        monkeypatch.setattr(chunks, "_LEAST_MEMORY", 1)


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, HIDDEN, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(CLASSES, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[2::5] = -100
    return x, weight, target, bias


def exact(x, weight, target, bias, softcap=None):
    logits = functional.linear(x.double(), weight.double(), bias.double())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = logits.log_softmax(-1)
    kept = target != -100
    loss = functional.cross_entropy(logits, target, reduction="none")
    return loss, -(log_p.exp() * log_p).sum(-1) * kept


@pytest.mark.usefixtures("_chunked")
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_entropies_and_their_gradients(softcap):
    tensors = problem()
    leaves = [tensors[0], tensors[1], tensors[3]]
    found = tiercel.linear_cross_entropy(
        *tensors, reduction="none", softcap=softcap, return_entropy=True
    )
    due = exact(*tensors, softcap)
    weights = torch.linspace(-1, 2, ROWS), torch.linspace(3, 1, ROWS)
    for got, exactly in zip(found, due, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exactly, rtol=1e-5, atol=1e-5)
    for both in ((0, 1), (1,), (0,)):
        got = torch.autograd.grad(
            sum((found[i] * weights[i]).sum() for i in both), leaves, retain_graph=True
        )
        exactly = torch.autograd.grad(
            sum((due[i] * weights[i].double()).sum() for i in both), leaves, retain_graph=True
        )
        for one, other in zip(got, exactly, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_chunked")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sums_have_the_same_gradients_as_without(reduction):
    x, weight, target, bias = problem()
    plain = tiercel.linear_cross_entropy(x, weight, target, bias, reduction=reduction)
    loss, entropy = tiercel.linear_cross_entropy(
        x, weight, target, bias, reduction=reduction, return_entropy=True
    )
    assert torch.equal(loss, plain) and not entropy.requires_grad
    torch.testing.assert_close(
        entropy.double(), exact(x, weight, target, bias)[1], rtol=1e-5, atol=1e-5
    )
    given = (x, weight, bias)
    for one, other in zip(
        torch.autograd.grad(loss, given), torch.autograd.grad(plain, given), strict=True
    ):
        assert torch.equal(one, other)
    with torch.no_grad():
        again = tiercel.linear_cross_entropy(
            x, weight, target, bias, reduction=reduction, return_entropy=True
        )
    torch.testing.assert_close(again[0], loss)
    assert torch.equal(again[1], entropy)


def test_the_gradient_can_be_differentiated():
    x, weight, target, bias = problem()
    for function in (tiercel.linear_cross_entropy, tiercel.ref.linear_cross_entropy):

        def entropy(x, function=function):
            given = (x, weight, target, bias)
            return function(*given, reduction="none", return_entropy=True)[1].square().sum()

        (grad,) = torch.autograd.grad(entropy(x), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        if function is tiercel.linear_cross_entropy:
            found = second
    torch.testing.assert_close(found, second, rtol=1e-3, atol=1e-3)


def test_the_formula_in_float64():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    target, by = torch.tensor([1, -100, 3, 8]), torch.randn(4, dtype=torch.float64)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            ctx.save_for_backward(logits)
            entropy = reference.entropies(logits, target, softcap=3.0)
            return (reference.losses(logits, target, softcap=3.0) + entropy * by).sum()

        @staticmethod
        def backward(ctx, grad):
            (logits,) = ctx.saved_tensors
            found = reference.gradient(logits, target, softcap=3.0, entropy_scale=by)
            return grad * found

    assert torch.autograd.gradcheck(Function.apply, logits.requires_grad_())


def test_a_module_returns_both():
    x, weight, target, bias = problem(torch.bfloat16)
    module = tiercel.nn.LinearCrossEntropy(reduction="none", return_entropy=True)
    due = tiercel.linear_cross_entropy(
        x, weight, target, bias, reduction="none", return_entropy=True
    )
    for one, other in zip(module(x, weight, target, bias), due, strict=True):
        assert torch.equal(one, other)
    assert "return_entropy=True" in repr(module)


def test_one_graph():
    x, weight, target, bias = problem()

    def function(x):
        return tiercel.linear_cross_entropy(
            x, weight, target, bias, reduction="none", return_entropy=True
        )

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(sum(each.sum() for each in compiled(x)), x)
    due = torch.autograd.grad(sum(each.sum() for each in function(x)), x)
    assert torch.equal(got[0], due[0])


def test_no_row():
    x, weight, _, bias = problem()
    target = torch.zeros(0, dtype=torch.int64)
    loss, entropy = tiercel.linear_cross_entropy(x[:0], weight, target, bias, return_entropy=True)
    assert loss.isnan() and entropy.shape == (0,)


def test_what_is_not_supported():
    given = problem()
    with pytest.raises(ValueError, match="`label_smoothing` must be 0 with `return_entropy`, got"):
        tiercel.linear_cross_entropy(*given, label_smoothing=0.1, return_entropy=True)
    with pytest.raises(NotImplementedError, match="`return_entropy` is not supported with `group`"):
        tiercel.linear_cross_entropy(*given, group=object(), return_entropy=True)
