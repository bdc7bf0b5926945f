# SPDX-License-Identifier: Apache-2.0
"""attention of float8_e4m3fn on the emulator, against float64."""

import pytest
import torch
from support.emulator import options as running
from support.emulator import sm90

import tiercel

pytestmark = pytest.mark.torch

FLOAT8 = torch.float8_e4m3fn
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
    result, lse = sm90("attention_fp8_lse")(*inputs, *scales, causal, limits, None, softcap, None)
    names = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    options = {"causal": causal, "window": window, "softcap": softcap, **names}
    q, k, v = (x.double() for x in inputs)
    truth, sums = tiercel.ref.attention(q, k, v, return_lse=True, **options)
    largest = tiercel.ref.attention(q, k, v.abs(), **options)
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
        result = sm90("attention_fp8")(q, k, v, *[None] * 8)
    truth = tiercel.ref.attention(q.double(), k.double(), v.double())
    assert float(((result.double() - truth) / truth).abs().mean()) < 2**-9
