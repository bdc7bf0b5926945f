# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d with PyTorch and without a GPU: reference, gradients, public functions."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def due(x, weight, bias=None, activation=None):
    """PyTorch's own."""
    padded = torch.nn.functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    out = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight))
    return (torch.nn.functional.silu(out) if activation else out).transpose(1, 2)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_it_is_a_convolution(width, activation):
    x, weight, bias = torch.randn(3, 9, 6), torch.randn(6, width), torch.randn(6)
    got = tiercel.causal_conv1d(x, weight, bias, activation=activation)
    torch.testing.assert_close(got, due(x, weight, bias, activation))
    out = torch.empty_like(x)
    assert tiercel.causal_conv1d(x, weight, bias, activation=activation, out=out) is out
    assert torch.equal(out, got)
    torch.testing.assert_close(tiercel.causal_conv1d(x[0], weight), due(x[:1], weight)[0])


def test_packed_sequences_are_apart():
    x, weight = torch.randn(20, 6), torch.randn(6, 4)
    starts = torch.tensor([2, 7, 7, 8, 18], dtype=torch.int32)
    got = tiercel.causal_conv1d(x, weight, cu_seqlens=starts)
    assert not got[:2].any() and not got[18:].any()
    for begin, end in ((2, 7), (7, 8), (8, 18)):
        torch.testing.assert_close(got[begin:end], due(x[None, begin:end], weight)[0])


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradients(activation):
    leaves = [torch.randn(*s, requires_grad=True) for s in ((2, 9, 4), (4, 3), (4,))]
    grad = torch.randn(2, 9, 4)
    out = tiercel.causal_conv1d(*leaves, activation=activation)
    got = torch.autograd.grad(out, leaves, grad)
    expected = torch.autograd.grad(due(*leaves, activation), leaves, grad)
    torch.testing.assert_close(got, expected)
    starts = torch.tensor([2, 4, 4, 8], dtype=torch.int32)
    x, weight = torch.randn(9, 4, requires_grad=True), leaves[1]
    out = tiercel.causal_conv1d(x, weight, activation=activation, cu_seqlens=starts)
    got = torch.autograd.grad(out.sum(), (x, weight))
    parts = [due(x[None, a:b], weight, None, activation).sum() for a, b in ((2, 4), (4, 8))]
    torch.testing.assert_close(got, torch.autograd.grad(sum(parts), (x, weight)))


def test_no_rows_have_gradients():
    x, weight = torch.randn(2, 0, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    tiercel.causal_conv1d(x, weight).sum().backward()
    assert x.grad.shape == (2, 0, 4) and not weight.grad.any()


@pytest.mark.parametrize("width", [2, 3, 4])
def test_parts_are_the_whole(width):
    x, weight = torch.randn(2, 12, 5), torch.randn(5, width)
    states = torch.full((4, width - 1, 5), float("nan"))
    slots, outs = torch.tensor([3, 1], dtype=torch.int32), []
    for i, part in enumerate(x.split([4, 1, 2, 5], dim=1)):
        part, flags = part.contiguous(), torch.tensor([i > 0, i > 0])
        outs.append(torch.empty_like(part))
        got = tiercel.causal_conv1d_update(
            part, states, weight, outs[-1], state_indices=slots, has_state=flags
        )
        assert got[0] is states and got[1] is outs[-1]
    torch.testing.assert_close(torch.cat(outs, 1), due(x, weight))
    assert torch.equal(states[[3, 1]], x[:, -(width - 1) :]) and states[[0, 2]].isnan().all()


def test_slots_that_are_none():
    x, weight, out = torch.randn(3, 1, 5), torch.randn(5, 3), torch.empty(3, 1, 5)
    states = torch.randn(2, 2, 5)
    slots = torch.tensor([-1, 1, 7], dtype=torch.int32)
    first = states.clone()
    tiercel.causal_conv1d_update(x, states, weight, out, state_indices=slots)
    torch.testing.assert_close(out[[0, 2]], x[[0, 2]] * weight[:, 2])
    assert torch.equal(states[0], first[0])
    assert torch.equal(states[1], torch.stack([first[1, 1], x[1, 0]]))


def test_bad_arguments():
    x, weight = torch.randn(2, 5, 8), torch.randn(8, 4)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="`weight` must have 2, 3 or 4 taps"):
        tiercel.causal_conv1d(x, torch.randn(8, 5))
    with pytest.raises(ValueError, match=r"`x` must have shape \[1, T, D\] with `cu_seqlens`"):
        tiercel.causal_conv1d(x, weight, cu_seqlens=starts)
    with pytest.raises(ValueError, match="`cu_seqlens` must have at least one element"):
        tiercel.causal_conv1d(x[0], weight, cu_seqlens=starts[:0])
    with pytest.raises(ValueError, match="`activation` must be 'silu'"):
        tiercel.causal_conv1d(x, weight, activation="gelu")
    states, out = torch.randn(4, 3, 8), torch.empty(2, 5, 8)
    with pytest.raises(ValueError, match="`x` must have 3 dimensions"):
        tiercel.causal_conv1d_update(x[0], states, weight, out[0])
    with pytest.raises(ValueError, match=r"`states` must have shape \[slots, W - 1, D\]"):
        tiercel.causal_conv1d_update(x, states[:, :2], weight, out)
    with pytest.raises(ValueError, match=r"`has_state` must have shape \[N\]"):
        tiercel.causal_conv1d_update(x, states, weight, out, has_state=torch.ones(3).bool())
