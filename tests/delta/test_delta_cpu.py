# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule with PyTorch and without a GPU: reference, public functions."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def problem(batch=2, tokens=5, heads=(1, 2), sizes=(8, 4), channels=False):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = (random(batch, tokens, heads[0], sizes[0]).bfloat16() for _ in range(2))
    v = random(batch, tokens, heads[1], sizes[1]).bfloat16()
    g = -random(*v.shape[:3], *([sizes[0]] if channels else [])).abs()
    return q, k, v, g, random(*v.shape[:3]).sigmoid()


def recurrence(q, k, v, g, beta, state, scale):
    """One head of one sequence, by matrices."""
    out = torch.zeros(v.shape, dtype=torch.float64)
    for t in range(len(v)):
        state = state * g[t].double().exp().reshape(-1, 1)
        key = k[t].double()
        erase = torch.eye(len(key)).double() - beta[t].double() * torch.outer(key, key)
        state = erase @ state + beta[t].double() * torch.outer(key, v[t].double())
        out[t] = scale * q[t].double() @ state
    return out, state


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("l2norm", [False, True])
def test_it_is_the_recurrence(l2norm, channels):
    q, k, v, g, beta = problem(channels=channels)
    initial = torch.randn(2, 2, 8, 4)
    out, state = tiercel.gated_delta_rule(
        *(q, k, v, g, beta),
        initial_state=initial,
        output_final_state=True,
        qk_l2norm=l2norm,
    )
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    if l2norm:
        q, k = (torch.nn.functional.normalize(t.double(), dim=-1, eps=1e-3) for t in (q, k))
    for b in range(2):
        for h in range(2):
            given = (q[b, :, 0], k[b, :, 0], v[b, :, h], g[b, :, h], beta[b, :, h])
            due, last = recurrence(*given, initial[b, h].double(), 8**-0.5)
            torch.testing.assert_close(out[b, :, h].double(), due, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(state[b, h].double(), last, rtol=1e-4, atol=1e-5)


def test_packed_sequences_are_apart():
    given = problem(1, 12)
    starts = torch.tensor([1, 4, 4, 9], dtype=torch.int32)
    out, state = tiercel.gated_delta_rule(*given, cu_seqlens=starts, output_final_state=True)
    assert not out[:, :1].any() and not out[:, 9:].any() and not state[1].any()
    for i, (begin, end) in enumerate(((1, 4), (4, 4), (4, 9))):
        part = [t[:, begin:end] for t in given]
        alone, last = tiercel.gated_delta_rule(*part, output_final_state=True)
        assert torch.equal(out[:, begin:end], alone) and torch.equal(state[i : i + 1], last)


@pytest.mark.parametrize("channels", [False, True])
def test_steps_go_on_where_a_prompt_ends(channels):
    given = problem(2, 6, channels=channels)
    due, last = tiercel.gated_delta_rule(*given, output_final_state=True, scale=0.3)
    first = [t[:, :3] for t in given]
    out, state = tiercel.gated_delta_rule(*first, output_final_state=True, scale=0.3)
    pool, slots = torch.zeros(5, 2, 8, 4), torch.tensor([4, 1], dtype=torch.int32)
    pool[slots.long()] = state
    rest, made = [t[:, 3:] for t in given], torch.empty(2, 3, 2, 4).bfloat16()
    got = tiercel.gated_delta_rule_decode(*rest, pool, made, slots, scale=0.3)
    assert got[0] is pool and got[1] is made
    torch.testing.assert_close(torch.cat([out, made], 1), due)
    torch.testing.assert_close(pool[slots.long()], last)
    assert not pool[[0, 2, 3]].any()


def test_states_of_each_token_to_roll_back_to():
    given, pool = problem(2, 3), torch.randn(6, 2, 8, 4)
    slots = torch.tensor([[0, 2, 4], [5, 3, -1]], dtype=torch.int32)
    accepted = torch.tensor([2, 9], dtype=torch.int32)
    first, out = pool.clone(), torch.empty_like(given[2])
    tiercel.gated_delta_rule_decode(*given, pool, out, slots, accepted=accepted)
    zero = torch.zeros(2, 8, 4)
    state, alone = torch.stack([first[2], zero]), torch.empty(2, 1, 2, 4).bfloat16()
    for token in range(3):
        part = [t[:, token : token + 1] for t in given]
        tiercel.gated_delta_rule_decode(*part, state, alone)
        torch.testing.assert_close(out[:, token], alone[:, 0])
        for b in range(2):
            if slots[b, token] >= 0:
                torch.testing.assert_close(pool[slots[b, token]], state[b])
    assert torch.equal(pool[1], first[1])


def test_bad_arguments():
    q, k, v, g, beta = problem()
    states, out = torch.zeros(3, 2, 8, 4), torch.empty_like(v)
    with pytest.raises(ValueError, match="`v` must have a number of heads that is a multiple"):
        tiercel.gated_delta_rule(q.repeat(1, 1, 3, 1), k.repeat(1, 1, 3, 1), v, g, beta)
    with pytest.raises(ValueError, match="`g` must have shape"):
        tiercel.gated_delta_rule(q, k, v, g[:, :3], beta)
    with pytest.raises(ValueError, match="`q` must have a batch of 1 with `cu_seqlens`"):
        tiercel.gated_delta_rule(q, k, v, g, beta, cu_seqlens=torch.zeros(3).int())
    with pytest.raises(ValueError, match="`cu_seqlens` must have at least one element"):
        tiercel.gated_delta_rule(*problem(1), cu_seqlens=torch.zeros(0).int())
    with pytest.raises(TypeError, match="`output_final_state` must be a bool, got int"):
        tiercel.gated_delta_rule(q, k, v, g, beta, output_final_state=1)
    for shape in ((3,), (2, 2), (2, 5, 1)):
        with pytest.raises(ValueError, match="`state_indices` must have shape"):
            tiercel.gated_delta_rule_decode(
                *(q, k, v, g, beta), states, out, torch.zeros(*shape).int()
            )


def test_gradients_of_steps_are_refused():
    q, *rest = problem(2, 1)
    states, out = torch.zeros(2, 2, 8, 4), torch.empty_like(rest[1])
    with pytest.raises(RuntimeError, match="gated_delta_rule"):
        tiercel.gated_delta_rule_decode(q.requires_grad_(), *rest, states, out)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("l2norm", [False, True])
def test_gradients(l2norm, channels):
    """Those of the recurrence by matrices, in float64."""
    inputs = [t.requires_grad_() for t in problem(channels=channels)]
    initial = torch.randn(2, 2, 8, 4).requires_grad_()
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(2, 5, 2, 4, generator=generator).bfloat16()
    grad_state = torch.randn(2, 2, 8, 4, generator=generator)
    out, state = tiercel.gated_delta_rule(
        *inputs, initial_state=initial, output_final_state=True, qk_l2norm=l2norm
    )
    torch.autograd.backward([out, state], [grad, grad_state])
    wide = [t.detach().double().requires_grad_() for t in (*inputs, initial)]
    q, k, v, g, beta, first = wide
    if l2norm:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    total = 0.0
    for b in range(2):
        for h in range(2):
            state, results = first[b, h], []
            for t in range(5):
                state = state * g[b, t, h].exp().reshape(-1, 1)
                key = k[b, t, 0]
                change = beta[b, t, h] * (v[b, t, h] - key @ state)
                state = state + torch.outer(key, change)
                results.append(8**-0.5 * q[b, t, 0] @ state)
            total = total + (torch.stack(results) * grad[b, :, h].double()).sum()
            total = total + (state * grad_state[b, h].double()).sum()
    total.backward()
    for given, due in zip((*inputs, initial), wide, strict=True):
        assert given.grad.dtype == given.dtype
        step = 1e-2 if given.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(given.grad.double(), due.grad, rtol=step, atol=step)


def test_gradients_of_packed_sequences_and_of_one_result():
    starts = torch.tensor([1, 4, 4, 9], dtype=torch.int32)
    inputs = [t.requires_grad_() for t in problem(1, 12)]
    _, state = tiercel.gated_delta_rule(*inputs, cu_seqlens=starts, output_final_state=True)
    state.sum().backward()
    assert not inputs[0].grad.any() and inputs[2].grad[:, 1:9].any()
    for each in inputs:
        assert not each.grad[:, :1].any() and not each.grad[:, 9:].any()
    alone = [t.detach()[:, 4:9].requires_grad_() for t in inputs]
    tiercel.gated_delta_rule(*alone, output_final_state=True)[1].sum().backward()
    for each, other in zip(inputs, alone, strict=True):
        torch.testing.assert_close(each.grad[:, 4:9], other.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_norm(dtype):
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(3, 4, 16, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(16, generator=generator)
    wide = x.double()
    due = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    due = due * gate.double() / (1 + (-gate.double()).exp())
    got = tiercel.gated_rms_norm(x, gate, weight)
    torch.testing.assert_close(got.double(), due, rtol=1e-2, atol=1e-5)
    made = torch.empty_like(x)
    assert tiercel.gated_rms_norm(x, gate, weight, out=made) is made and torch.equal(made, got)


def test_gradients_of_the_gated_norm():
    generator = torch.Generator().manual_seed(0)
    x, gate, grad = (torch.randn(5, 3, 8, generator=generator).half() for _ in range(3))
    weight = torch.randn(8, generator=generator)
    inputs = [t.requires_grad_() for t in (x, gate, weight)]
    tiercel.gated_rms_norm(*inputs).backward(grad)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    normed = wide[0] * torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + 1e-6)
    (normed * wide[2] * torch.nn.functional.silu(wide[1])).backward(grad.double())
    for given, due in zip(inputs, wide, strict=True):
        assert given.grad.dtype == given.dtype
        torch.testing.assert_close(given.grad.double(), due.grad, rtol=2e-3, atol=2e-3)
