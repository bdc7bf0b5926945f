# SPDX-License-Identifier: Apache-2.0
"""Sampling in plain PyTorch: float64 arithmetic on differences of logits in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

_LOW = 2**32 - 1
_LEAST_SCALE, _MOST_SCALE = 1e-30, 1e30


def philox(seed: Tensor, offset: Tensor, stream: Tensor) -> Tensor:
    """64 random bits as int64: the first two words of Philox4x32-10."""
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    c0, c1 = offset & _LOW, offset >> 32 & _LOW
    c2, c3 = stream & _LOW, stream >> 32 & _LOW
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # int64 wraps around to the right bits
        c0, c1 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW
        c2, c3 = (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return c1 << 32 | c0


def uniform(seed: Tensor, offset: Tensor, stream: Tensor) -> Tensor:
    """float64 in [0, 1)."""
    bits = philox(seed, offset, stream)
    return (bits >> 11 & (2**53 - 1)).double() * 2.0**-53


def _bits(mask: Tensor, count: int) -> Tensor:
    """A mask of int32 words as bools."""
    places = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask[:, :, None] >> places & 1).flatten(1)[:, :count].bool()


def penalised(
    logits: Tensor,
    counts: Tensor | None,
    prompt: Tensor | None,
    allowed: Tensor | None,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """The logits after penalties and mask."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    seen = torch.zeros_like(x, dtype=torch.bool)
    if counts is not None:
        seen = seen | (counts > 0)
    if prompt is not None:
        seen = seen | _bits(prompt, x.shape[1])
    if counts is not None or prompt is not None:
        factor = torch.where(x > 0, 1 / repetition[:, None], repetition[:, None])
        x = torch.where(seen, x * factor.to(x.dtype), x)
    if counts is not None:
        less = x - frequency[:, None] * counts.to(x.dtype) - presence[:, None]
        x = torch.where(counts > 0, less, x)
    if allowed is not None:
        x = torch.where(_bits(allowed, x.shape[1]), x, -math.inf)
    return x


def kept_weights(
    x: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The weights, float64, of the tokens that the filters keep, and 0 of the others."""
    largest = x.amax(-1, keepdim=True)
    d = torch.where(x == largest, 0.0, largest - x)
    scale = (math.log2(math.e) / temperature).clamp(_LEAST_SCALE, _MOST_SCALE)[:, None].double()
    weights = torch.exp2(-d.double() * scale)
    limited = min_p > 0
    limit = -torch.log2(min_p.clamp(max=1.0))[:, None].double() / scale
    weights = torch.where(limited[:, None] & (d.double() > limit), 0.0, weights)
    # Weights of 2^-32 of the largest and less are none where a filter is on.
    count = x.shape[1]
    by_count = (top_k > 0) & (top_k < count)
    by_mass = top_p < 1
    filters = (limited | by_count | by_mass)[:, None]
    weights = torch.where(filters & (d.double() * scale > 32), 0.0, weights)
    if not bool((by_count | by_mass).any()):
        return weights
    ordered, order = d.sort(-1)
    place = torch.where(by_count, top_k.long(), count)[:, None] - 1
    bound = ordered.gather(1, place)
    weights = torch.where(d <= bound, weights, 0.0)
    running = weights.gather(1, order).cumsum(-1)
    target = torch.where(by_mass, top_p.double().clamp(min=0.0), 1.0)[:, None] * running[:, -1:]
    place = (running < target).sum(-1, keepdim=True).clamp(max=count - 1)
    bound = torch.where(by_mass[:, None], ordered.gather(1, place), math.inf)
    return torch.where(d <= bound, weights, 0.0)


def _drawn(x: Tensor, filters: tuple[Tensor, ...], u: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, -1 where there is none, and the probabilities they were drawn from, 0 of greedy
    rows."""
    temperatures, *others = filters
    greedy = ~(temperatures > 0)
    weights = kept_weights(x, torch.where(greedy, 1.0, temperatures), *others)
    running = weights.cumsum(-1)
    place = torch.arange(x.shape[1], device=x.device)
    beyond = (running > u[:, None] * running[:, -1:]) & (weights > 0)
    largest = x.amax(-1, keepdim=True)
    chosen = torch.where(greedy[:, None], x == largest, beyond)
    tokens = torch.where(chosen, place, x.shape[1]).amin(-1)
    valid = (largest[:, 0] > -math.inf) & (tokens < x.shape[1])  # a NaN is not larger
    probabilities = weights / running[:, -1:]
    probabilities = torch.where((valid & ~greedy)[:, None], probabilities, 0.0)
    return torch.where(valid, tokens, -1), probabilities


def _top_logprobs(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k tokens with the largest logits, ties by lowest index, and their log-probabilities."""
    order = (x + 0.0).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    logits = x.gather(1, order)
    logprobs = torch.log_softmax(x.double(), -1).gather(1, order)
    tokens = torch.where(logits > -math.inf, order, -1)
    logprobs = torch.where(logits > -math.inf, logprobs, -math.inf)
    valid = (x.amax(-1, keepdim=True) > -math.inf).expand(-1, k)
    rest = (0, k - order.shape[1])
    tokens, logprobs = pad(tokens, rest, value=-1), pad(logprobs, rest, value=-math.inf)
    return torch.where(valid, tokens, -1), torch.where(valid, logprobs, math.nan).float()


def sample(
    logits: Tensor,
    temperatures: Tensor | None = None,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
    repetition_penalties: Tensor | None = None,
    presence_penalties: Tensor | None = None,
    frequency_penalties: Tensor | None = None,
    counts: Tensor | None = None,
    prompt: Tensor | None = None,
    allowed: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    repetition_penalty: float | Tensor = 1.0,
    presence_penalty: float | Tensor = 0.0,
    frequency_penalty: float | Tensor = 0.0,
    indices_dtype: torch.dtype = torch.int32,
    top_logprobs: int = 0,
    return_logprobs: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Reference of :func:`tiercel.sample`, on any device."""
    rows, device = len(logits), logits.device

    def of_rows(
        given: Tensor | None, number: float | Tensor, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        if given is not None:
            return given
        if isinstance(number, Tensor):
            return number
        return torch.full((rows,), number, dtype=dtype, device=device)

    x = penalised(
        logits,
        counts,
        prompt,
        allowed,
        of_rows(repetition_penalties, repetition_penalty),
        of_rows(presence_penalties, presence_penalty),
        of_rows(frequency_penalties, frequency_penalty),
    )
    filters = (
        of_rows(temperatures, temperature),
        of_rows(top_ks, top_k, torch.int64),
        of_rows(top_ps, top_p),
        of_rows(min_ps, min_p),
    )
    stream = torch.arange(rows, device=device)
    u = uniform(
        of_rows(seeds, seed, torch.int64),
        of_rows(offsets, offset, torch.int64),
        stream if seeds is None and not isinstance(seed, Tensor) else torch.zeros_like(stream),
    )
    tokens, _ = _drawn(x, filters, u)
    results = tokens.to(indices_dtype)
    if not (return_logprobs or top_logprobs):
        return results
    logprobs = torch.log_softmax(x.double(), -1).gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    logprobs = torch.where(tokens >= 0, logprobs, math.nan).float()
    if not top_logprobs:
        return results, logprobs
    best, of_best = _top_logprobs(x, top_logprobs)
    return results, logprobs, best.to(indices_dtype), of_best


_TO_ACCEPT, _TO_REPLACE = 2**62, -(2**63)


def _positions(
    logits: Tensor, *given: tuple[Tensor | None, float | Tensor]
) -> tuple[Tensor, Tensor, Callable[[int], Tensor]]:
    """The tokens drawn at each sequence's positions, the probabilities they were drawn from, and
    a function of other random numbers. `given`: parameters as tensors of the sequences or
    numbers."""
    sequences, positions, count = logits.shape
    device = logits.device

    def each(parameter: tuple[Tensor | None, float | Tensor], dtype: torch.dtype) -> Tensor:
        """A value for each position."""
        rows, number = parameter
        if rows is None and isinstance(number, Tensor):
            rows = number
        if rows is None:
            rows = torch.full((sequences,), number, dtype=dtype, device=device)
        return rows.repeat_interleave(positions)

    kinds = (torch.float32, torch.int64, torch.float32, torch.float32, torch.int64, torch.int64)
    *filters, key, counter = map(each, given, kinds)
    of_sequences = any(isinstance(seed, Tensor) for seed in given[4])
    place = torch.arange(sequences * positions, device=device)
    stream = torch.zeros_like(place) if of_sequences else place // positions
    counter = counter + place % positions
    x = logits.reshape(sequences * positions, count)
    x = x if x.dtype == torch.float64 else x.float()
    drawn, p = _drawn(x, tuple(filters), uniform(key, counter, stream))

    def uniforms(other: int) -> Tensor:
        return uniform(key, counter, stream ^ other).view(sequences, positions)

    return drawn.view(sequences, positions), p.view(sequences, positions, count), uniforms


def verify_draft(
    draft_tokens: Tensor,
    logits: Tensor,
    draft_probs: Tensor | None = None,
    temperatures: Tensor | None = None,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.verify_draft`, on any device."""
    sequences, positions, count = logits.shape
    device = logits.device
    drawn, p, uniforms = _positions(
        logits,
        (temperatures, temperature),
        (top_ks, top_k),
        (top_ps, top_p),
        (min_ps, min_p),
        (seeds, seed),
        (offsets, offset),
    )
    draft = draft_tokens.long()
    accept = (draft >= 0) & (draft == drawn[:, :-1])
    new = drawn
    if draft_probs is not None:
        inside = (draft >= 0) & (draft < count)
        at = draft.clamp(0, count - 1)[..., None]
        u = uniforms(_TO_ACCEPT)[:, :-1]
        q = draft_probs.double()
        taken = inside & (u * q.gather(-1, at)[..., 0] < p[:, :-1].gather(-1, at)[..., 0])
        by_chance = p[:, :-1].sum(-1) > 0
        accept = torch.where(by_chance, taken, accept)
        running = (p[:, :-1] - q).clamp(min=0).cumsum(-1)
        v = uniforms(_TO_REPLACE)[:, :-1, None]
        other = (running <= v * running[..., -1:]).sum(-1)
        use = by_chance & (running[..., -1] > 0)
        new = torch.cat([torch.where(use, other, drawn[:, :-1]), drawn[:, -1:]], 1)
    accepted = accept.int().cumprod(-1).sum(-1)
    i = torch.arange(positions, device=device)
    draft = torch.cat([draft, draft.new_zeros(sequences, 1)], 1)
    tokens = torch.where(i < accepted[:, None], draft, -1)
    tokens = torch.where(i == accepted[:, None], new, tokens)
    return tokens.to(draft_tokens.dtype), accepted.int()


def verify_tree(
    draft_tokens: Tensor,
    logits: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None = None,
    temperatures: Tensor | None = None,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of :func:`tiercel.verify_draft` with `parents`, on any device."""
    drawn, p, uniforms = _positions(
        logits,
        (temperatures, temperature),
        (top_ks, top_k),
        (top_ps, top_p),
        (min_ps, min_p),
        (seeds, seed),
        (offsets, offset),
    )
    sequences, nodes = draft_tokens.shape
    count, device = logits.shape[2], logits.device
    every = torch.arange(sequences, device=device)
    to_accept, to_replace = uniforms(_TO_ACCEPT), uniforms(_TO_REPLACE)
    at = torch.zeros_like(every)  # the row of the node that each path has come to
    depth = torch.zeros_like(every)
    left = p[:, 0]  # what the rejected children leave
    rejected = torch.zeros_like(every, dtype=torch.bool)
    tokens = torch.full((sequences, nodes + 1), -1, dtype=torch.int64, device=device)
    path = torch.full((sequences, nodes + 1), -1, dtype=torch.int64, device=device)
    for node in range(nodes):
        token = draft_tokens[:, node].long()
        chance = p[every, at].sum(-1) > 0
        accept = (token >= 0) & (token == drawn[every, at])
        if draft_probs is None:
            chance = torch.zeros_like(chance)
        else:
            q = draft_probs[:, node].double()
            place = token.clamp(0, count - 1)
            inside = (token >= 0) & (token < count)
            u = to_accept[:, node]
            taken = inside & (u * q[every, place] < left[every, place])
            accept = torch.where(chance, taken, accept)
            rest = (left - q).clamp(min=0)
            mass = rest.sum(-1, keepdim=True)
            rest = torch.where(mass > 0, rest / mass, 0.0)
        child = parents[:, node] == at - 1
        accept, reject = child & accept, child & ~accept & chance
        if draft_probs is not None:
            left = torch.where(reject[:, None], rest, left)
        tokens[every, depth] = torch.where(accept, token, tokens[every, depth])
        path[every, depth] = torch.where(accept, node, path[every, depth])
        rejected = torch.where(accept, False, rejected | reject)
        depth = depth + accept.long()
        at = torch.where(accept, node + 1, at)
        left = torch.where(accept[:, None], p[:, node + 1], left)
    running = left.cumsum(-1)
    v = to_replace[every, at][:, None]
    other = (running <= v * running[:, -1:]).sum(-1)
    use = rejected & (running[:, -1] > 0)
    tokens[every, depth] = torch.where(use, other, drawn[every, at])
    return tokens.to(draft_tokens.dtype), depth.int(), path[:, :nodes].int().contiguous()
