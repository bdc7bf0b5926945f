# SPDX-License-Identifier: Apache-2.0
"""attention_varlen of float8_e4m3fn on an H100 or H200, against float64."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

FLOAT8 = torch.float8_e4m3fn
LENGTHS = [
    ([5], [5]),
    ([1000, 1, 0, 300, 129], [1000, 1, 7, 300, 64]),
    ([64, 700, 3], [700, 64, 0]),
    ([200] * 20, [200] * 20),
    ([2048, 100, 1000], [2048, 100, 1000]),
    ([1100, 1100], [97, 2000]),
]


@pytest.fixture
def make():
    generator = torch.Generator("cuda").manual_seed(7)

    def draw(queries, keys, heads, d):
        def rand(rows, count):
            drawn = torch.randn(rows, count, d, device="cuda", generator=generator)
            return drawn.to(FLOAT8)

        tensors = [rand(sum(queries), heads[0]), *(rand(sum(keys), heads[1]) for _ in range(2))]
        of_each = [torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (queries, keys)]
        return *tensors, *of_each, max(queries), max(keys)

    return draw


def check(given, **options):
    """As attention's of float8_e4m3fn."""
    batch, kv_heads = given[3].numel() - 1, given[1].shape[1]
    shapes = {"q_descale": (batch, kv_heads), "k_descale": (kv_heads,), "v_descale": (1,)}
    options |= {name: torch.rand(s, device="cuda") + 0.5 for name, s in shapes.items()}
    result, lse = tiercel.attention_varlen(*given, return_lse=True, **options)
    q, k, v = (x.double() for x in given[:3])
    truth, sums = tiercel.ref.attention_varlen(q, k, v, *given[3:], return_lse=True, **options)
    largest = tiercel.ref.attention_varlen(q, k, v.abs(), *given[3:], **options)
    assert result.dtype == torch.bfloat16
    error = (result.double() - truth).abs()
    assert bool((error <= 0.07 * largest).all())
    assert float(error.norm() / truth.norm().clamp_min(1e-9)) < 0.03
    torch.testing.assert_close(lse.double(), sums.double(), rtol=1e-3, atol=1e-2)
    assert torch.equal(tiercel.attention_varlen(*given, **options), result)


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("lengths", LENGTHS[:2])
def test_small(make, d, lengths):
    check(make(*lengths, (2, 1), d), causal=True)


@pytest.mark.parametrize("d", [32, 64, 96, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 5)}])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(make, d, options, lengths):
    check(make(*lengths, (4, 2), d), **options)


@pytest.mark.parametrize("d", [64, 128])
def test_as_sequences_of_one_length(make, d):
    given = make([512] * 3, [512] * 3, (8, 4), d)
    apart = [x.unflatten(0, (3, 512)) for x in given[:3]]
    expected = tiercel.attention(*apart, causal=True)
    assert torch.equal(tiercel.attention_varlen(*given, causal=True), expected.flatten(0, 1))


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 128])
def test_rows_in_no_sequence(make, d):
    q, k, v, of_q, of_k, *longest = make([20, 100, 1, 90], [20, 90, 7, 90], (4, 2), d)
    out, lse = tiercel.attention_varlen(q, k, v, of_q[1:-1], of_k[1:-1], *longest, return_lse=True)
    inner = (q[20:121], k[20:117], v[20:117], of_q[1:-1] - 20, of_k[1:-1] - 20)
    due, sums = tiercel.attention_varlen(*inner, *longest, return_lse=True)
    assert torch.equal(out[20:121], due) and torch.equal(lse[:, 20:121], sums)
    for rest in (slice(0, 20), slice(121, None)):
        assert (out[rest] == 0).all() and (lse[:, rest] == -torch.inf).all()


@pytest.mark.sanitize
@pytest.mark.parametrize("starts", [(-40, 60, 100), (0, 101, 2**31 - 1), (2**29, -5, 70)])
def test_any_contents_of_starts(make, starts):
    given = make([300], [300], (2, 2), 64)
    starts = torch.tensor(starts, dtype=torch.int64, device="cuda").int()
    inner = [x[100:200] for x in given[:3]]
    out = tiercel.attention_varlen(*inner, starts, starts, 100, 100)
    expected = tiercel.ref.attention_varlen(*inner, starts, starts, 100, 100)
    if (starts.clamp(0, 100).diff() >= 0).all():
        torch.testing.assert_close(out, expected, rtol=0.1, atol=0.1)


def test_keys_beyond_the_longest_count(make):
    given = make([100, 50], [700, 300], (2, 2), 64)
    due = tiercel.attention_varlen(*given)
    assert torch.equal(tiercel.attention_varlen(*given[:5], 100, 90), due)
