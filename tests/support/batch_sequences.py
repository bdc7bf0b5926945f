# SPDX-License-Identifier: Apache-2.0
"""The cases of batch_rows.py whose rows are sequences; together with its own, in CASES."""

import torch
from support import batch_caches, batch_float8  # noqa: F401 (add their cases)
from support.batch_rows import CASES, Rows, case, starts_of

import tiercel

__all__ = ["CASES"]

# Attention. Rows are sequences.


@case("attention", causal=True, length=300)
@case("attention", "all", causal=False, length=300)
def attention(source, causal, length):
    q, k, v = (source.normal(40, length, heads, 128) for heads in (8, 2, 2))
    return Rows(
        40,
        lambda rows: tiercel.attention(q[rows], k[rows], v[rows], causal=causal, return_lse=True),
    )


@case("attention_varlen")
def attention_varlen(source):
    lengths = [1 + (37 * i) % 1500 for i in range(24)]
    parts = [[source.normal(n, heads, 128) for heads in (8, 2, 2)] for n in lengths]

    def run(rows):
        chosen = [parts[i] for i in rows.tolist()]
        counts = [len(q) for q, _, _ in chosen]
        q, k, v = map(torch.cat, zip(*chosen, strict=True))
        starts, most = starts_of(counts, q.device), max(counts)
        out = tiercel.attention_varlen(q, k, v, starts, starts, most, most, causal=True)
        return (_in_sequences(out, counts),)

    return Rows(len(lengths), run)


def _in_sequences(out, counts):
    return torch.nn.utils.rnn.pad_sequence(out.split(counts), batch_first=True)


class Paged:
    """Keys and values of sequences in pages, in an order of their own."""

    def __init__(self, source, lengths, kv_heads=2, d=128, page=16):
        self.lengths = source.arange(len(lengths)) * 0 + torch.tensor(
            lengths, device=source.device, dtype=torch.int32
        )
        pages = -(-max(lengths) // page)
        order = torch.randperm(
            pages * len(lengths), device=source.device, generator=source.generator
        )
        self.table = order.int().view(len(lengths), pages)
        shape = (pages * len(lengths), page, kv_heads, d)
        self.k, self.v = source.normal(*shape), source.normal(*shape)


_LENGTHS = [1, 16, 17, 500, 4096, 3000, 64, 1025, 2048, 100, 700, 2049] * 5


@case("decode_attention")
@case("decode_attention", "queries", queries=4)
@case("decode_attention", "float8", cache=torch.float8_e4m3fn)
@case("decode_attention", "window", window=(700, 0), queries=2)
@case("decode_attention", "wide", d=256, group=8)
def decode_attention(source, queries=1, cache=None, d=128, group=4, **options):
    paged = Paged(source, _LENGTHS, d=d)
    q = source.normal(len(_LENGTHS), queries, 2 * group, d)
    k, v = paged.k.to(cache or paged.k.dtype), paged.v.to(cache or paged.v.dtype)

    def run(rows):
        # A table for the longest sequence of the call alone, as an engine would give.
        pages = -(-int(paged.lengths[rows].max()) // 16)
        table, lengths = paged.table[rows, :pages], paged.lengths[rows]
        return tiercel.decode_attention(q[rows], k, v, table, lengths, return_lse=True, **options)[
            :1
        ]

    return Rows(len(_LENGTHS), run)


@case("paged_attention")
@case("paged_attention", "mixed", most=90)
@case("paged_attention", "float8", most=8, cache=torch.float8_e4m3fn)
@case("paged_attention", "float8 chunks", most=90, cache=torch.float8_e4m3fn)
@case("paged_attention", "float8 of wide heads", most=40, cache=torch.float8_e4m3fn, d=512)
@case("paged_attention", "window", most=40, window=(700, 0))
@case("paged_attention", "trees", most=24, trees=True)
@case("paged_attention", "wide", most=40, d=512)
@case("paged_attention", "trees of wide heads", most=24, trees=True, d=512)
def paged_attention(source, most=1, cache=None, trees=False, d=128, **options):
    paged = Paged(source, _LENGTHS, d=d)
    counts = [min(n, 1 + (7 * i) % most) for i, n in enumerate(_LENGTHS)]
    words = [1]  # of a binary tree: a node's ancestors and itself
    while trees and len(words) < most:
        words.append(words[(len(words) - 1) // 2] | 1 << len(words))
    words = torch.tensor(words, device=source.device)
    parts = [source.normal(n, 8, d) for n in counts]
    k, v = paged.k.to(cache or paged.k.dtype), paged.v.to(cache or paged.v.dtype)

    def run(rows):
        own = [counts[i] for i in rows.tolist()]
        q = torch.cat([parts[i] for i in rows.tolist()])
        pages = -(-int(paged.lengths[rows].max()) // 16)
        tensors = (q, k, v, paged.table[rows, :pages], paged.lengths[rows])
        tree = torch.cat([words[:n] for n in own]) if trees else None
        tensors += (starts_of(own, q.device), max(own))
        out = tiercel.paged_attention(*tensors, tree_mask=tree, **options)
        padded = _in_sequences(out, own)
        return (torch.nn.functional.pad(padded, (0, 0, 0, 0, 0, most - max(own))),)

    return Rows(len(_LENGTHS), run)


@case("merge_attention_states")
def merge_attention_states(source):
    outs = [source.normal(300, 2, 8, 128) for _ in range(2)]
    sums = [source.normal(300, 8, 2, dtype=torch.float32) for _ in range(2)]

    def run(rows):
        given = [t[rows] for pair in zip(outs, sums, strict=True) for t in pair]
        return tiercel.merge_attention_states(*given)

    return Rows(300, run)


@case("mla_decode", heads=16)
@case("mla_decode", "128", heads=128)
@case("mla_decode", "queries", heads=16, queries=3)
@case("mla_decode", "float8", heads=16, cache=torch.float8_e4m3fn)
def mla_decode(source, heads, queries=1, cache=None):
    lengths = [1, 64, 65, 500, 5000, 1024, 1025, 3000] * 6
    pages = 80
    stored = source.normal(pages * len(lengths), 64, 576).to(cache or torch.bfloat16)
    table = source.arange(pages * len(lengths)).view(len(lengths), pages)
    used = torch.tensor(lengths, device=source.device, dtype=torch.int32)
    q = source.normal(len(lengths), queries, heads, 576)

    def run(rows):
        wide = -(-int(used[rows].max()) // 64)
        given = (q[rows], stored, table[rows, :wide], used[rows], 576**-0.5)
        out, lse = tiercel.mla_decode(*given, return_lse=True)
        return out, lse

    return Rows(len(lengths), run)


@case("mla_sparse_attention", heads=16)
@case("mla_sparse_attention", "128", heads=128)
def mla_sparse_attention(source, heads):
    stored, q = source.normal(40, 64, 576), source.normal(300, heads, 576)
    indices = source.whole(40 * 64 + 50, 300, 600) - 50

    def run(rows):
        given = (q[rows], stored, indices[rows], 576**-0.5)
        return tiercel.mla_sparse_attention(*given, return_lse=True)

    return Rows(300, run)


@case("indexer_logits")
def indexer_logits(source):
    q, k = (source.normal(*shape, 128).to(torch.float8_e4m3fn) for shape in ((300, 64), (1000,)))
    scale = source.normal(1000, dtype=torch.float32).abs()
    weights = source.normal(300, 64, dtype=torch.float32)
    return Rows(300, lambda rows: (tiercel.indexer_logits(q[rows], k, scale, weights[rows]),))


@case("top_k_indices")
def top_k_indices(source):
    logits = source.normal(300, 5000, dtype=torch.float32)
    return Rows(300, lambda rows: (tiercel.top_k_indices(logits[rows], 512),))


# Sequences with a state.


@case("causal_conv1d")
def causal_conv1d(source):
    x, weight = source.normal(40, 500, 512), source.normal(512, 4)
    return Rows(40, lambda rows: (tiercel.causal_conv1d(x[rows], weight, activation="silu"),))


@case("gated_delta_rule")
def gated_delta_rule(source):
    count, length, heads = 16, 300, 4
    q, k, v = (source.normal(count, length, heads, 128, factor=0.1) for _ in range(3))
    g = -source.normal(count, length, heads, dtype=torch.float32).abs()
    beta = source.normal(count, length, heads).sigmoid()

    def run(rows):
        given = [t[rows] for t in (q, k, v, g, beta)]
        return tiercel.gated_delta_rule(*given, output_final_state=True, qk_l2norm=True)

    return Rows(count, run)


@case("causal_conv1d_update")
def causal_conv1d_update(source):
    x, weight = source.normal(300, 1, 512), source.normal(512, 4)
    states = source.normal(300, 3, 512)

    def run(rows):
        own = states[rows]
        out, _ = tiercel.causal_conv1d_update(x[rows], own, weight, torch.empty_like(x[rows]))
        return out, own

    return Rows(300, run)


@case("gated_delta_rule_decode")
def gated_delta_rule_decode(source):
    count, heads = 200, 4
    q, k, v = (source.normal(count, 1, heads, 128, factor=0.1) for _ in range(3))
    g = -source.normal(count, 1, heads, dtype=torch.float32).abs()
    beta = source.normal(count, 1, heads).sigmoid()
    states = source.normal(count, heads, 128, 128, dtype=torch.float32)

    def run(rows):
        given, own = [t[rows] for t in (q, k, v, g, beta)], states[rows]
        tiercel.gated_delta_rule_decode(*given, own, out := torch.empty_like(v[rows]))
        return out, own

    return Rows(count, run)


@case("gated_rms_norm")
def gated_rms_norm(source):
    x, gate, weight = source.normal(3000, 128), source.normal(3000, 128), source.normal(128)
    return Rows(3000, lambda rows: (tiercel.gated_rms_norm(x[rows], gate[rows], weight),))
