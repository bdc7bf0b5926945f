# SPDX-License-Identifier: Apache-2.0
"""Kernels that let the next ones start early: each result is read by the next op or a later one.

A kernel that read too early would find what the replay before left, which had another input.
"""

import pytest
import torch
from support.batch_rows import Source

import tiercel

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.usefixtures("no_fallback")]

HIDDEN, HEADS, KV_HEADS, D, PAGE, KEYS = 2048, 16, 4, 128, 16, 700
EXPERTS, TOP, INNER = 32, 4, 256
INPUTS, REPLAYS = 10, 100


def _nothing():
    pass


class Chain:
    """A decoding step of three layers; `done` is called behind each launch."""

    def __init__(self, rows, columns, device="cuda"):
        source = Source(device)

        def weight(*shape):
            return source.normal(*shape, factor=shape[-1] ** -0.5)

        self.rows = rows
        self.norm, self.head_norm = source.normal(HIDDEN), source.normal(D)
        self.slow = weight(4 * HIDDEN, HIDDEN), weight(HIDDEN, 4 * HIDDEN)
        self.qkv = weight((HEADS + 2 * KV_HEADS) * D, HIDDEN)
        self.out = weight(HIDDEN, HEADS * D)
        self.widen = weight(HIDDEN, HIDDEN // 2)
        self.router = weight(EXPERTS, HIDDEN)
        self.experts = weight(EXPERTS, 2 * INNER, HIDDEN), weight(EXPERTS, HIDDEN, INNER)
        self.angles = source.normal(KEYS + 1, D)
        # More columns than keys need: the number of columns decides how blocks share a sequence.
        pages = -(-KEYS // PAGE)
        order = torch.randperm(rows * pages, generator=source.generator, device=device).int()
        self.table = torch.zeros(rows, max(columns, pages), device=device, dtype=torch.int32)
        self.table[:, :pages] = order.view(rows, pages)
        last = KEYS - 1 - source.arange(rows, dtype=torch.int64)
        self.lengths, self.positions = (last + 1).int(), last
        page = self.table.gather(1, (last // PAGE)[:, None])[:, 0]
        self.slots = page.long() * PAGE + last % PAGE
        shape = (rows * pages, PAGE, KV_HEADS, D)
        self.caches = source.normal(*shape), source.normal(*shape)

    def __call__(self, x, done=_nothing):
        def after(result):
            done()
            return result

        def product(x, weight, residual=None):
            return after(tiercel.linear_act(x, weight, activation="none", residual=residual))

        stream = x
        for _ in range(3):
            # The norm reads the tensor that the product behind it adds.
            stream = product(product(stream, self.slow[0]), self.slow[1])
            hidden = after(tiercel.rms_norm(stream, self.norm))
            stream = product(hidden, self.out, residual=stream)
            hidden = after(tiercel.rms_norm(stream, self.norm))
            qkv = product(hidden, self.qkv).view(self.rows, -1, D)
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            given = (q, k, v, q, *self.caches, self.slots, self.positions, self.angles)
            after(tiercel.qk_norm_rope_cache(*given, self.head_norm, self.head_norm))
            where = (*self.caches, self.table, self.lengths)
            attended = after(tiercel.decode_attention(q[:, None], *where))
            stream = product(attended.flatten(1), self.out, residual=stream)
            hidden, stream = after(tiercel.rms_norm(stream, self.norm, residual=hidden))
            short = after(tiercel.rms_norm(hidden.view(-1, D), self.head_norm)).view_as(hidden)
            scores = product(short, self.router)
            chosen = after(tiercel.topk_softmax(scores, TOP, renormalize=True))
            more = after(tiercel.fused_moe(short, *self.experts, *chosen))
            stream = product(more, self.out, residual=stream)
            summed = after(tiercel.moe_sum(stream.view(self.rows, 2, -1)))
            stream = product(summed, self.widen)
        return stream


# 2000 columns: the blocks of the GPU share all sequences, and another kernel adds their sums up.
@pytest.mark.parametrize(("rows", "columns"), [(1, 0), (3, 0), (32, 0), (1, 2000), (130, 0)])
def test_results_are_those_of_launches_that_wait(rows, columns):
    chain, source = Chain(rows, columns), Source("cuda")
    inputs = [source.normal(rows, HIDDEN) for _ in range(INPUTS)]
    due = [chain(x, torch.cuda.synchronize).clone() for x in inputs]
    assert not any(torch.equal(one, due[0]) for one in due[1:])

    unsynchronised = [chain(x).clone() for x in inputs]
    assert all(map(torch.equal, unsynchronised, due))

    given, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(given)
    got = []
    for turn in range(REPLAYS):
        given.copy_(inputs[turn % INPUTS])
        graph.replay()
        got.append(result.clone())
    torch.cuda.synchronize()
    wrong = [turn for turn, one in enumerate(got) if not torch.equal(one, due[turn % INPUTS])]
    assert not wrong
