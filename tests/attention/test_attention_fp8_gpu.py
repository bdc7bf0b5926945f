# SPDX-License-Identifier: Apache-2.0
"""attention of float8_e4m3fn on an H100 or H200, against float64."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

FLOAT8 = torch.float8_e4m3fn
DESCALES = ("q_descale", "k_descale", "v_descale")


@pytest.fixture
def make():
    generator = torch.Generator("cuda").manual_seed(7)

    def draw(batch, seq_q, seq_k, heads, kv_heads, d):
        def rand(length, count):
            shape = (batch, length, count, d)
            return torch.randn(shape, device="cuda", generator=generator).to(FLOAT8)

        return rand(seq_q, heads), rand(seq_k, kv_heads), rand(seq_k, kv_heads)

    return draw


def factors(*shape):
    return dict.fromkeys(DESCALES, torch.rand(shape, device="cuda") + 0.5)


def check(tensors, **options):
    """A probability is off by half a unit of e4m3, 1/16, at most, the result by one of bfloat16
    more; scores by what the tensor cores' adder cuts off, 2**-13 of the largest product."""
    result, lse = tiercel.attention(*tensors, return_lse=True, **options)
    q, k, v = (x.double() for x in tensors)
    truth, sums = tiercel.ref.attention(q, k, v, return_lse=True, **options)
    largest = tiercel.ref.attention(q, k, v.abs(), **options)
    assert result.dtype == torch.bfloat16
    error = (result.double() - truth).abs()
    assert bool((error <= 0.07 * largest).all())
    assert float(error.norm() / truth.norm().clamp_min(1e-9)) < 0.03
    torch.testing.assert_close(lse.double(), sums.double(), rtol=1e-3, atol=1e-2)


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_small(make, d, causal):
    for sizes in [(1, 1, 1, 1, 1), (2, 130, 130, 2, 1), (1, 200, 300, 3, 3), (2, 65, 20, 4, 2)]:
        check(make(*sizes, d), causal=causal, **factors(sizes[4]))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_q", [1, 63, 64, 127, 129, 193, 511, 1000])
@pytest.mark.parametrize("seq_k", [1, 8, 127, 128, 129, 192, 257, 513, 2047])
def test_ragged(make, d, causal, seq_q, seq_k):
    check(make(2, seq_q, seq_k, 4, 2, d), causal=causal)


@pytest.mark.parametrize("d", [16, 48, 80, 112])
def test_other_head_dimensions(make, d):
    check(make(2, 300, 300, 4, 2, d), causal=True)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 2), (32, 8)])
def test_heads_and_many_tiles(make, d, causal, heads):
    check(make(5, 700, 700, *heads, d), causal=causal, **factors(5, heads[1]))
    check(make(1, 4096, 4096, *heads, d), causal=causal, **factors())


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("window", [(0, 0), (5, 0), (None, 7), (100, 30), (200, None), (4096, 0)])
def test_window_and_softcap(make, d, window):
    for sizes in [(1, 130, 130, 2, 2), (2, 500, 130, 4, 2)]:
        check(make(*sizes, d), window=window)
        check(make(*sizes, d), window=window, softcap=15.0, **factors(1))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("positive", [(0, 0), (0, 300), (700, 1100)])
def test_scores_of_one_sign(make, d, positive):
    """Floats below 0 do not compare as integers do."""
    q, k, v = make(2, 1100, 1100, 4, 2, d)
    k = -k.float().abs()
    k[:, slice(*positive)] *= -1
    check((q.float().abs().to(q.dtype), k.to(q.dtype), v))


def test_sums_of_many_keys(make):
    """Values of one sign: an adder of 13 bits that kept all of it would lose several parts in a
    hundred."""
    q, k, v = make(1, 128, 65536, 1, 1, 128)
    q, v = (q.float() * 0.1).to(FLOAT8), (v.float().abs() + 0.5).to(FLOAT8)
    result = tiercel.attention(q, k, v)
    truth = tiercel.ref.attention(q.double(), k.double(), v.double())
    assert float(((result.double() - truth) / truth).abs().mean()) < 3e-3


def rotation(d):
    """Orthogonal, with all numbers of one size and random signs: it spreads what stands out."""
    spread = torch.ones(1, 1)
    while len(spread) < d:
        spread = torch.cat([torch.cat([spread, spread], 1), torch.cat([spread, -spread], 1)])
    signs = torch.randn(d, generator=torch.Generator().manual_seed(7)).sign()
    return (signs[:, None] * spread / d**0.5).cuda()


@pytest.mark.parametrize(("rotated", "bound"), [(False, 2.4e-2), (True, 9.1e-3)])
def test_outliers(rotated, bound):
    """FlashAttention-3's distribution, N(0, 1) + N(0, 100) * Bernoulli(0.001), with one factor a
    tensor: at most 1.05 times the error that rounding q, k, v and probabilities has, and what its
    paper has of plain FP8 and of its own, whose q and k are rotated too."""
    generator = torch.Generator("cuda").manual_seed(7)

    def rand():
        shape = (1, 2048, 8, 128)
        drawn, far = (torch.randn(shape, device="cuda", generator=generator) for _ in range(2))
        rare = torch.rand(shape, device="cuda", generator=generator) < 0.001
        return drawn + 10 * far * rare

    wide = [rand() for _ in range(3)]
    truth = tiercel.ref.attention(*(x.double() for x in wide))
    if rotated:
        wide = [x @ rotation(128) for x in wide[:2]] + wide[2:]
    scales = [x.abs().amax() / 448 for x in wide]
    tensors = [(x / scale).to(FLOAT8) for x, scale in zip(wide, scales, strict=True)]
    result = tiercel.attention(*tensors, **dict(zip(DESCALES, scales, strict=True))).double()
    q, k, v = (x.double() * s.double() for x, s in zip(tensors, scales, strict=True))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 128**-0.5).softmax(-1)
    top = weights.amax(-1, keepdim=True)
    rounded = (weights / top * 256).to(FLOAT8).double() * top / 256
    least = torch.einsum("bhqk,bkhd->bqhd", rounded, v)

    def rmse(x):
        return float((x - truth).square().mean().sqrt())

    assert rmse(result) <= 1.05 * rmse(least)
    assert rmse(result) <= bound


def test_strides_and_streams(make):
    q, k, v = make(2, 300, 300, 8, 4, 64)
    wide = torch.cat([k, v, q], 2)
    parts = wide[:, :, 8:], wide[:, :, :4], wide[:, :, 4:8]
    expected = tiercel.attention(q, k, v, causal=True)
    assert torch.equal(tiercel.attention(*parts, causal=True), expected)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.equal(tiercel.attention(*parts, causal=True), expected)


def test_graph_and_out(make):
    q, k, v = make(2, 700, 700, 4, 2, 128)
    scale = torch.full((4,), 0.5, device="cuda")[:2]
    out = torch.zeros(2, 700, 4, 128, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiercel.attention(q, k, v, v_descale=scale, out=out)
    scale.fill_(2.0)
    v.copy_(v.flip(1).clone())
    graph.replay()
    assert torch.equal(out, tiercel.attention(q, k, v, v_descale=scale))


def test_no_keys():
    q = torch.zeros(2, 5, 4, 64, device="cuda").to(FLOAT8)
    k = torch.zeros(2, 0, 2, 64, device="cuda").to(FLOAT8)
    result, lse = tiercel.attention(q, k, k, return_lse=True)
    assert bool((result == 0).all()) and bool((lse == -torch.inf).all())
