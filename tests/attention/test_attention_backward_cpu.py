# SPDX-License-Identifier: Apache-2.0
"""attention's gradients with PyTorch and without a GPU: reference, operators, the way taken."""

from importlib import import_module

import pytest
import torch

import tiercel
from tiercel.ops.attention import backward as operators
from tiercel.ops.attention import forward
from tiercel.ops.attention.reference import attention_backward as reference

pytestmark = pytest.mark.torch

OPTIONS = [{}, {"causal": True}, {"softcap": 2.0, "causal": True}, {"window": (3, 1)}]


def draw(seq_q=9, seq_k=9, heads=4, kv_heads=2, d=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, grad = rand(2, seq_q, heads, d), rand(2, seq_q, heads, d)
    return q, rand(2, seq_k, kv_heads, d), rand(2, seq_k, kv_heads, d), grad


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(9, 9), (5, 12), (12, 5)])
def test_the_reference_is_the_derivative(options, seq_q, seq_k):
    q, k, v, grad = draw(seq_q, seq_k)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tiercel.ref.attention(*leaves, return_lse=True, **options)
    grad_lse = torch.randn(lse.shape, dtype=torch.float64)
    finite = lse.masked_fill(lse.isinf(), 0.0)
    expected = torch.autograd.grad([out, finite], leaves, [grad, grad_lse])
    given = [x.detach() for x in (grad, q, k, v, out, lse)]
    found = reference(*given, grad_lse=grad_lse, **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def operator_arguments(**options):
    q, k, v, grad = draw(dtype=torch.bfloat16)
    out, lse = tiercel.ref.attention(q, k, v, return_lse=True, **options)
    return grad, q, k, v, out, lse


@pytest.mark.parametrize("options", OPTIONS)
def test_the_operators_on_ref(options):
    tensors = operator_arguments(**options)
    window = options.get("window")
    rest = (options.get("causal", False), window, None, options.get("softcap"), True, "ref")
    found = torch.ops.tiercel.attention_backward(*tensors, None, *rest)
    for one, other in zip(found, reference(*tensors, **options), strict=True):
        assert torch.equal(one, other)
    grad_lse = torch.randn(2, 4, 9)
    found = torch.ops.tiercel.attention_backward(*tensors, grad_lse, *rest)
    expected = reference(*tensors, grad_lse=grad_lse, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.fixture
def as_if_there_were_kernels(monkeypatch):
    """The gradient takes the operator, which runs the reference: (with grad_lse, deterministic)."""
    seen = []

    def spy(*args):
        seen.append((args[6] is not None, args[-2]))
        return operators.BACKWARD(*args[:-1], "ref")

    monkeypatch.setattr(forward, "has_kernels", lambda op, q, *_: q.shape[-1] <= 128)
    module = import_module("tiercel.ops.attention.attention")
    monkeypatch.setattr(module._ATTENTION, "backward", spy)
    return seen


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_gradients_through_the_operators(as_if_there_were_kernels, options, return_lse):
    q, k, v, grad = draw(dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    for tensors, run, gradient in (
        (leaves, tiercel.attention, grad),
        (doubles, tiercel.ref.attention, grad.double()),
    ):
        more = {"backend": "ref"} if run is tiercel.attention else {}
        out = run(*tensors, return_lse=return_lse, **options, **more)
        out, lse = out if return_lse else (out, None)
        if lse is None:
            out.backward(gradient)
        else:
            torch.autograd.backward([out, lse], [gradient, torch.ones_like(lse)])
    assert as_if_there_were_kernels == [(return_lse, False)]
    for tensor, double in zip(leaves, doubles, strict=True):
        assert (tensor.grad.double() - double.grad).norm() / double.grad.norm() < 2e-2


def test_a_fixed_order_is_torch_s_switch(as_if_there_were_kernels):
    q, k, v, grad = draw(dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        tiercel.attention(q.requires_grad_(), k, v, backend="ref").backward(grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert as_if_there_were_kernels == [(False, True)]
    assert k.grad is None


def test_only_the_logarithms_gradient(as_if_there_were_kernels):
    q, k, v, _ = draw(dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    tiercel.attention(*leaves, return_lse=True, backend="ref")[1].sum().backward()
    assert as_if_there_were_kernels == [(True, False)]
    assert (v.grad == 0).all() and (q.grad != 0).any()


def test_compile(as_if_there_were_kernels):
    q, k, v, grad = draw(dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def loss(*tensors):
        return (tiercel.attention(*tensors, causal=True, backend="ref") * grad).sum()

    loss(*leaves).backward()
    expected = [x.grad.clone() for x in leaves]
    for x in leaves:
        x.grad = None
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves).backward()
    for x, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(x.grad, gradient)


@pytest.mark.parametrize(
    ("sizes", "due"),
    [
        ((128, 128), True),
        ((8, 128), True),
        ((192, 136), True),
        ((256, 256), True),
        ((64, 4), False),
        ((100, 96), False),
        ((264, 256), False),
        ((64, 0), False),
    ],
)
@pytest.mark.parametrize("op", ["attention", "attention_varlen"])
def test_what_has_kernels(monkeypatch, op, sizes, due):
    monkeypatch.setattr(operators.platform, "why_not", lambda device: None)
    q, v = (torch.zeros(1, 1, d) for d in sizes)
    assert operators.has_kernels(op, q, v, None) is due
    assert operators.has_kernels(op, q, v, "ref") is False
    monkeypatch.setattr(operators.platform, "why_not", lambda device: "another GPU")
    assert operators.has_kernels(op, q, v, None) is False


def test_gradients_as_the_copy_engine_takes_them():
    one = torch.ones(1).expand(2, 9, 4, 16)
    assert operators._readable(one).is_contiguous()
    plain = torch.zeros(2, 9, 4, 16)
    assert operators._readable(plain) is plain
    heads_first = torch.zeros(2, 4, 9, 16).transpose(1, 2)
    assert operators._readable(heads_first) is heads_first
