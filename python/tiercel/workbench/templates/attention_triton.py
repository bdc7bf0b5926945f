# SPDX-License-Identifier: Apache-2.0
"""new_kernel: attention in Triton.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import tiercel
from tiercel.plugins.types import Attended, Keys, LogSums, Queries, Sinks, Values


@triton.jit
def new_kernel_kernel(
    q,
    k,
    v,
    out,
    lse,
    sinks,
    queries,
    keys,
    heads,
    shared,  # heads of queries that share one of keys
    depth,
    width,  # of values
    scale,
    softcap,
    left,  # how far back a query sees
    right,  # how far ahead
    q_batch,
    q_row,
    q_head,
    q_step,
    k_batch,
    k_row,
    k_head,
    k_step,
    v_batch,
    v_row,
    v_head,
    v_step,
    has_sinks: tl.constexpr,
    has_softcap: tl.constexpr,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    tile_queries: tl.constexpr,
    tile_keys: tl.constexpr,
    padded: tl.constexpr,  # depth, as a power of two
    padded_width: tl.constexpr,
):
    """A tile of one head's queries a program, over all keys that it sees."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    first = tl.program_id(0) * tile_queries
    m = (first + tl.arange(0, tile_queries)).to(tl.int64)
    d = tl.arange(0, padded).to(tl.int64)
    e = tl.arange(0, padded_width).to(tl.int64)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head // shared * k_head
    v += batch * v_batch + head // shared * v_head

    used = (m[:, None] < queries) & (d[None, :] < depth)
    q_tile = tl.load(q + m[:, None] * q_row + d[None, :] * q_step, mask=used, other=0.0)
    own = m + keys - queries  # the last query is aligned with the last key
    end = keys
    if has_right:
        end = tl.minimum(keys, first + tile_queries + keys - queries + right)

    sums = tl.zeros((tile_queries, padded_width), dtype=tl.float32)
    total = tl.zeros((tile_queries,), dtype=tl.float32)
    largest = tl.full((tile_queries,), -float("inf"), dtype=tl.float32)
    for start in range(0, end, tile_keys):
        n = (start + tl.arange(0, tile_keys)).to(tl.int64)
        there = (n[:, None] < keys) & (d[None, :] < depth)
        k_tile = tl.load(k + n[:, None] * k_row + d[None, :] * k_step, mask=there, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile)) * scale
        if has_softcap:  # tanh(x) = 2 sigmoid(2 x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        seen = n[None, :] < keys
        if has_left:
            seen = seen & (n[None, :] >= own[:, None] - left)
        if has_right:
            seen = seen & (n[None, :] <= own[:, None] + right)
        scores = tl.where(seen, scores, -float("inf"))
        before = largest
        largest = tl.maximum(before, tl.max(scores, axis=1))
        base = tl.where(largest == -float("inf"), 0.0, largest)  # -inf less -inf is NaN
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(before - base)
        total = total * shrink + tl.sum(weights, axis=1)
        there = (n[:, None] < keys) & (e[None, :] < width)
        v_tile = tl.load(v + n[:, None] * v_row + e[None, :] * v_step, mask=there, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile)

    if has_sinks:  # one more score, which no value belongs to
        sink = tl.load(sinks + head)
        before = largest
        largest = tl.maximum(before, sink)
        base = tl.where(largest == -float("inf"), 0.0, largest)
        shrink = tl.exp(before - base)
        total = total * shrink + tl.exp(sink - base)
        sums = sums * shrink[:, None]

    # A query that sees no key: 0, and the logarithm of nothing.
    blind = total == 0.0
    result = sums / tl.where(blind, 1.0, total)[:, None]
    out += batch * queries * heads * width + head * width
    at = out + m[:, None] * heads * width + e[None, :]
    used = (m[:, None] < queries) & (e[None, :] < width)
    tl.store(at, result.to(out.dtype.element_ty), mask=used)
    logarithm = tl.where(blind, -float("inf"), largest + tl.log(tl.where(blind, 1.0, total)))
    tl.store(lse + (batch * heads + head) * queries + m, logarithm, mask=m < queries)


@tiercel.backends.register(
    op="attention",
    name="new_kernel",
    language="triton",
    description="tiles of 64 queries and 64 keys",
)
def new_kernel(
    q: Queries,  # [B, Sq, H, D] bfloat16 or float16, any strides
    k: Keys,  # [B, Sk, Hk, D], the same dtype; H is a multiple of Hk
    v: Values,  # [B, Sk, Hk, Dv]
    causal: bool,
    window: tuple[int, int] | None,  # keys before and after a query's own; -1 is no limit
    scale: float | None,
    softcap: float | None,
    sinks: Sinks,  # [H] float32, one more score of each head in the softmax's sum, or None
    return_lse: bool,  # always true
) -> tuple[Attended, LogSums]:  # [B, Sq, H, Dv], the dtype of q, and [B, H, Sq] float32
    batches, queries, heads, depth = q.shape
    keys, width = k.shape[1], v.shape[3]
    out = torch.empty(batches, queries, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(batches, heads, queries, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    left, right = (-1, -1) if window is None else window
    right = 0 if causal else right
    tile = 64
    new_kernel_kernel[(triton.cdiv(queries, tile), batches * heads)](
        q,
        k,
        v,
        out,
        lse,
        lse if sinks is None else sinks,
        queries,
        keys,
        heads,
        heads // max(k.shape[2], 1),
        depth,
        width,
        depth**-0.5 if scale is None else scale,
        0.0 if softcap is None else softcap,
        left,
        right,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        has_sinks=sinks is not None,
        has_softcap=softcap is not None,
        has_left=left >= 0,
        has_right=right >= 0,
        tile_queries=tile,
        tile_keys=tile,
        padded=max(triton.next_power_of_2(depth), 16),
        padded_width=max(triton.next_power_of_2(width), 16),
    )
    return out, lse
