# SPDX-License-Identifier: Apache-2.0
"""paged_attention with PyTorch and without a GPU."""

import pytest
import torch
from support.paged import make, random_trees, wide

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

FLOAT8 = torch.float8_e4m3fn
LENGTHS = [(2, 9), (0, 4), (1, 17), (7, 7), (3, 0), (1, 1)]
NAMES = (
    *("q", "k_cache", "v_cache", "page_table", "seqused_k"),
    *("cu_seqlens_q", "max_seqlen_q"),
)


def gathered(cache, table, length):
    """[1, keys, Hk, D]"""
    page = cache.shape[1]
    keys = [cache[table[j // page], j % page] for j in range(length)]
    return torch.stack(keys)[None] if keys else cache[:0, 0][None]


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
    given = make(LENGTHS, page=page, dtype=torch.float64, around=(2, 3), d=16)
    q, k, v, table, lengths, starts, _ = given
    out, lse = ref.paged_attention(*given, return_lse=True, **options)
    for b, length in enumerate(lengths.tolist()):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        keys, values = (gathered(cache, table[b], length) for cache in (k, v))
        causal = {"causal": True, **options}
        expected, sums = ref.attention(q[None, rows], keys, values, return_lse=True, **causal)
        torch.testing.assert_close(out[rows], expected[0])
        torch.testing.assert_close(lse[:, rows], sums[0])
    for rest in (slice(0, 2), slice(len(q) - 3, None)):
        assert (out[rest] == 0).all() and (lse[:, rest] == -torch.inf).all()


def test_one_query_each_is_decode_attention():
    given = make([(1, 9), (1, 0), (1, 17)], dtype=torch.float64)
    out, lse = ref.paged_attention(*given, return_lse=True)
    # decode_attention gathers whole pages.
    k, v = (x.nan_to_num() for x in given[1:3])
    due, sums = ref.decode_attention(given[0][:, None], k, v, *given[3:5], return_lse=True)
    torch.testing.assert_close(out, due[:, 0])
    torch.testing.assert_close(lse.T, sums[..., 0])


def test_sinks_by_definition():
    """A key of no value whose score is the sink."""
    q, k, v, table, lengths, starts, longest = make(LENGTHS, dtype=torch.float64, d=16)
    sinks = torch.tensor([-torch.inf, -1.0, 2.0, 300.0])
    given = (q, k, v, table, lengths, starts, longest)
    out, lse = ref.paged_attention(*given, sinks=sinks, return_lse=True)
    plain, sums = ref.paged_attention(*given, return_lse=True)
    total = torch.logaddexp(sums, sinks.double()[:, None])
    torch.testing.assert_close(lse, total)
    share = (sums - total).exp().where(sums > -torch.inf, 0.0)
    torch.testing.assert_close(out, plain * share.T[..., None])


@pytest.mark.parametrize("window", [None, (0, 0), (2, 0), (6, 0), (9, 0)])
def test_a_tree_by_its_paths(window):
    """Each row is the last query of a sequence of the old keys and of those on its path."""
    given = make([(6, 14), (1, 4), (0, 2), (9, 9)], dtype=torch.float64, d=16)
    q, k, v, table, lengths, starts, _ = given
    words = random_trees(given)
    options = {"tree_mask": words, "window": window, "return_lse": True}
    out, lse = ref.paged_attention(*given, **options)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (gathered(cache, table[b], length) for cache in (k, v))
        first, end = starts[b : b + 2].tolist()
        for row in range(first, end):
            old = length - (end - first)
            path = [old + j for j in range(end - first) if int(words[row]) >> j & 1]
            seen = torch.tensor([*range(old), *path])
            given_to = (q[None, row : row + 1], keys[:, seen], values[:, seen])
            due, sums = ref.attention(*given_to, causal=True, window=window, return_lse=True)
            torch.testing.assert_close(out[row], due[0, 0])
            torch.testing.assert_close(lse[:, row], sums[0, :, 0])


@pytest.mark.parametrize(
    "options", [{}, {"window": (3, 0)}, {"causal": False, "window": (4, 1)}, {"softcap": 2.0}]
)
def test_a_prefix_by_its_parts(options):
    """Each row's keys: those of the mask, and those of the prefix that the mask hides."""
    given = make(LENGTHS, dtype=torch.float64, d=16, around=(2, 1))
    q, k, v, table, lengths, starts, _ = given
    prefix = torch.tensor([8, 9, 0, 5, 2, -3], dtype=torch.int32)
    out, lse = ref.paged_attention(*given, prefix=prefix, return_lse=True, **options)
    left, right = options.get("window", (-1, -1))
    right = right if options.get("causal") is False else 0
    more = {"softcap": options.get("softcap"), "return_lse": True}
    for b, length in enumerate(lengths.tolist()):
        keys, values = (gathered(cache, table[b], length) for cache in (k, v))
        first, end = starts[b : b + 2].tolist()
        for row in range(first, end):
            own = length - (end - row)
            seen = [
                j
                for j in range(length)
                if j < prefix[b] or ((left < 0 or j >= own - left) and j <= own + right)
            ]
            due, sums = ref.attention(
                q[None, row : row + 1], keys[:, seen], values[:, seen], **more
            )
            torch.testing.assert_close(out[row], due[0, 0])
            torch.testing.assert_close(lse[:, row], sums[0, :, 0])


def test_a_tree_of_parents():
    """The snippet of docs/kernels/paged_attention.md makes a tree of verify_draft's parents."""
    parents = torch.tensor([[-1, -1, 0, 2], [-1, 0, 1, 2]], dtype=torch.int32)
    words = [torch.ones(len(parents), dtype=torch.int64)]
    for i in range(parents.shape[1]):
        above = torch.stack(words, 1).gather(1, parents[:, i : i + 1].long() + 1)[:, 0]
        words.append(above | torch.ones_like(above) << i + 1)
    tree_mask = torch.stack(words, 1).flatten()
    assert tree_mask.tolist() == [1, 0b11, 0b101, 0b1011, 0b11011, 1, 3, 7, 15, 31]
    given = make([(5, 20), (5, 7)], dtype=torch.float64, d=16)
    tree, chain = (
        ref.paged_attention(*given, **options) for options in ({"tree_mask": tree_mask}, {})
    )
    torch.testing.assert_close(tree[5:], chain[5:])
    torch.testing.assert_close(tree[:2], chain[:2])
    assert not torch.allclose(tree[2], chain[2])


def test_float8():
    q, k, v, *rest = make(LENGTHS, d=16)
    k, v = (x.nan_to_num().to(FLOAT8) for x in (k, v))
    k_scale, v_scale, q_scale = torch.tensor([0.5, 2.0]), torch.tensor([3.0]), torch.tensor([0.25])
    out = tiercel.paged_attention(q, k, v, *rest, k_scale=k_scale, v_scale=v_scale)
    exact = (k.double() * k_scale[:, None], v.double() * 3.0)
    due = ref.paged_attention(q.double(), *exact, *rest)
    torch.testing.assert_close(out.double(), due, rtol=5e-3, atol=1e-5)
    out = tiercel.paged_attention(q.to(FLOAT8), k, v, *rest, q_scale=q_scale)
    assert out.dtype == torch.bfloat16
    due = ref.paged_attention(q.to(FLOAT8).double() * 0.25, *(x.double() for x in (k, v)), *rest)
    torch.testing.assert_close(out.double(), due, rtol=5e-3, atol=1e-5)


@pytest.mark.parametrize("d_v", [8, 24])
def test_another_head_dimension_of_values(d_v):
    """The result equals that of queries, keys and values padded with zeros to one dimension."""
    given = make(LENGTHS, d=16, d_v=d_v)
    out, lse = tiercel.paged_attention(*given, return_lse=True)
    q, k, v, *rest = wide(given)
    more = [torch.nn.functional.pad(x, (0, 24 - x.shape[-1])) for x in (q, k, v)]
    due, sums = ref.paged_attention(*more, *rest, scale=16**-0.5, return_lse=True)
    assert out.shape == (*q.shape[:2], d_v)
    torch.testing.assert_close(out.double(), due[..., :d_v], rtol=5e-3, atol=1e-6)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)
    place = torch.empty_like(out)
    assert tiercel.paged_attention(*given, out=place) is place and torch.equal(place, out)


def test_values_lse_and_out():
    given = make(LENGTHS, d=16)
    out, lse = tiercel.paged_attention(*given, return_lse=True)
    expected, sums = ref.paged_attention(*wide(given), return_lse=True)
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=5e-3, atol=1e-6)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(tiercel.paged_attention(*given), out)
    place = torch.empty(len(out), 8, 16, dtype=torch.bfloat16)[:, ::2]
    assert tiercel.paged_attention(*given, out=place) is place and torch.equal(place, out)
    same, again = tiercel.paged_attention(*given, out=place, return_lse=True)
    assert same is place and torch.equal(again, lse)
    assert torch.equal(tiercel.paged_attention(*given, max_seqused_k=17), out)


def test_no_cache_at_all():
    q, k, _, table, lengths, *rest = make([(2, 0), (1, 0)], d=16)
    for cache, columns in ((k[:0], table), (k, table[:, :0])):
        out, lse = tiercel.paged_attention(
            q, cache, cache, columns, lengths, *rest, return_lse=True
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
            r"`cu_seqlens_q` must have shape \[B \+ 1\] = \[7\], got \[6\]",
            {"cu_seqlens_q": torch.zeros(6, dtype=torch.int32)},
        ),
        (ValueError, "`max_seqlen_q` must be at least 0, got -1", {"max_seqlen_q": -1}),
        (
            ValueError,
            "`k_scale` must be None for a cache that is not float8, got a tensor",
            {"k_scale": torch.ones(1)},
        ),
        (
            ValueError,
            "`q_scale` must be None unless `q` is float8_e4m3fn, got a tensor and `q` of bfloat16",
            {"q_scale": torch.ones(1)},
        ),
        (
            ValueError,
            "`tree_mask` must be None unless `causal`, got a tensor",
            {"tree_mask": torch.ones(14, dtype=torch.int64), "causal": False},
        ),
        (
            ValueError,
            "`max_seqlen_q` must be at most 64 with `tree_mask`, got 65",
            {"tree_mask": torch.ones(14, dtype=torch.int64), "max_seqlen_q": 65},
        ),
        (
            ValueError,
            "`prefix` must be None with `tree_mask`, got a tensor",
            {
                "tree_mask": torch.ones(14, dtype=torch.int64),
                "prefix": torch.zeros(6, dtype=torch.int32),
            },
        ),
        (ValueError, r"`window` must be None or \(left, right\), got 3", {"window": 3}),
        (ValueError, "`scale` must be None or positive and finite, got 0", {"scale": 0}),
        (ValueError, "`max_seqused_k` must be None or a whole number", {"max_seqused_k": -1}),
    ],
)
def test_bad_arguments(error, text, changes):
    given = dict(zip(NAMES, make(LENGTHS, d=16), strict=True)) | changes
    with pytest.raises(error, match=f"^paged_attention: {text}"):
        tiercel.paged_attention(**given)
