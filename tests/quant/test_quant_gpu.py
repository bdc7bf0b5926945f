# SPDX-License-Identifier: Apache-2.0
"""fp8_quantize, nvfp4_quantize and nvfp4_dequantize on an H100 or H200: the reference's bits."""

import pytest
import torch

import tiercel
from tiercel.core import selection

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GRANULARITIES = ["tensor", "row", "1x128", "128x128"]
SIZES = [(1, 8), (3, 128), (33, 136), (129, 256), (64, 4096), (5, 16384), (300, 1000), (2, 66560)]


@pytest.fixture
def rand():
    generator = torch.Generator("cuda").manual_seed(5)

    def make(*shape, dtype=torch.bfloat16, scale=3.0):
        values = torch.randn(*shape, device="cuda", generator=generator)
        # Magnitudes over many binades, as activations have.
        spread = torch.randn(*shape, device="cuda", generator=generator).mul_(2).exp_()
        return (values * spread * scale).to(dtype)

    return make


def assert_same_bits(got, due):
    """NaN is NaN, whatever its sign."""
    for a, b in zip(got, due, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
        if a.dtype == torch.float4_e2m1fn_x2:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        else:
            wide, other = a.float(), b.float()
            same = (wide == other) | (wide.isnan() & other.isnan())
            assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"


def fp8(x, granularity, **options):
    got = tiercel.fp8_quantize(x, granularity, **options)
    assert_same_bits(got, tiercel.ref.fp8_quantize(x, granularity))
    return got


def nvfp4(x, global_scale=None):
    got = tiercel.nvfp4_quantize(x, global_scale=global_scale)
    assert_same_bits(got, tiercel.ref.nvfp4_quantize(x, global_scale=global_scale))
    for dtype in DTYPES:
        options = {"global_scale": global_scale, "dtype": dtype}
        back = tiercel.nvfp4_dequantize(*got, **options)
        assert_same_bits([back], [tiercel.ref.nvfp4_dequantize(*got, **options)])
    return got


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_fp8_sizes(rand, dtype, granularity):
    for rows, columns in SIZES:
        fp8(rand(rows, columns, dtype=dtype), granularity)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_whole_tensors_of_any_size(rand, dtype):
    """One cluster, one cluster full, two kernels."""
    for rows in (1, 32, 63, 64, 128, 129, 700, 4096):
        fp8(rand(rows, 4096, dtype=dtype), "tensor")


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_given_scale(rand, dtype):
    x = rand(77, 520, dtype=dtype)
    for value in (0.25, 1e-3, 40.0):
        scale = torch.full((1, 1), value, device="cuda")
        q, same = tiercel.fp8_quantize(x, "tensor", scale=scale)
        assert same is scale
        assert_same_bits([q], [tiercel.ref.fp8_quantize(x, "tensor", scale=scale)[0]])


SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-40, 3e38, 65504.0, 1.0]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(rand, dtype):
    x = rand(len(SPECIAL) * 2, 256, dtype=dtype)
    for i, value in enumerate(SPECIAL):
        x[i, 7] = value
        x[len(SPECIAL) + i] = value
    for granularity in GRANULARITIES:
        fp8(x, granularity)
        for row in x:
            fp8(row[None], granularity)
    nvfp4(x)
    nvfp4(x, torch.tensor([0.37], device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_value(dtype):
    bits = torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.int16)
    x = (
        bits.view(dtype)
        if dtype != torch.float32
        else bits.int().bitwise_left_shift(16).view(dtype)
    )
    x = x[x.isfinite()].sort().values
    x = x[: x.numel() // 128 * 128].view(-1, 128)
    fp8(x, "row")
    nvfp4(x)
    nvfp4(x[:, torch.randperm(128, device="cuda")], torch.tensor([3e-4], device="cuda"))


def test_ties_go_to_the_even_code():
    magnitudes = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    up = torch.nextafter(magnitudes, torch.tensor(9.0))
    down = torch.nextafter(magnitudes, torch.tensor(-9.0)).abs()
    x = torch.stack([magnitudes, -magnitudes, up, down, -up]).cuda()
    x = torch.nn.functional.pad(x, (0, 6), value=6.0)
    q, scale = nvfp4(x)
    assert torch.equal(scale[0].float(), torch.ones(1, device="cuda"))
    codes = torch.stack([q.view(torch.uint8) & 15, q.view(torch.uint8) >> 4], -1).flatten(1)
    assert codes[0, :10].tolist() == [0, 0, 1, 2, 2, 4, 4, 6, 6, 7]
    assert codes[1, :10].tolist() == [8 + c for c in [0, 0, 1, 2, 2, 4, 4, 6, 6, 7]]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("global_scale", [None, 1.0, 7e-4, 250.0])
def test_nvfp4_sizes(rand, dtype, global_scale):
    given = None if global_scale is None else torch.tensor([global_scale], device="cuda")
    for rows, columns in [(1, 16), (3, 48), (33, 272), (129, 4096), (513, 7168)]:
        nvfp4(rand(rows, columns, dtype=dtype), given)


@pytest.mark.sanitize
def test_empty():
    for shape in [(0, 64), (4, 0), (0, 0)]:
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        for granularity in GRANULARITIES:
            fp8(x, granularity)
        nvfp4(x)


@pytest.mark.sanitize
def test_strides(rand):
    base = rand(140, 640)
    for x in (base[:, :256], base[::3, 64:320], base[:1].expand(9, 640)):
        for granularity in GRANULARITIES:
            fp8(x, granularity)
        nvfp4(x)
    for x in (base[:, 1:257], base.t()[:, :128], base[:, ::2]):
        with pytest.raises(NotImplementedError, match="multiples of 16 bytes"):
            tiercel.fp8_quantize(x, "row", backend="sm90")
        with pytest.warns(tiercel.FallbackWarning, match="multiples of 16 bytes"):
            tiercel.nvfp4_quantize(x)
        selection._warned.clear()


@pytest.mark.sanitize
def test_out(rand):
    x = rand(70, 256)
    for granularity in GRANULARITIES:
        due = tiercel.ref.fp8_quantize(x, granularity)
        out = tuple(torch.empty_like(t) for t in due)
        got = tiercel.fp8_quantize(x, granularity, out=out)
        assert got[0] is out[0] and got[1] is out[1]
        assert_same_bits(got, due)
    due = tiercel.ref.nvfp4_quantize(x)
    out = tuple(torch.empty_like(t) for t in due)
    assert_same_bits(tiercel.nvfp4_quantize(x, out=out), due)
    back = torch.empty_like(x)
    assert tiercel.nvfp4_dequantize(*out, out=back) is back
    assert_same_bits([back], [tiercel.ref.nvfp4_dequantize(*due)])


@pytest.mark.slow
def test_more_than_2_to_31_elements():
    rows, columns = (1 << 31) // 8192 + 3, 8192
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_()
    part = slice(rows - 128, rows)
    for granularity in ("row", "1x128"):
        q, scale = tiercel.fp8_quantize(x, granularity)
        due = tiercel.ref.fp8_quantize(x[part], granularity)
        assert_same_bits([q[part], scale[part]], due)
    given = torch.full((1, 1), 0.01, device="cuda")
    q, _ = tiercel.fp8_quantize(x, "tensor", scale=given)
    assert_same_bits([q[part]], tiercel.ref.fp8_quantize(x[part], "tensor", scale=given)[:1])
    _, scale = tiercel.fp8_quantize(x, "tensor")
    # (Of a CUDA tensor, a division by a number is a product with its reciprocal.)
    assert scale.item() == torch.tensor(x.abs().amax().item() / 448).item()
    q, scale = tiercel.nvfp4_quantize(x)
    assert_same_bits([q[part], scale[part]], tiercel.ref.nvfp4_quantize(x[part]))
    back = tiercel.nvfp4_dequantize(q, scale)
    assert_same_bits([back[part]], [tiercel.ref.nvfp4_dequantize(q[part], scale[part])])


@pytest.mark.parametrize("rows", [3, 64, 3000])
def test_graph_replay(rand, rows):
    x = rand(rows, 1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # first calls and all
        results = {name: tiercel.fp8_quantize(x, name) for name in GRANULARITIES}
        narrow = tiercel.nvfp4_quantize(x)
        back = tiercel.nvfp4_dequantize(*narrow)
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for name, result in results.items():
            assert_same_bits(result, tiercel.ref.fp8_quantize(x, name))
        assert_same_bits(narrow, tiercel.ref.nvfp4_quantize(x))
        assert_same_bits([back], [tiercel.ref.nvfp4_dequantize(*narrow)])


def test_runs_on_the_current_stream(rand):
    x, fresh = rand(500, 1024).zero_(), rand(500, 1024)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the default stream would read zeros meanwhile
        x.copy_(fresh)
        results = [tiercel.fp8_quantize(x, name) for name in GRANULARITIES]
    stream.synchronize()
    for name, result in zip(GRANULARITIES, results, strict=True):
        assert_same_bits(result, tiercel.ref.fp8_quantize(fresh, name))


def test_opcheck(rand):
    x = rand(6, 256)
    ops = torch.ops.tiercel
    for granularity in GRANULARITIES:
        torch.library.opcheck(ops.fp8_quantize.default, (x, granularity))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("granularity", ["1x128", "128x128"])
def test_transposed_too(granularity, dtype):
    """Bit for bit the reference's."""
    for rows, columns in [(1, 8), (128, 128), (130, 264), (1000, 1032), (4096, 2048)]:
        x = torch.randn(rows, columns + 16, device="cuda").to(dtype)[:, :columns]
        x = x * torch.logspace(-3, 3, rows, device="cuda")[:, None].to(dtype)
        due = tiercel.fp8_quantize_transpose(x, granularity, backend="ref")
        assert_same_bits(tiercel.fp8_quantize_transpose(x, granularity), due)
    assert [tuple(t.shape) for t in tiercel.fp8_quantize_transpose(x[:0])] == [
        *((0, 2048), (0, 16), (2048, 0), (0, 2048))
    ]
