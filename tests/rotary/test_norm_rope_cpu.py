# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope and its gradients with PyTorch and without a GPU."""

import pytest
import torch

import tiercel
from tiercel.ops.rotary import reference

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def make(tokens=5, heads=4, kv_heads=2, size=16, rotated=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    angles = torch.rand(20, rotated // 2, generator=generator) * 6
    return {
        "q": torch.randn(tokens, heads, size, generator=generator).to(dtype),
        "k": torch.randn(tokens, kv_heads, size, generator=generator).to(dtype),
        "positions": torch.randint(20, (tokens,), generator=generator),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1),
        "q_weight": torch.rand(size, generator=generator) + 0.5,
        "k_weight": (torch.rand(size, generator=generator) + 0.5).to(dtype),
    }


def leaves(given, names=("q", "k", "q_weight", "k_weight")):
    return given | {name: given[name].clone().requires_grad_() for name in names}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [16, 8, 0])
@pytest.mark.parametrize("normed", [False, True])
def test_as_its_two_steps(normed, rotated, interleaved):
    """In float32 they round nothing between them."""
    given = make(rotated=rotated)
    if not normed:
        given |= {"q_weight": None, "k_weight": None}
    q, k = given["q"].float(), given["k"].float()
    if normed:
        q = tiercel.rms_norm(q, given["q_weight"], eps=1e-5)
        k = tiercel.rms_norm(k, given["k_weight"].float(), eps=1e-5)
    rest = (given["positions"], q, k, given["cos_sin_cache"])
    due = tiercel.rotary_embedding(*rest, interleaved=interleaved)
    got = tiercel.qk_norm_rope(**given, eps=1e-5, interleaved=interleaved)
    for one, exact in zip(got, due, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, exact.bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [16, 8, 0])
@pytest.mark.parametrize("missing", [(), ("q_weight",), ("k_weight",), ("q_weight", "k_weight")])
def test_the_gradients_formulas(missing, rotated, interleaved):
    """torch.autograd.gradcheck of the backward's formulas, in float64."""
    given = {
        n: t.double() if t.is_floating_point() else t for n, t in make(3, 2, 1, 16, rotated).items()
    }
    given |= dict.fromkeys(missing)
    names = [n for n in ("q", "k", "q_weight", "k_weight") if n not in missing]
    options = {"eps": 1e-5, "interleaved": interleaved}

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return reference.qk_norm_rope(
                **given | dict(zip(names, tensors, strict=True)), **options
            )

        @staticmethod
        def backward(ctx, *grads):
            now = given | dict(zip(names, ctx.saved_tensors, strict=True))
            q, k = now.pop("q"), now.pop("k")
            found = reference.qk_norm_rope_backward(q, k, *grads, **now, **options)
            by_name = dict(zip(("q", "k", "q_weight", "k_weight"), found, strict=True))
            return tuple(by_name[name] for name in names)

    tensors = [given[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(Function.apply, tensors)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved):
    given = leaves(make())
    out = tiercel.qk_norm_rope(**given, interleaved=interleaved)
    grads = [torch.randn(each.shape).to(each.dtype) for each in out]
    torch.autograd.backward(out, grads)
    wide = {n: t.detach().double() if t.is_floating_point() else t for n, t in given.items()}
    wide = leaves(wide)
    due = reference.qk_norm_rope(**wide, interleaved=interleaved)
    torch.autograd.backward(due, [g.double() for g in grads])
    for name in ("q", "k", "q_weight", "k_weight"):
        got, exact = given[name].grad, wide[name].grad
        assert got.dtype == given[name].dtype
        rtol = 2**-7 if got.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=1e-4)


def test_one_result_alone_has_a_gradient():
    both, one = leaves(make()), leaves(make())
    q_out, k_out = tiercel.qk_norm_rope(**both)
    (q_out.float().square().sum() + 0 * k_out.float().sum()).backward()
    tiercel.qk_norm_rope(**one)[0].float().square().sum().backward()
    assert torch.equal(one["q"].grad, both["q"].grad)
    assert torch.equal(one["q_weight"].grad, both["q_weight"].grad)
    assert one["k"].grad is None
    assert one["k_weight"].grad is None or not one["k_weight"].grad.any()


def test_frozen_weights():
    given = leaves(make(), ("q",))
    tiercel.qk_norm_rope(**given)[0].float().sum().backward()
    assert given["q"].grad is not None and given["q_weight"].grad is None


def test_the_gradient_can_be_differentiated():
    given = {n: t.double() if t.is_floating_point() else t for n, t in make(2, 1, 1).items()}
    narrow = leaves(make(2, 1, 1))
    (found,) = torch.autograd.grad(
        tiercel.qk_norm_rope(**narrow)[0].float().square().sum(), narrow["q"], create_graph=True
    )
    (second,) = torch.autograd.grad(found.float().square().sum(), narrow["q"])
    wide = leaves(given)
    (due,) = torch.autograd.grad(
        reference.qk_norm_rope(**wide)[0].square().sum(), wide["q"], create_graph=True
    )
    (due,) = torch.autograd.grad(due.square().sum(), wide["q"])
    torch.testing.assert_close(second.double(), due, rtol=0.1, atol=0.1 * due.abs().max().item())


def test_parts_of_one_projection_and_an_expanded_gradient():
    packed = torch.randn(5, 8, 16).bfloat16().requires_grad_()
    rest = {n: t for n, t in make().items() if n not in "qk"}
    q, k, v = packed.split([4, 2, 2], dim=1)
    q, k = tiercel.qk_norm_rope(q, k, **rest)
    (q.sum() + k.sum() + v.sum()).backward()
    assert packed.grad.shape == packed.shape and (packed.grad[:, 6:] == 1).all()


def test_out():
    given = make()
    out = torch.empty_like(given["q"]), torch.empty_like(given["k"])
    got = tiercel.qk_norm_rope(**given, out=out)
    assert got[0] is out[0] and got[1] is out[1]
    for one, due in zip(out, tiercel.qk_norm_rope(**given), strict=True):
        assert torch.equal(one, due)


def test_one_graph_with_gradients():
    given, due = leaves(make()), leaves(make())

    def loss(q, k, rest):
        q, k = tiercel.qk_norm_rope(q, k, **rest)
        return q.float().square().sum() + k.float().sum()

    for one, function in (
        (given, torch.compile(loss, backend="aot_eager", fullgraph=True)),
        (due, loss),
    ):
        function(one["q"], one["k"], {n: t for n, t in one.items() if n not in "qk"}).backward()
    for name in ("q", "k", "q_weight", "k_weight"):
        assert torch.equal(given[name].grad, due[name].grad)


BAD = [
    ({"cos_sin_cache": torch.zeros(9, 18)}, "`cos_sin_cache` must have an even second"),
    ({"cos_sin_cache": torch.zeros(0, 8)}, "`cos_sin_cache` must have at least one row"),
    ({"q_weight": torch.zeros(8)}, "`q_weight` must have shape [D] = [16], got [8]"),
    ({"eps": -1.0}, "`eps` must not be negative, got -1.0"),
]


@pytest.mark.parametrize(("changes", "text"), BAD)
def test_bad_arguments_are_named(changes, text):
    with pytest.raises(ValueError) as info:
        tiercel.qk_norm_rope(**make() | changes)
    assert str(info.value).startswith(f"qk_norm_rope: {text}")
