# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain PyTorch: a token after the other, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

_NORM_EPS = 1e-6  # added to the sum of a head's squares


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All in float64 and of the values' heads: q with its factor, the decay for each channel."""
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + _NORM_EPS) for t in (q, k))
    size, heads = q.shape[-1], v.shape[2]
    q = q * (size**-0.5 if scale is None else scale)
    if q.shape[2]:
        q, k = (t.repeat_interleave(heads // t.shape[2], 2) for t in (q, k))
    decay = g.exp()
    return q, k, v, decay[..., None] if g.dim() == 3 else decay, beta


def _step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """A token of each sequence: the new states [B, H, K, V], and the results [B, H, V]."""
    state = state * decay[..., None]
    change = (v - torch.einsum("bhk,bhkv->bhv", k, state)) * beta[..., None]
    state = state + k[..., None] * change[..., None, :]
    return state, torch.einsum("bhk,bhkv->bhv", q, state)


def _run(state: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Goes through the tokens of [B, T, ...]: the last states, and the results [B, T, H, V]."""
    results = []
    for token in range(tensors[2].shape[1]):
        state, result = _step(state, *(t[:, token] for t in tensors))
        results.append(result)
    return state, torch.stack(results, 1) if results else torch.zeros_like(tensors[2])


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    output_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.gated_delta_rule`, on any device."""
    tensors = _inputs(q, k, v, g, beta, scale, qk_l2norm)
    tokens = v.shape[1]
    count = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (count, v.shape[2], q.shape[3], v.shape[3])
    state = torch.zeros(shape, dtype=torch.float64, device=v.device)
    if initial_state is not None:
        state = initial_state.double()
    if cu_seqlens is None:
        state, out = _run(state, tensors)
    else:
        starts = cu_seqlens.clamp(0, tokens).tolist()
        state, out = state.clone(), torch.zeros_like(tensors[2])
        for i, begin in enumerate(starts[:-1]):
            part = slice(begin, max(starts[i + 1], begin))
            state[i : i + 1], out[:, part] = _run(
                state[i : i + 1], tuple(t[:, part] for t in tensors)
            )
    made = out.to(v.dtype)
    return (made, state.float()) if output_final_state else made


def _step_back(
    after: Tensor,
    before: Tensor,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
) -> tuple[Tensor, ...]:
    """A token's gradients, of the state before it first, given that of the state after it."""
    decayed = before * decay[..., None]
    rest = v - torch.einsum("bhk,bhkv->bhv", k, decayed)
    change = rest * beta[..., None]
    of_q = torch.einsum("bhkv,bhv->bhk", decayed + k[..., None] * change[..., None, :], grad)
    after = after + q[..., None] * grad[..., None, :]
    of_change = torch.einsum("bhk,bhkv->bhv", k, after)
    of_rest = of_change * beta[..., None]
    of_k = torch.einsum("bhkv,bhv->bhk", after, change)
    of_k = of_k - torch.einsum("bhkv,bhv->bhk", decayed, of_rest)
    of_decayed = after - k[..., None] * of_rest[..., None, :]
    of_gates = (of_decayed * decayed).sum(-1)
    of_beta = (of_change * rest).sum(-1)
    return of_decayed * decay[..., None], of_q, of_k, of_rest, of_gates, of_beta


def _run_back(
    state: Tensor, after: Tensor, grad: Tensor, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Goes through the tokens of [B, T, ...] and back: the gradients of the states before them, and
    of q, k, v, gates by channels and beta."""
    states = [state]
    for token in range(grad.shape[1]):
        states.append(_step(states[-1], *(t[:, token] for t in tensors))[0])
    found = []
    for token in reversed(range(grad.shape[1])):
        inputs = (t[:, token] for t in tensors)
        after, *others = _step_back(after, states[token], grad[:, token], *inputs)
        found.append(others)
    if found:
        return after, [torch.stack(each[::-1], 1) for each in zip(*found, strict=True)]
    q, _, v, _, beta = tensors
    return after, [torch.zeros_like(t) for t in (q, q, v, q, beta)]


def _of_inputs(given: Tensor, of_wide: Tensor, scale: float, qk_l2norm: bool) -> Tensor:
    """The gradient of q or k, given that of what its heads of values have."""
    batch, tokens, heads, size = given.shape
    share = of_wide.shape[2] // max(heads, 1)
    grad = of_wide.view(batch, tokens, heads, share, size).sum(3) * scale
    if qk_l2norm:
        wide = given.double()
        factor = torch.rsqrt(wide.square().sum(-1, keepdim=True) + _NORM_EPS)
        unit = wide * factor
        grad = factor * (grad - unit * (unit * grad).sum(-1, keepdim=True))
    return grad.to(given.dtype)


def gated_delta_rule_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    grad_final: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, g, beta and the initial states; of none it is empty."""
    tensors = _inputs(q, k, v, g, beta, scale, qk_l2norm)
    tokens, size = v.shape[1], q.shape[3]
    count = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    zeros = torch.zeros((count, v.shape[2], size, v.shape[3]), dtype=torch.float64, device=v.device)
    state = zeros if initial_state is None else initial_state.double()
    after = zeros.clone() if grad_final is None else grad_final.double().clone()
    if cu_seqlens is None:
        after, found = _run_back(state, after, grad.double(), tensors)
    else:
        found = [torch.zeros_like(tensors[i]) for i in (0, 1, 2, 0, 4)]
        starts = cu_seqlens.clamp(0, tokens).tolist()
        for i, begin in enumerate(starts[:-1]):
            part, own = slice(begin, max(starts[i + 1], begin)), slice(i, i + 1)
            after[own], parts = _run_back(
                state[own], after[own], grad[:, part].double(), tuple(t[:, part] for t in tensors)
            )
            for whole, each in zip(found, parts, strict=True):
                whole[:, part] = each
    of_q, of_k, of_v, of_gates, of_beta = found
    factor = size**-0.5 if scale is None else scale
    return (
        _of_inputs(q, of_q, factor, qk_l2norm),
        _of_inputs(k, of_k, 1.0, qk_l2norm),
        of_v.to(v.dtype),
        (of_gates.sum(-1) if g.dim() == 3 else of_gates).to(g.dtype),
        of_beta.to(beta.dtype),
        after.new_zeros(0).float() if initial_state is None else after.to(initial_state.dtype),
    )


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    out: Tensor,
    state_indices: Tensor | None = None,
    accepted: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.gated_delta_rule_decode`; writes to `states` and `out`."""
    tensors = _inputs(q, k, v, g, beta, scale, qk_l2norm)
    (batch, tokens), slots = v.shape[:2], states.shape[0]
    if state_indices is None:
        state_indices = torch.arange(batch, device=v.device)
    chosen = state_indices.long()
    chosen = chosen[:, None] if chosen.dim() == 1 else chosen
    columns = chosen.shape[1]
    valid = (chosen >= 0) & (chosen < slots)
    first = torch.zeros(batch, dtype=torch.int64, device=v.device)
    if accepted is not None and columns > 1:
        first = (accepted.long() - 1).clamp(0, columns - 1)
    shape = (batch, *states.shape[1:])
    state = torch.zeros(shape, dtype=torch.float64, device=v.device)
    if slots and batch and columns:
        begin = chosen.gather(1, first[:, None])[:, 0].clamp(0, slots - 1)
        found = valid.gather(1, first[:, None])[:, 0]
        state = torch.where(found[:, None, None, None], states[begin].double(), 0.0)
    for token in range(tokens):
        state, results = _step(state, *(t[:, token] for t in tensors))
        out[:, token] = results.to(out.dtype)
        if columns > 1:
            kept = valid[:, token]
            states[chosen[kept, token]] = state[kept].to(states.dtype)
    if columns == 1 and tokens:
        kept = valid[:, 0]
        states[chosen[kept, 0]] = state[kept].to(states.dtype)
    return states, out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Reference of :func:`tiercel.gated_rms_norm`, on any device."""
    wide, opened = x.double(), torch.nn.functional.silu(gate.double())
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * factor * weight.double() * opened).to(x.dtype)
