# SPDX-License-Identifier: Apache-2.0
"""attention of float8_e4m3fn on the emulator, against float64."""

import pytest
import torch
from support.emulator import options as running
from support.emulator import sm90

import tiercel

pytestmark = pytest.mark.torch

FLOAT8 = torch.float8_e4m3fn
DESCALES = ("q_descale", "k_descale", "v_descale")
HALF_UNIT = 2.0**-4  # of e4m3, relative


def draw(batch, seq_q, seq_k, heads, d):
    generator = torch.Generator().manual_seed(7)

    def random(length, count):
        return torch.randn(batch, length, count, d, generator=generator).to(FLOAT8)

    scales = [torch.rand(shape, generator=generator) + 0.5 for shape in ((), (heads[1],))]
    scales.append((torch.rand(heads[1], batch, generator=generator) + 0.5).T)
    return (random(seq_q, heads[0]), random(seq_k, heads[1]), random(seq_k, heads[1])), scales


def check(batch, seq_q, seq_k, heads, d, *, causal=False, window=None, softcap=None, scaled=True):
    """Each probability is off by half a unit of e4m3 at most, and the result by one of bfloat16."""
    inputs, scales = draw(batch, seq_q, seq_k, heads, d)
    scales = scales if scaled else [None] * 3
    limits = None if window is None else [-1 if x is None else x for x in window]
    given = (*inputs, causal, limits, None, softcap, *scales, None)
    results = sm90("attention_lse")(*given)
    names = dict(zip(DESCALES, scales, strict=True))
    options = {"causal": causal, "window": window, "softcap": softcap, **names}
    compare(results, tiercel.ref.attention, inputs, (), options)
    alone = sm90("attention")(*given)
    assert torch.equal(alone, results[0])


def compare(results, reference, inputs, starts, options):
    """Results and sums with float64's; a probability is off by half a unit of e4m3 at most."""
    result, lse = results
    q, k, v = (x.double() for x in inputs)
    truth, sums = reference(q, k, v, *starts, return_lse=True, **options)
    largest = reference(q, k, v.abs(), *starts, **options)
    assert result.dtype == torch.bfloat16
    error = (result.double() - truth).abs()
    assert bool((error <= 1.01 * (HALF_UNIT + 2**-9) * largest).all())
    assert float(error.norm() / truth.norm()) < 0.03
    torch.testing.assert_close(lse.double(), sums.double(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("d", [16, 64, 80, 96, 128])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (40, 5)}, {"softcap": 20.0, "causal": True}]
)
def test_attention(d, options):
    check(2, 150, 210, (2, 1), d, **options)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 1, 1, (1, 1)), {}),
        ((1, 300, 129, (4, 2)), {"causal": True}),
        ((2, 64, 400, (2, 2)), {"window": (None, 20)}),
        ((1, 5, 17, (1, 1)), {"scaled": False}),
    ],
)
def test_shapes(sizes, options):
    check(*sizes, 64, **options)


@pytest.mark.parametrize("positive", [(0, 0), (0, 200), (350, 500)])
def test_scores_of_one_sign(positive):
    """Floats below 0 do not compare as integers do."""
    (q, k, v), _ = draw(1, 70, 500, (1, 1), 64)
    k = -k.float().abs()
    k[:, slice(*positive)] *= -1
    inputs = (q.float().abs().to(FLOAT8), k.to(FLOAT8), v)
    results = sm90("attention_lse")(*inputs, False, *[None] * 7)
    compare(results, tiercel.ref.attention, inputs, (), {})


@pytest.mark.parametrize("factor", [1.0, 1e3, 1e8])
@pytest.mark.parametrize("d", [64, 128])
def test_equal_scores_however_large(d, factor):
    """Each key counts the same, also where float32 has no digits behind a score's point."""
    q, k = torch.full((1, 70, 1, d), 416.0), torch.full((1, 700, 1, d), 352.0)
    v = torch.ones(1, 700, 1, d)
    v[..., d // 2 :] = torch.arange(700).view(1, 700, 1, 1) % 2
    scales = [torch.tensor(factor), torch.tensor(factor), None]
    inputs = [x.to(FLOAT8) for x in (q, k, v)]
    out, lse = sm90("attention_lse")(*inputs, False, None, None, None, *scales, None)
    expected = torch.where(torch.arange(d) < d // 2, 1.0, 0.5).expand(1, 70, 1, d)
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=0)
    score = 416.0 * 352.0 * factor**2 * d**0.5
    assert bool(((lse.double() - score).abs() <= 1e-6 * score + 7).all())


@pytest.mark.parametrize("d", [64, 128])
def test_a_huge_negative_score_beside_small_ones(d):
    """Of scores that are compared as integers: only large ones give a row another scale."""
    q, k = torch.full((1, 70, 1, d), 448.0), torch.zeros(1, 256, 1, d)
    k[:, :128, :, 0] = -(2.0**-9)
    k[:, 5] = -448.0
    v = torch.zeros(1, 256, 1, d)
    v[:, :128] = 1.0
    inputs = [x.to(FLOAT8) for x in (q, k, v)]
    scales = [torch.tensor(14.5 * 64 / d), None, None]
    results = sm90("attention_lse")(*inputs, False, None, None, None, *scales, None)
    named = dict(zip(DESCALES, scales, strict=True))
    compare(results, tiercel.ref.attention, inputs, (), named)


def check_varlen(queries, keys, heads, d, *, causal=False, window=None, longest=None):
    generator = torch.Generator().manual_seed(7)

    def random(lengths, count):
        return torch.randn(sum(lengths), count, d, generator=generator).to(FLOAT8)

    inputs = (random(queries, heads[0]), random(keys, heads[1]), random(keys, heads[1]))
    starts = [torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys)]
    starts += longest or (max(queries), max(keys))
    shapes = ((len(queries), heads[1]), (heads[1],), (1, 1))
    scales = [torch.rand(shape, generator=generator) + 0.5 for shape in shapes]
    limits = None if window is None else [-1 if x is None else x for x in window]
    options = (causal, limits, None, None, *scales, None)
    results = sm90("attention_varlen_lse")(*inputs, *starts, *options)
    named = {"causal": causal, "window": window, **dict(zip(DESCALES, scales, strict=True))}
    compare(results, tiercel.ref.attention_varlen, inputs, starts, named)


@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 5)}])
def test_varlen(d, options):
    check_varlen([130, 1, 70], [100, 200, 5], (2, 1), d, **options)


def test_varlen_of_long_sequences():
    check_varlen([100, 10], [200, 97], (1, 1), 64, causal=True, longest=(1100, 200))


def test_varlen_without_some_keys_or_queries():
    check_varlen([5, 0, 64, 33], [0, 129, 128, 1], (2, 2), 64, longest=(200, 300))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps(seed):
    with running(lazy=seed != 2, seed=seed):
        check(1, 300, 300, (2, 1), 128, causal=True)


def test_sums_of_many_keys_with_an_adder_of_13_bits():
    """Values of one sign, so that an adder that cuts off loses of every block."""
    keys = 4096
    generator = torch.Generator().manual_seed(7)
    q, k = (torch.randn(1, n, 1, 64, generator=generator) for n in (16, keys))
    v = torch.rand(1, keys, 1, 64, generator=generator) + 0.5
    q, k, v = (q * 0.1).to(FLOAT8), k.to(FLOAT8), v.to(FLOAT8)
    with running(short_fp8_adder=True):
        result = sm90("attention")(q, k, v, False, *[None] * 7)
    truth = tiercel.ref.attention(q.double(), k.double(), v.double())
    assert float(((result.double() - truth) / truth).abs().mean()) < 2**-9
