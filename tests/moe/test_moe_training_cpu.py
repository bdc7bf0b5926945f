# SPDX-License-Identifier: Apache-2.0
"""The gradients of fused_moe with PyTorch and without a GPU."""

import pytest
import torch
import torch._dynamo.testing

import tiercel
from tiercel.ops.moe import reference as ref

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

ACTIVATIONS = ("silu", "gelu", "relu", "gelu_residual")
NAMES = ("x", "w_up", "w_down", "topk_weights")


def data(tokens=7, experts=4, k=2, hidden=16, inner=24, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    ids = torch.rand(tokens, experts, generator=generator).topk(k).indices.int()
    weights = torch.rand(tokens, k, generator=generator)
    x = random(tokens, hidden) * 4
    return x, random(experts, 2 * inner, hidden), random(experts, hidden, inner), weights, ids


def leaves(values):
    return [v.detach().clone().requires_grad_() for v in values[:4]]


def exact(values, grad, **options):
    """By PyTorch's autograd of the definition, in float64."""
    wide = [v.detach().double().requires_grad_() for v in values[:4]]
    out = ref.fused_moe(*wide, values[4], **options)
    found = torch.autograd.grad(out, wide, grad.double(), materialize_grads=True)
    return out.detach(), found


def by_public(values, grad, **options):
    inputs = leaves(values)
    out = tiercel.fused_moe(*inputs, values[4], **options)
    return out.detach(), torch.autograd.grad(out, inputs, grad)


def assert_near(got, due):
    for name, one, exactly in zip(("out", *NAMES), got, due, strict=True):
        size = exactly.square().mean().sqrt()
        error = (one.double() - exactly).square().mean().sqrt()
        assert error <= 2**-7 * size + 1e-7, (name, error, size)


MAP = torch.tensor([2, -1, 0, 3, 9, 1], dtype=torch.int32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("expert_map", [None, MAP])
def test_formulas_in_float64(activation, expert_map):
    """The operators' formulas equal autograd of the definition, with ids of no expert, too."""
    *values, ids = data(9, 4, 3)
    ids[0, 0], ids[3, 1], ids[5] = -1, 4 if expert_map is None else 6, 2
    if expert_map is not None:
        ids[7], ids[8, 0] = 1, 4
    wide = [v.double() for v in values]
    grad = torch.randn(wide[0].shape, dtype=torch.float64)
    options = {"activation": activation, "expert_map": expert_map}
    due = exact((*wide, ids), grad, **options)
    out, *saved = ref.fused_moe_with_gradient(*wide, ids, **options)
    torch.testing.assert_close(out, due[0])
    x, *rest = wide
    for given in (saved, ()):
        found = ref.fused_moe_backward(x, grad, *rest, ids, *given, **options)
        torch.testing.assert_close(found, due[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(activation, dtype):
    values = data(40, dtype=dtype)
    grad = torch.randn(values[0].shape).to(dtype)
    out, found = by_public(values, grad, activation=activation)
    due_out, due = exact(values, grad, activation=activation)
    assert [g.dtype for g in found] == [dtype, dtype, dtype, torch.float32]
    assert_near((out, *found), (due_out, *due))


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    *values, ids = data(6, 5)
    ids = torch.where(ids == 3, 0, ids)
    grad = torch.full(values[0].shape, torch.inf).bfloat16()
    grad[1:] = 1
    _, found = by_public((*values, ids), grad)
    assert not found[1][3].any() and not found[2][3].any()


def test_the_operator_s_own_gradient_makes_all_again():
    values = data()
    grad = torch.randn(values[0].shape).bfloat16()
    inputs = leaves(values)
    out = torch.ops.tiercel.fused_moe(*inputs, values[4])
    found = torch.autograd.grad(out, inputs, grad)
    torch.testing.assert_close(found, by_public(values, grad)[1], rtol=0, atol=0)


@pytest.mark.parametrize("wanted", range(4))
def test_one_gradient_is_that_of_all(wanted):
    values = data()
    grad = torch.randn(values[0].shape).bfloat16()
    _, due = by_public(values, grad)
    inputs = list(values)
    inputs[wanted] = inputs[wanted].clone().requires_grad_()
    (found,) = torch.autograd.grad(tiercel.fused_moe(*inputs), inputs[wanted], grad)
    assert torch.equal(found, due[wanted])


def test_only_the_first_product_is_kept():
    values = data(tokens=64)
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor
        return tensor

    inputs = leaves(values)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = tiercel.fused_moe(*inputs, values[4])
    given = {t.data_ptr() for t in (*inputs, values[4])}
    more = [t for at, t in kept.items() if at not in given]
    assert sorted(t.shape for t in more) == [(5,), (64, 2), (128, 48)]
    out.sum().backward()


def test_gradients_can_be_differentiated_again():
    values = data(dtype=torch.float16)
    inputs = leaves(values)
    out = tiercel.fused_moe(*inputs, values[4])
    (of_x,) = torch.autograd.grad(out.float().square().sum(), inputs[0], create_graph=True)
    again = torch.autograd.grad(of_x.float().sum(), inputs)
    wide = [v.double().requires_grad_() for v in values[:4]]
    out = ref.fused_moe(*wide, values[4])
    (of_x,) = torch.autograd.grad(out.square().sum(), wide[0], create_graph=True)
    due = torch.autograd.grad(of_x.sum(), wide)
    for got, exactly in zip(again, due, strict=True):
        assert (got.double() - exactly).abs().max() <= 2e-2 * exactly.abs().max()


def test_no_tokens():
    *values, ids = data()
    values[0], values[3], ids = values[0][:0], values[3][:0], ids[:0]
    out, found = by_public((*values, ids), values[0])
    assert out.shape == (0, 16) and not any(g.any() for g in found)


def test_float8_weights_have_none():
    x, w_up, w_down, weights, ids = data(hidden=32)
    narrow = [w.to(torch.float8_e4m3fn) for w in (w_up, w_down)]
    scales = {"w_up_scale": torch.ones(4, 1), "w_down_scale": torch.ones(4, 1)}
    with pytest.raises(RuntimeError, match="^fused_moe: there is no derivative with float8"):
        tiercel.fused_moe(x.requires_grad_(), *narrow, weights, ids, **scales)


def test_autocast():
    values = data(dtype=torch.float32)
    inputs = leaves(values)
    with torch.autocast("cpu", torch.bfloat16):
        out = tiercel.fused_moe(*inputs, values[4])
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(g.dtype == torch.float32 for g in found)
    _, due = exact(values, torch.ones_like(out))
    for got, exactly in zip(found, due, strict=True):
        error = (got.double() - exactly).square().mean().sqrt()
        assert error <= 2**-6 * exactly.square().mean().sqrt()


def test_one_graph_for_any_number_of_tokens():
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(x, w_up, w_down, weights, ids):
        return tiercel.fused_moe(x, w_up, w_down, weights, ids).float().square().sum()

    compiled = torch.compile(step, backend=counted, fullgraph=True, dynamic=True)
    for tokens in (5, 9, 33):
        values = data(tokens)
        for function in (step, compiled):
            inputs = leaves(values)
            function(*inputs, values[4]).backward()
            grads = [t.grad for t in inputs]
            if function is step:
                due = grads
        torch.testing.assert_close(grads, due, rtol=2**-6, atol=2**-6)
    assert counted.frame_count == 1
