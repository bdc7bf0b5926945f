# SPDX-License-Identifier: Apache-2.0
"""fused_moe with gradients on the emulator, against float64: rows in the order of their experts,
grouped products between them."""

import pytest
import torch
from support.emulator import kernels, options, sm90
from support.experts import expert_data

from tiercel.ops.moe import reference as ref

pytestmark = pytest.mark.torch

ACTIVATIONS = ("silu", "gelu", "relu", "gelu_residual")
ALL = (True, True, True, True)


def exact(values, grad, activation, expert_map=None):
    wide = [v.double().requires_grad_() for v in values[:4]]
    out = ref.fused_moe(*wide, values[4], activation=activation, expert_map=expert_map)
    if not out.requires_grad:  # no token
        return out, [torch.zeros_like(v) for v in wide]
    return out.detach(), torch.autograd.grad(out, wide, grad.double(), materialize_grads=True)


def assert_near(got, due, dtype):
    """Asserts equality up to the roundings of values of that type in front of the result."""
    if got.numel() == 0:
        return
    size, unit = due.square().mean().sqrt(), torch.finfo(dtype).eps / 2
    assert (got.double() - due).square().mean().sqrt() <= 1.5 * unit * size + 1e-7
    assert (got.double() - due).abs().max() <= 8 * unit * due.abs().max() + 1e-6


def check(values, activation="silu", expert_map=None):
    x, *rest, ids = values
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    due_out, due = exact(values, grad, activation, expert_map)
    options = (activation, expert_map)
    out, pre, places, offsets = sm90("fused_moe_with_gradient")(*values, *options, None)
    assert_near(out, due_out, x.dtype)
    back, kept = sm90("fused_moe_backward"), pre.clone()
    found = back(x, grad, *rest, ids, pre, places, offsets, *options, *ALL, False, None)
    assert torch.equal(pre, kept)
    for got, exactly in zip(found, due, strict=True):
        assert got.shape == exactly.shape
        assert_near(got, exactly, x.dtype)
    again = back(x, grad, *rest, ids, None, None, None, *options, *ALL, False, None)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    in_place = back(x, grad, *rest, ids, pre, places, offsets, *options, *ALL, True, None)
    assert all(torch.equal(a, b) for a, b in zip(found, in_place, strict=True))
    assert pre.numel() == 0 or not torch.equal(pre, kept)
    return found, places, offsets


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, dtype):
    check(expert_data(20, 3, 2, 72, 40, dtype), activation)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_ids_of_no_expert_and_experts_of_no_token(index):
    *values, ids = expert_data(30, 4, 2, 72, 264)
    ids = torch.where(ids == 2, 0, ids).to(index)
    ids[3, 0], ids[4], ids[9, 1] = -1, 4, 2**31 - 1
    found, places, offsets = check((*values, ids))
    assert not found[1][2].any() and not found[2][2].any()
    none = (ids < 0) | (ids > 3)
    assert (places[none] == -1).all() and not found[3][none].any()
    due = ref._places(ids, 4, None)
    assert torch.equal(places, due[0]) and torch.equal(offsets, due[1])


def test_experts_elsewhere():
    expert_map = torch.tensor([2, -1, 0, 7, 1], dtype=torch.int32)
    values = expert_data(25, 3, 3, 64, 32, everywhere=5)
    _, places, offsets = check(values, expert_map=expert_map)
    due = ref._places(values[4], 3, expert_map)
    assert torch.equal(places, due[0]) and torch.equal(offsets, due[1])


def test_all_tokens_at_one_expert():
    *values, ids = expert_data(70, 3, 1, 136, 72)
    check((*values, ids * 0 + 1))


def test_few_and_many():
    check(expert_data(1, 5, 4, 8, 8))
    check(expert_data(3, 2, 2, 2056, 16), "gelu")  # a row of several blocks
    *values, ids = expert_data(0, 3, 2, 64, 32)
    found, _, offsets = check((*values, ids))
    assert not any(t.any() for t in found) and not offsets.any()


@pytest.mark.parametrize("lazy", [False, True])
def test_no_order_of_warps_matters(lazy):
    with options(lazy=lazy, seed=3):
        check(expert_data(40, 3, 2, 72, 136))


def test_a_gradient_that_is_one_number():
    x, *rest, ids = expert_data(12, 3, 2, 64, 32)
    back, grad = sm90("fused_moe_backward"), torch.ones(1, 1).bfloat16().expand(12, 64)
    more = (x, *rest, ids)
    found = [
        back(x, g, *rest, ids, None, None, None, "silu", None, *ALL, False, None)
        for g in (grad, grad.contiguous())
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert_near(found[0][0], exact(more, grad, "silu")[1][0], x.dtype)


@pytest.mark.parametrize("wanted", range(4))
def test_one_gradient(wanted):
    x, *rest, ids = expert_data(12, 3, 2, 64, 32)
    back, grad = sm90("fused_moe_backward"), torch.ones(12, 64).bfloat16()
    flags = [i == wanted for i in range(4)]
    every = back(x, grad, *rest, ids, None, None, None, "silu", None, *ALL, False, None)
    some = back(x, grad, *rest, ids, None, None, None, "silu", None, *flags, False, None)
    for i, (got, due) in enumerate(zip(some, every, strict=True)):
        assert torch.equal(got, due) if i == wanted else got.numel() == 0


def test_wrong_tensors():
    places = torch.zeros(4, 2, dtype=torch.int32)
    x, rows = torch.zeros(4, 64).bfloat16(), torch.zeros(8, 64).bfloat16()
    with pytest.raises(ValueError, match=r"fused_moe: `out` must have shape \[T \* k, H\] = \[8"):
        kernels.moe_spread(x, places, rows[:7])
    with pytest.raises(TypeError, match="fused_moe: `places` must have dtype int32"):
        kernels.moe_spread(x, places.long(), rows)
    with pytest.raises(NotImplementedError, match="fused_moe: `x` must have a multiple of 8"):
        kernels.moe_collect(rows[:, :60], places, None, x)
    with pytest.raises(NotImplementedError, match="`x` must have rows of neighbouring elements"):
        kernels.moe_spread(torch.zeros(4, 68).bfloat16()[:, :64], places, rows)
    with pytest.raises(ValueError, match=r"`topk_weights` must have shape \[T, k\] = \[4, 2\]"):
        kernels.moe_collect(rows, places, torch.ones(2, 2), x)
    with pytest.raises(ValueError, match=r"`inner` must have shape \[T \* k, I\] = \[8, 32\]"):
        kernels.moe_gate(rows, places, rows, 0)
    flat = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"`expert_ids` must have shape \[T \* k\] = \[8\]"):
        kernels.moe_places(flat, flat[:7], places, flat)
