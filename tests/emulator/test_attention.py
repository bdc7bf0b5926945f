# SPDX-License-Identifier: Apache-2.0
"""attention and attention_varlen on the emulator, against float64."""

import itertools

import pytest
import torch
from support.attention import UNLIMITED, compare, draw, limits
from support.emulator import kernels
from support.emulator import options as running

import tiercel

pytestmark = pytest.mark.torch


def check(batch, seq_q, seq_k, heads, d, dtype=torch.bfloat16, expected="", d_v=None, **options):
    d_v = d_v or d
    keys = (batch, seq_k, heads[1])
    q, k, v = draw(dtype, (batch, seq_q, heads[0], d), (*keys, d), (*keys, d_v))
    out = q.new_full((batch, seq_q, heads[0], d_v), torch.nan)
    lse = torch.full((batch, heads[0], seq_q), torch.nan)
    softcap = options.get("softcap", 0.0)
    arguments = (q, k, v, out, lse, *limits(options), d**-0.5, softcap)
    assert expected in kernels.attention_plan(*arguments)["kernel"]
    kernels.attention(*arguments)
    doubles = [x.double() for x in (q, k, v)]
    compare(out, lse, *tiercel.ref.attention(*doubles, return_lse=True, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 5)}])
def test_attention(d, dtype, options):
    check(1, 150, 210, (2, 1), d, dtype, **options)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 1, 1, (1, 1)), {}),
        ((1, 300, 129, (4, 2)), {"causal": True}),
        ((2, 64, 400, (2, 2)), {"window": (UNLIMITED, 20)}),
        ((1, 200, 200, (2, 1)), {"softcap": 20.0, "causal": True}),
    ],
)
def test_shapes(sizes, options):
    check(*sizes, 64, **options)


VALUES = [
    (192, 128, "_d192v128_"),
    (136, 40, "_d192v128_"),
    (128, 192, "_d192_"),
    (64, 128, "_d96_"),
]


@pytest.mark.parametrize(("d", "d_v", "expected"), VALUES)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 150, 210, (2, 1)), {}),
        ((2, 300, 300, (2, 2)), {"causal": True}),
        ((1, 130, 520, (1, 1)), {"causal": True}),
        ((1, 140, 5, (2, 1)), {"causal": True}),
    ],
)
def test_values_of_another_head_dimension(sizes, options, d, d_v, expected):
    check(*sizes, d, d_v=d_v, expected=expected, **options)


@pytest.mark.parametrize("options", [{"window": (40, 5)}, {"softcap": 20.0, "causal": True}])
def test_windows_of_narrow_values(options):
    """The kernels whose values have as many columns as the keys: the further ones are zeros."""
    check(1, 150, 210, (2, 1), 192, d_v=128, expected="_d192_", **options)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("seq_k", [300, 60])
def test_narrow_values_in_any_order_of_warps(seed, seq_k):
    """A block has many tiles, so that it fills q's stages again; some have one block of keys."""
    with running(lazy=seed != 2, seed=seed, multiprocessors=2):
        check(1, 300, seq_k, (3, 1), 192, d_v=128, causal=True)
        check_varlen([300, 5, 140], [300, 64, 20], (2, 1), 192, d_v=128, causal=seed == 0)


def test_three_warpgroups():
    check(1, 1100, 130, (1, 1), 64, expected="192x128", causal=True)


@pytest.mark.parametrize("positive", [(0, 0), (0, 200), (350, 500)])
def test_scores_of_one_sign(positive):
    """Floats below 0 do not compare as integers do."""
    q, k, v = draw(torch.bfloat16, (1, 70, 1, 64), *[(1, 500, 1, 64)] * 2)
    q, k = q.abs(), -k.abs()
    k[:, slice(*positive)] *= -1
    out, lse = torch.full_like(q, torch.nan), torch.full((1, 1, 70), torch.nan)
    kernels.attention(q, k, v, out, lse, UNLIMITED, UNLIMITED, 0.125, 0.0)
    doubles = [x.double() for x in (q, k, v)]
    compare(out, lse, *tiercel.ref.attention(*doubles, return_lse=True))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps(seed):
    with running(lazy=seed != 2, seed=seed):
        check(1, 300, 300, (2, 1), 128, causal=True)


def attend(q, k, v, causal=False):
    out = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    right = 0 if causal else UNLIMITED
    kernels.attention(q, k, v, out, lse, UNLIMITED, right, q.shape[-1] ** -0.5, 0.0)
    return out, lse


# Scores from where float32 has no digits behind the point to 2^63; float16's largest are near 2^39.
HUGE = [
    (torch.bfloat16, 4080.0),
    (torch.bfloat16, 133120.0),
    (torch.bfloat16, -(2.0**44)),
    (torch.float16, 60000.0),
]


@pytest.mark.parametrize(("dtype", "value"), HUGE)
@pytest.mark.parametrize("causal", [False, True])
def test_equal_scores_however_large(dtype, value, causal):
    """Each key counts the same, also from block to block. Masks hide the last keys from some."""
    q, k = torch.full((1, 70, 1, 128), 4096.0), torch.full((1, 700, 1, 128), value)
    k = k.to(dtype)
    v = torch.ones(1, 700, 1, 128, dtype=dtype)
    v[..., 64:] = torch.arange(700).view(1, 700, 1, 1) % 2
    out, lse = attend(q.to(dtype), k, v, causal)
    assert bool((out[..., :64] == 1).all())
    torch.testing.assert_close(
        out[..., 64:].float(), torch.full((1, 70, 1, 64), 0.5), atol=2e-3, rtol=0
    )
    scores = 4096.0 * k[0, 0, 0, 0].double() * 128**0.5
    torch.testing.assert_close(lse.double(), scores.expand(1, 1, 70), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "value"), HUGE)
def test_the_largest_of_huge_scores(dtype, value):
    """Nothing else counts, and no other score is near it."""
    q = torch.full((1, 70, 1, 128), 4096.0, dtype=dtype)
    k = torch.full((1, 300, 1, 128), -value, dtype=dtype)
    at = 17 if value > 0 else slice(None)
    k[:, at] = value
    v = torch.randn(1, 300, 1, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = v[:, at].float().mean(dim=1) if value < 0 else v[:, at].float()
    out, _ = attend(q, k, v)
    torch.testing.assert_close(out.float(), expected.expand(1, 70, 1, 128), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("key", [251, 160])
def test_blocks_of_equal_scores(key):
    """A block counts as those after it do: no factor that adds up while the maximum stays."""
    q, k = torch.full((1, 64, 1, 128), 256.0), torch.full((1, 1536, 1, 128), float(key))
    v = torch.zeros(1, 1536, 1, 128)
    v[:, 768:] = 1.0
    out, _ = attend(*(x.bfloat16() for x in (q, k, v)))
    torch.testing.assert_close(out.float(), torch.full((1, 64, 1, 128), 0.5), atol=2e-3, rtol=0)


def check_varlen(queries, keys, heads, d, dtype=torch.bfloat16, longest=None, d_v=None, **options):
    d_v, rows = d_v or d, (sum(keys), heads[1])
    q, k, v = draw(dtype, (sum(queries), heads[0], d), (*rows, d), (*rows, d_v))
    starts = [torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys)]
    longest = longest or (max(queries), max(keys))
    out = q.new_full((*q.shape[:-1], d_v), torch.nan)
    lse = torch.full((heads[0], len(q)), torch.nan)
    rest = (*longest, *limits(options), d**-0.5, options.get("softcap", 0.0))
    kernels.attention_varlen(q, k, v, *starts, out, lse, *rest)
    doubles = [x.double() for x in (q, k, v)]
    truth = tiercel.ref.attention_varlen(*doubles, *starts, *longest, return_lse=True, **options)
    compare(out, lse, *truth)


LENGTHS = [
    ([5], [5]),
    ([128, 256], [128, 256]),
    ([300, 1, 0, 130, 129], [300, 1, 7, 130, 64]),
    ([64, 200, 3], [200, 64, 0]),
    ([50] * 5, [50] * 5),
]


@pytest.mark.parametrize("d", [40, 64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 5)}])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_varlen(d, options, lengths):
    check_varlen(*lengths, (2, 1), d, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 5)}])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_varlen_of_narrow_values(options, lengths):
    check_varlen(*lengths, (2, 1), 192, d_v=128, **options)


@pytest.mark.parametrize(("d", "d_v"), [(256, 256), (136, 200), (64, 256), (200, 40)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 5)}])
@pytest.mark.parametrize("lengths", LENGTHS[:4])
def test_varlen_of_wide_heads(lengths, options, d, d_v):
    check_varlen(*lengths, (2, 1), d, d_v=d_v, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 5)}])
def test_varlen_with_a_cap(options, d, dtype):
    check_varlen(*LENGTHS[2], (2, 1), d, dtype, softcap=2.0, **options)


@pytest.mark.parametrize("seed", [1, 2])
def test_wide_heads_in_any_order_of_warps(seed):
    with running(lazy=seed != 2, seed=seed, multiprocessors=2):
        check_varlen([300, 5, 140], [300, 64, 20], (2, 1), 256, torch.float16, causal=True)


def test_varlen_float16_and_a_longest_that_is_more():
    check_varlen([100, 50], [60, 90], (4, 2), 128, torch.float16, (300, 257), causal=True)


def test_varlen_beside_nans():
    """The next sequence's keys are NaN: no row of another sequence sees them."""
    q, k, v = draw(torch.bfloat16, *itertools.repeat((227, 2, 64), 3))
    k[100:150], v[100:150] = torch.nan, torch.nan
    starts = torch.tensor([0, 100, 150, 227], dtype=torch.int32)
    out, lse = torch.zeros_like(q), torch.zeros(2, 227)
    tensors = (q, k, v, starts, starts, out, lse)
    kernels.attention_varlen(*tensors, 100, 100, UNLIMITED, UNLIMITED, 0.125, 0.0)
    assert out[:100].isfinite().all()
    assert out[150:].isfinite().all()
    assert out[100:150].isnan().all()
