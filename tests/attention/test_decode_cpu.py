# SPDX-License-Identifier: Apache-2.0
"""decode_attention and merge_attention_states with PyTorch and without a GPU."""

import pytest
import torch

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def make(
    lengths=(9, 0, 17), queries=2, heads=4, kv_heads=2, d=16, page=4, dtype=torch.bfloat16, seed=0
):
    """(q, k_cache, v_cache, page_table, seqused_k); entries that nobody uses are no pages."""
    generator = torch.Generator().manual_seed(seed)
    columns = -(-max(lengths) // page) + 1
    pages = len(lengths) * columns + 2
    q = torch.randn(len(lengths), queries, heads, d, generator=generator).to(dtype)
    caches = torch.randn(pages, 2, page, kv_heads, d, generator=generator).to(dtype)
    table = torch.randperm(pages, generator=generator)[: len(lengths) * columns]
    table = table.view(len(lengths), columns).int()
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // page) :] = -7
    return q, caches[:, 0], caches[:, 1], table, torch.tensor(lengths, dtype=torch.int32)


def gathered(cache, table, length):
    """[1, keys, Hk, D]"""
    keys = range(length)
    page = cache.shape[1]
    return torch.stack([cache[table[j // page], j % page] for j in keys])[None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": (3, None)},
        {"window": (0, 0)},
        {"causal": False, "window": (4, 1)},
        {"softcap": 2.0},
        {"scale": 0.7},
    ],
)
@pytest.mark.parametrize("page", [1, 4, 16])
def test_as_attention_over_the_same_keys(options, page):
    q, k, v, table, lengths = inputs = make(page=page, dtype=torch.float64)
    out, lse = ref.decode_attention(*inputs, return_lse=True, **options)
    causal = {"causal": True, **options}
    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            assert (out[b] == 0).all() and (lse[b] == -torch.inf).all()
            continue
        keys, values = (gathered(cache, table[b], length) for cache in (k, v))
        expected, sums = ref.attention(q[b : b + 1], keys, values, return_lse=True, **causal)
        torch.testing.assert_close(out[b : b + 1], expected)
        torch.testing.assert_close(lse[b : b + 1], sums)


def test_prefix_by_definition():
    inputs = make((9, 5, 17), 3, dtype=torch.float64)
    q, k, v, table, lengths = inputs
    prefix = torch.tensor([8, 40, 2], dtype=torch.int32)
    options = {"prefix": prefix, "window": (2, None)}
    out = ref.decode_attention(*inputs, **options)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (gathered(cache, table[b], length)[0] for cache in (k, v))
        for i in range(3):
            own = length - 3 + i
            seen = [j for j in range(length) if own - 2 <= j <= own or j < prefix[b]]
            for head in range(4):
                scores = keys[seen, head // 2] @ q[b, i, head] / 4
                expected = scores.softmax(0) @ values[seen, head // 2]
                torch.testing.assert_close(out[b, i, head], expected)


@pytest.mark.parametrize("per_head", [False, True])
def test_float8(per_head):
    q, k, v, table, lengths = make()
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    scales = [torch.rand(2 if per_head else 1) + 0.5 for _ in range(2)]
    out = tiercel.decode_attention(q, k, v, table, lengths, k_scale=scales[0], v_scale=scales[1])
    k, v = (x.double() * s.double().view(-1, 1) for x, s in zip((k, v), scales, strict=True))
    expected = ref.decode_attention(q.double(), k, v, table, lengths)
    torch.testing.assert_close(out.double(), expected, rtol=5e-3, atol=1e-5)


def test_values_lse_and_out():
    inputs = make()
    out, lse = tiercel.decode_attention(*inputs, return_lse=True)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    expected, sums = ref.decode_attention(*wide, return_lse=True)
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=5e-3, atol=1e-6)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(tiercel.decode_attention(*inputs), out)
    place = torch.empty(3, 2, 8, 16, dtype=torch.bfloat16)[:, :, ::2]
    assert tiercel.decode_attention(*inputs, out=place) is place and torch.equal(place, out)
    same, again = tiercel.decode_attention(*inputs, out=place, return_lse=True)
    assert same is place and torch.equal(again, lse)
    assert torch.equal(tiercel.decode_attention(*inputs, max_seqused_k=17), out)


def test_no_cache_at_all():
    q, k, _, table, lengths = make((0, 0))
    for cache, columns in ((k[:0], table), (k, table[:, :0])):
        out, lse = tiercel.decode_attention(
            q, cache, cache, columns.contiguous(), lengths, return_lse=True
        )
        assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (
            ValueError,
            "`k_cache` must have a number of heads that divides that of `q`, 4, got 3",
            dict.fromkeys(("k_cache", "v_cache"), torch.zeros(20, 4, 3, 16).bfloat16()),
        ),
        (
            ValueError,
            "`k_scale` must be None for a cache that is not float8, got a tensor",
            {"k_scale": torch.ones(1)},
        ),
        (ValueError, r"`window` must be None or \(left, right\), got 3", {"window": 3}),
        (ValueError, "`scale` must be None or positive and finite, got 0", {"scale": 0}),
        (ValueError, "`max_seqused_k` must be None or a whole number", {"max_seqused_k": -1}),
    ],
)
def test_bad_arguments(error, text, changes):
    names = ("q", "k_cache", "v_cache", "page_table", "seqused_k")
    given = dict(zip(names, make(), strict=True))
    for name, value in changes.items():
        given[name] = given[name].to(value) if isinstance(value, torch.dtype) else value
    with pytest.raises(error, match=f"^decode_attention: {text}"):
        tiercel.decode_attention(**given)


def states(keys=(7, 5), dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 3, 4, 16, generator=generator).to(dtype)
    k, v = (torch.randn(2, sum(keys), 4, 16, generator=generator).to(dtype) for _ in range(2))
    parts = [
        ref.attention(q, x, y, return_lse=True)
        for x, y in zip(k.split(keys, 1), v.split(keys, 1), strict=True)
    ]
    return parts, ref.attention(q, k, v, return_lse=True)


def test_merged_states_are_those_of_all_keys():
    parts, whole = states(dtype=torch.float64)
    torch.testing.assert_close(ref.merge_attention_states(*parts[0], *parts[1]), whole)
    parts, _ = states()
    out, lse = tiercel.merge_attention_states(*parts[0], *parts[1])
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    exact = ref.merge_attention_states(*(x.double() for part in parts for x in part))
    torch.testing.assert_close(out.double(), exact[0], rtol=5e-3, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-5, atol=1e-5)


def test_states_without_keys_count_nothing():
    (a, b), _ = states()
    nothing = (torch.full_like(a[0], torch.nan), torch.full_like(a[1], -torch.inf))
    for first, second in ((a, nothing), (nothing, a)):
        out, lse = tiercel.merge_attention_states(*first, *second)
        assert torch.equal(out, a[0]) and torch.equal(lse, a[1])
    out, lse = tiercel.merge_attention_states(*nothing, *nothing)
    assert (out == 0).all() and (lse == -torch.inf).all()
    place = torch.empty_like(a[0]), torch.empty_like(a[1])
    assert tiercel.merge_attention_states(*a, *b, out=place)[0] is place[0]
    assert torch.equal(place[0], tiercel.merge_attention_states(*a, *b)[0])
