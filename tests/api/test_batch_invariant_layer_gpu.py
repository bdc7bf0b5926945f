# SPDX-License-Identifier: Apache-2.0
"""Whole layers in the batch-invariant mode: a sequence alone, in a batch, and in chunks."""

import pytest
import torch
from support.batch_rows import Source, starts_of

import tiercel

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

HIDDEN, HEADS, KV_HEADS, D, PAGE = 1024, 8, 2, 128, 16
INNER, EXPERTS, TOP, EXPERT_INNER = 2816, 16, 4, 512
VOCABULARY, MOST, LENGTH = 8192, 2200, 1500


class Layer:
    def __init__(self, source, experts):
        def weight(*shape):
            return source.normal(*shape, factor=shape[-1] ** -0.5)

        self.experts = experts
        self.norms = [source.normal(HIDDEN) for _ in range(2)]
        self.of_heads = [source.normal(D) for _ in range(2)]
        self.qkv = weight((HEADS + 2 * KV_HEADS) * D, HIDDEN)
        self.out = weight(HIDDEN, HEADS * D)
        if experts:
            self.router = weight(EXPERTS, HIDDEN)
            self.up = weight(EXPERTS, 2 * EXPERT_INNER, HIDDEN)
            self.down = weight(EXPERTS, HIDDEN, EXPERT_INNER)
        else:
            self.up, self.down = weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)

    def attend(self, x, place):
        qkv = tiercel.linear_act(tiercel.rms_norm(x, self.norms[0]), self.qkv, activation="none")
        q, k, v = qkv.unflatten(1, (-1, D)).split((HEADS, KV_HEADS, KV_HEADS), 1)
        rotated = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        given = (q, k, v, rotated, *place.caches[self], place.slots, place.positions)
        q, *caches = tiercel.qk_norm_rope_cache(*given, place.angles, *self.of_heads)
        where = (place.table, place.lengths, place.starts, place.most)
        seen = tiercel.paged_attention(q, *caches, *where).flatten(1)
        return tiercel.linear_act(seen, self.out, activation="none", residual=x)

    def __call__(self, x, place):
        x = self.attend(x, place)
        inner = tiercel.rms_norm(x, self.norms[1])
        if not self.experts:
            return tiercel.fused_mlp(inner, self.up, self.down, residual=x)
        scores = tiercel.linear_act(inner, self.router, activation="none")
        weights, ids = tiercel.topk_softmax(scores, TOP, renormalize=True)
        return x + tiercel.fused_moe(inner, self.up, self.down, weights, ids)


class Place:
    """The places of a step's tokens in their sequences and in the cache."""


class Model:
    """Two layers, and the cache of all sequences."""

    def __init__(self, lengths):
        source = Source("cuda")
        self.layers = [Layer(source, experts) for experts in (False, True)]
        self.embedding, self.head = (source.normal(VOCABULARY, HIDDEN) for _ in range(2))
        self.angles = source.normal(MOST, D)
        self.tokens = [source.whole(VOCABULARY, n, dtype=torch.int64) for n in lengths]
        pages = -(-MOST // PAGE) * len(lengths)
        self.table = torch.randperm(pages, device="cuda").int().view(len(lengths), -1)
        shape = (pages, PAGE, KV_HEADS, D)
        self.caches = {
            layer: [torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
            for layer in self.layers
        }

    def step(self, chunks):
        """Log-probabilities of the tokens of chunks, each (sequence, first, last)."""
        place = Place()
        place.caches, place.angles = self.caches, self.angles
        positions = [torch.arange(first, last, device="cuda") for _, first, last in chunks]
        rows = [
            self.table[s].long()[p // PAGE] * PAGE + p % PAGE
            for (s, _, _), p in zip(chunks, positions, strict=True)
        ]
        place.positions, place.slots = torch.cat(positions), torch.cat(rows)
        place.table = self.table[[s for s, _, _ in chunks]]
        place.lengths = torch.tensor([last for *_, last in chunks], device="cuda").int()
        counts = [last - first for _, first, last in chunks]
        place.starts, place.most = starts_of(counts, "cuda"), max(counts)
        x = self.embedding[torch.cat([self.tokens[s][a:b] for s, a, b in chunks])]
        for layer in self.layers:
            x = layer(x, place)
        scores = tiercel.linear_act(tiercel.rms_norm(x), self.head, activation="none")
        return tiercel.log_softmax(scores).split(counts)


def cut(sizes):
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.fixture(scope="module")
def model():
    return Model([LENGTH, *(1 + (97 * i) % MOST for i in range(1, 64))])


@pytest.fixture(scope="module")
def alone(model):
    with tiercel.batch_invariant():
        return model.step([(0, 0, LENGTH)])[0]


def assert_same(got, alone):
    assert torch.isfinite(alone).all()
    wrong = (got.view(torch.int16) != alone.view(torch.int16)).any(1)
    assert not wrong.any(), (
        f"{int(wrong.sum())} rows differ, the first is {int(wrong.nonzero()[0])}"
    )


@pytest.mark.parametrize(
    "sizes",
    [
        (64, 1436),
        (1, 63, 64, 5, 200, 1167),
        (1015, *[1] * 20, 465),
        (350, 2, 1000, 33, 115),
        (1490, *[1] * 10),
    ],
)
def test_in_chunks(model, alone, sizes):
    with tiercel.batch_invariant():
        got = [model.step([(0, *chunk)])[0] for chunk in cut(sizes)]
    assert_same(torch.cat(got), alone)


def test_in_a_batch(model, alone):
    with tiercel.batch_invariant():
        chunks = [(s, 0, len(tokens)) for s, tokens in enumerate(model.tokens)]
        order = [*chunks[1:30], chunks[0], *chunks[30:]]
        assert_same(model.step(order)[29], alone)


def test_chunks_beside_decoding(model, alone):
    """Others decode, one token a step, while the sequence's chunks come. Most have several parts of
    keys."""
    others = range(1, 64)
    with tiercel.batch_invariant():
        model.step([(s, 0, len(model.tokens[s])) for s in others])
        got = []
        for number, chunk in enumerate(cut((900, 120, 3, 250, 222, 1, 1, 1, 1, 1))):
            decoding = [(s, len(model.tokens[s]) - 1, len(model.tokens[s])) for s in others]
            count = 63 if number % 2 else 20
            got.append(model.step([*decoding[:count], (0, *chunk)])[-1])
    assert_same(torch.cat(got), alone)


def test_a_captured_graph_keeps_the_mode(model):
    weight, x = model.layers[0].qkv, Source("cuda").normal(300, HIDDEN)
    with tiercel.batch_invariant():
        expected = tiercel.linear_act(x, weight)[7]
        graph, out = torch.cuda.CUDAGraph(), None
        given = x[7:8].clone()
        tiercel.linear_act(given, weight)
        with torch.cuda.graph(graph):
            out = tiercel.linear_act(given, weight)
    graph.replay()
    assert torch.equal(out[0], expected)


@pytest.mark.sanitize
def test_latent_attention_in_parts():
    """mla_decode's parts of a fixed size, against the same keys dealt to all lanes."""
    source = Source("cuda")
    lengths = torch.tensor([1, 1024, 1025, 2500, 64], device="cuda").int()
    cache = source.normal(5 * 40, 64, 576)
    table = source.arange(5 * 40).view(5, 40)
    q = source.normal(5, 2, 16, 576)
    given = (q, cache, table, lengths, 576**-0.5)
    expected, sums = tiercel.mla_decode(*given, return_lse=True)
    with tiercel.batch_invariant():
        got, own = tiercel.mla_decode(*given, return_lse=True)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(own, sums)
