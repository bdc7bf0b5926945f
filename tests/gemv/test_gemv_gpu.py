# SPDX-License-Identifier: Apache-2.0
"""nvfp4_gemv and nvfp4_linear on an H100 or H200, against float64."""

import pytest
import torch

import tiercel
from tiercel import _C
from tiercel.ops.gemv.reference import permute_scales
from tiercel.ops.quant.reference import nvfp4_values

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(5)


def codes(generator, *shape):
    drawn = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
    return drawn.view(torch.float4_e2m1fn_x2)


def scales(generator, *shape, signed=False):
    drawn = torch.rand(shape, device="cuda", generator=generator)
    return (drawn * 2 - 1 if signed else drawn + 0.05).to(torch.float8_e4m3fn)


def gemv_data(generator, m, k, batches, signed=False):
    a = codes(generator, batches, m, k // 2).permute(1, 2, 0)
    b = codes(generator, batches, 1, k // 2).permute(1, 2, 0)
    scale_a = scales(generator, batches, m, k // 16, signed=signed).permute(1, 2, 0)
    scale_b = scales(generator, batches, 1, k // 16, signed=signed).permute(1, 2, 0)
    c = torch.full((batches, m, 1), torch.nan, dtype=torch.float16, device="cuda").permute(1, 2, 0)
    permuted = permute_scales(scale_a), permute_scales(scale_b)
    return a, b, scale_a.cpu(), scale_b.cpu(), *permuted, c


def values(q, scale):
    wide = nvfp4_values(q).double().unflatten(-1, (scale.shape[-1], 16))
    return (wide * scale.double()[..., None]).flatten(-2)


def gemv_truth(a, b, scale_a, scale_b, *_):
    matrix = values(a.permute(2, 0, 1), scale_a.cuda().permute(2, 0, 1))
    vector = values(b.permute(2, 0, 1), scale_b.cuda().permute(2, 0, 1))
    return (matrix @ vector.mT).permute(1, 2, 0)


def assert_close(got, due):
    """One rounding to the result's dtype, and float32 sums: 2**-24 of the summands, many times."""
    unit = torch.finfo(got.dtype).eps / 2
    scale = due.square().mean(0, keepdim=True).sqrt() + 1e-30
    errors = (got.double() - due).abs()
    worst = errors / (unit * due.abs() + 1e-5 * scale + 2.0**-25)
    assert float(worst.max()) <= 1.01 if worst.numel() else True


@pytest.mark.sanitize
@pytest.mark.parametrize("batches", [1, 3])
def test_gemv_sizes(generator, batches):
    sizes = [(1, 32), (7, 64), (31, 96), (33, 1024), (64, 1056), (127, 2080), (128, 4096)]
    for m, k in [*sizes, (129, 160), (1000, 7168), (300, 16384)]:
        data = gemv_data(generator, m, k, batches)
        result = tiercel.nvfp4_gemv(*data)
        assert result is data[-1]
        assert_close(result, gemv_truth(*data))


@pytest.mark.parametrize("size", [(7168, 16384, 1), (4096, 7168, 8), (7168, 2048, 4)])
def test_gemv_large(generator, size):
    data = gemv_data(generator, *size)
    assert_close(tiercel.nvfp4_gemv(*data), gemv_truth(*data))


@pytest.mark.sanitize
def test_gemv_every_product(generator):
    """All 256 pairs of codes, each alone in its group's other place."""
    first, second = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    a = torch.zeros(256, 32, dtype=torch.uint8)
    a[:, 5] = first.flatten() << 4  # the odd value of a byte
    a[:, 9] = first.flatten()  # the even one, of another group
    for code in range(16):
        b = torch.zeros(1, 32, dtype=torch.uint8)
        b[:, 5], b[:, 9] = code << 4, code
        ones = [torch.ones(n, 4, 1).to(torch.float8_e4m3fn) for n in (256, 1)]
        permuted = [permute_scales(s.cuda()) for s in ones]
        packed = [t.cuda().view(torch.float4_e2m1fn_x2)[..., None] for t in (a, b)]
        c = torch.empty(256, 1, 1, dtype=torch.float16, device="cuda")
        data = (*packed, *ones, *permuted, c)
        assert torch.equal(tiercel.nvfp4_gemv(*data).double(), gemv_truth(*data))
    del second


@pytest.mark.sanitize
def test_gemv_scales(generator):
    """Negative scales, and NaN ones: those rows and no others."""
    data = gemv_data(generator, 200, 512, 2, signed=True)
    assert_close(tiercel.nvfp4_gemv(*data), gemv_truth(*data))
    bits = data[2].view(torch.uint8)
    bits[131, 7, 1] = 0x7F
    data = (*data[:4], permute_scales(data[2].cuda()), *data[5:])
    nan = tiercel.nvfp4_gemv(*data).isnan().nonzero().tolist()
    assert nan == [[131, 0, 1]]


@pytest.mark.sanitize
def test_gemv_strides(generator):
    m, k, batches = 130, 256, 2
    data = gemv_data(generator, m, k, batches)
    wide = torch.zeros(batches, m, k, dtype=torch.uint8, device="cuda")
    wide[..., : k // 2] = data[0].view(torch.uint8).permute(2, 0, 1)
    a = wide.view(torch.float4_e2m1fn_x2)[..., : k // 2].permute(1, 2, 0)
    c = torch.full((m, 3, batches), 7.0, dtype=torch.float16, device="cuda")
    result = tiercel.nvfp4_gemv(a, *data[1:6], c[:, 1:2])
    assert_close(result, gemv_truth(*data))
    assert (c[:, 0] == 7).all() and (c[:, 2] == 7).all()


def test_gemv_empty(generator):
    assert tiercel.nvfp4_gemv(*gemv_data(generator, 0, 64, 2)).shape == (0, 1, 2)
    assert tiercel.nvfp4_gemv(*gemv_data(generator, 4, 64, 0)).shape == (4, 1, 0)
    assert (tiercel.nvfp4_gemv(*gemv_data(generator, 4, 0, 2)) == 0).all()


def test_gemv_falls_back(generator):
    data = gemv_data(generator, 64, 48, 1)
    with pytest.raises(NotImplementedError, match="k must be a multiple of 32, got 48"):
        tiercel.nvfp4_gemv(*data, backend="sm90")
    with pytest.warns(tiercel.FallbackWarning, match="k must be a multiple of 32"):
        assert_close(tiercel.nvfp4_gemv(*data), gemv_truth(*data))


def linear_truth(x, weight, scale, factor=1.0):
    return (x.double() @ values(weight, scale).T) * factor


def linear_data(generator, tokens, features, k):
    x = torch.randn(tokens, k, device="cuda", generator=generator).bfloat16()
    return x, codes(generator, features, k // 2), scales(generator, features, k // 16)


def assert_tokens_close(got, due):
    assert_close(got.T, due.T)  # each token by its own size


@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17, 200])
def test_linear_sizes(generator, tokens):
    for features, k in [(1, 64), (15, 128), (16, 256), (17, 320), (100, 2880), (512, 1024)]:
        data = linear_data(generator, tokens, features, k)
        assert_tokens_close(tiercel.nvfp4_linear(*data), linear_truth(*data))


@pytest.mark.parametrize("tokens", [1, 3, 8, 16])
def test_linear_large(generator, tokens):
    shapes = [(7168, 16384), (4096, 4096), (14336, 4096), (4096, 14336), (1024, 8192), (64, 65536)]
    for features, k in shapes:
        data = linear_data(generator, tokens, features, k)
        assert_tokens_close(tiercel.nvfp4_linear(*data), linear_truth(*data))


@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_linear_cuts(generator, tokens):
    """Several turns, passes and groups, of blocks alone and in clusters."""
    cuts = [(1, 1, 1, 2), (1, 2, 3, 2), (1, 1, 12, 2), (2, 1, 4, 2), (2, 3, 5, 2), (4, 4, 2, 2)]
    for features, k in [(3000, 2880), (2500, 4096), (70, 8192)]:
        data = linear_data(generator, tokens, features, k)
        due = linear_truth(*data)
        for cut in [*cuts, (8, 1, 2, 2)]:
            out = torch.full((tokens, features), torch.nan, dtype=torch.bfloat16, device="cuda")
            _C.nvfp4_linear(*data, None, out, cut)
            assert_tokens_close(out, due)


@pytest.mark.sanitize
def test_linear_any_magnitude(generator):
    """From below the normal floats to the largest, in every token and across tokens."""
    x, weight, scale = linear_data(generator, 16, 80, 512)
    powers = torch.linspace(-130, 110, 16, device="cuda").exp2()
    x = (x.float() * powers[:, None]).bfloat16()
    got, due = tiercel.nvfp4_linear(x, weight, scale), linear_truth(x, weight, scale)
    assert_tokens_close(got[1:], due[1:])
    x[3, 100:] *= 2.0**-20  # small beside the largest, yet exact
    assert_tokens_close(
        tiercel.nvfp4_linear(x, weight, scale)[1:], linear_truth(x, weight, scale)[1:]
    )


@pytest.mark.sanitize
def test_linear_special_values(generator):
    x, weight, scale = linear_data(generator, 4, 64, 256)
    x[1, 5], x[2, 6] = torch.inf, torch.nan
    x[3] = 0
    got = tiercel.nvfp4_linear(x, weight, scale)
    due = linear_truth(x, weight, scale)
    assert torch.equal(got.isnan(), due.isnan()) and torch.equal(got.isinf(), due.isinf())
    assert (got[3] == 0).all()
    assert_tokens_close(got[:1], due[:1])


@pytest.mark.sanitize
def test_linear_global_scale_and_out(generator):
    x, weight, scale = linear_data(generator, 5, 200, 512)
    given = torch.tensor([0.3], device="cuda")
    out = torch.full((7, 200), 7.0, dtype=torch.bfloat16, device="cuda")
    result = tiercel.nvfp4_linear(x, weight, scale, global_scale=given, out=out[1:6])
    assert_tokens_close(result, linear_truth(x, weight, scale, given.double()))
    assert (out[0] == 7).all() and (out[6] == 7).all()
    assert torch.equal(tiercel.nvfp4_linear(x, weight, scale, global_scale=given), result)


def test_linear_empty(generator):
    assert tiercel.nvfp4_linear(*linear_data(generator, 0, 8, 64)).shape == (0, 8)
    assert tiercel.nvfp4_linear(*linear_data(generator, 3, 0, 64)).shape == (3, 0)
    assert (tiercel.nvfp4_linear(*linear_data(generator, 3, 8, 0)) == 0).all()


def test_linear_falls_back(generator):
    data = linear_data(generator, 2, 64, 48)
    with pytest.raises(NotImplementedError, match="K must be a multiple of 64, got 48"):
        tiercel.nvfp4_linear(*data, backend="sm90")
    with pytest.warns(tiercel.FallbackWarning):
        assert_tokens_close(tiercel.nvfp4_linear(*data), linear_truth(*data))


def test_graph_replay(generator):
    data = gemv_data(generator, 300, 1024, 2)
    x, weight, scale = linear_data(generator, 8, 300, 1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # first calls and all
        tiercel.nvfp4_gemv(*data)
        first = tiercel.nvfp4_linear(x, weight, scale)
        second = tiercel.nvfp4_linear(first[:, :256].contiguous(), weight[:, :128], scale[:, :16])
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert_close(data[-1], gemv_truth(*data))
        assert_tokens_close(first, linear_truth(x, weight, scale))
        narrow = weight[:, :128].contiguous(), scale[:, :16].contiguous()
        assert_tokens_close(second, linear_truth(first[:, :256], *narrow))
