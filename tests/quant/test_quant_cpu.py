# SPDX-License-Identifier: Apache-2.0
"""fp8_quantize, nvfp4_quantize and nvfp4_dequantize with PyTorch and without a GPU."""

import math

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

GRANULARITIES = {"tensor": None, "row": (1, None), "1x128": (1, 128), "128x128": (128, 128)}
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(*shape, generator=generator).exp()
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


def float32(value):
    return torch.tensor(value, dtype=torch.float64).float().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_fp8_by_the_definition(dtype, granularity):
    """Python floats for the scales, torch's own conversion for the values."""
    x = random(130, 200, dtype=dtype)
    q, scale = tiercel.fp8_quantize(x, granularity)
    rows, columns = GRANULARITIES[granularity] or (130, 200)
    columns = columns or 200
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            largest = x[part].double().abs().max().item()
            assert scale[i, j].item() == float32(largest / 448.0)
            inverse = torch.tensor(float32(1.0 / scale[i, j].item()))
            due = (x[part].float() * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(q[part].view(torch.uint8), due.view(torch.uint8))
    assert q.shape == x.shape and scale.dtype == torch.float32


def test_fp8_error_is_half_a_unit():
    x = random(64, 512, dtype=torch.float32)
    for granularity in GRANULARITIES:
        q, scale = tiercel.fp8_quantize(x, granularity)
        rows, columns = -(-64 // scale.shape[0]), -(-512 // scale.shape[1])
        spread = scale.repeat_interleave(rows, 0)[:64].repeat_interleave(columns, 1)[:, :512]
        error = (q.double() * spread.double() - x.double()).abs()
        assert bool((error <= x.abs() * 2.0**-4 * 1.001 + spread * 2.0**-10 * 1.001).all())


def test_fp8_special_values():
    x = torch.zeros(5, 128)
    x[1, 3], x[2, 3], x[3, 3] = math.inf, math.nan, 1e-45
    x[1:, 5] = -1.0
    q, scale = tiercel.fp8_quantize(x, "row")
    assert scale[0].item() == 2.0**-126 and not q[0].float().any()
    assert scale[1].item() == math.inf and q[1].float().isnan().nonzero().tolist() == [[3]]
    assert scale[2].isnan() and q[2].float().isnan().all()
    assert q[4, 5].float() == -448


def test_given_scale():
    x, scale = random(8, 64), torch.full((1, 1), 0.01)
    q, same = tiercel.fp8_quantize(x, "tensor", scale=scale)
    assert same is scale
    inverse = scale.reciprocal()
    due = (x.float() * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(q.view(torch.uint8), due.view(torch.uint8))
    assert q.float().abs().max() == 448  # saturated


def nearest_code(value):
    """To the nearest magnitude, ties to the even code."""
    distances = [abs(value - m) for m in MAGNITUDES]
    closest = min(distances)
    return min((c for c in range(8) if distances[c] == closest), key=lambda c: c % 2)


@pytest.mark.parametrize("global_scale", [None, 0.01])
def test_nvfp4_by_the_definition(global_scale):
    x = random(6, 64, dtype=torch.float32)
    given = None if global_scale is None else torch.tensor([global_scale])
    q, scale = tiercel.nvfp4_quantize(x, global_scale=given)
    codes = torch.stack([q.view(torch.uint8) & 15, q.view(torch.uint8) >> 4], -1).flatten(1)
    for i in range(6):
        for g in range(4):
            group = x[i, 16 * g : 16 * g + 16]
            wanted = float32(group.abs().max().item() / 6.0)
            if given is not None:
                wanted = float32(wanted / given.item())
            due = torch.tensor(min(wanted, 448.0)).to(torch.float8_e4m3fn).float().item()
            assert scale[i, g].float().item() == due
            total = due if given is None else float32(due * given.item())
            inverse = float32(1.0 / total)
            for j, value in enumerate(group.tolist()):
                code = nearest_code(float32(abs(value) * inverse)) + (8 if value < 0 else 0)
                assert codes[i, 16 * g + j].item() == code


def test_nvfp4_there_and_back():
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)]).repeat(3, 2)
    x = values * torch.tensor([[1.0], [0.25], [448.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        back = tiercel.nvfp4_dequantize(*tiercel.nvfp4_quantize(x), dtype=dtype)
        assert torch.equal(back.double(), x.double())


def test_nvfp4_special_values():
    x = torch.full((4, 16), 6.0)
    x[0, 2], x[1, 2], x[2] = math.inf, math.nan, -1e-6
    q, scale = tiercel.nvfp4_quantize(x)
    assert scale[0].float() == 448 and scale[1].float().isnan() and scale[2].float() == 0
    back = tiercel.nvfp4_dequantize(q, scale, dtype=torch.float32)
    assert back[0, 2] == 448 * 6 and not back[0, 3:].any()
    assert back[1].isnan().all() and not back[2].any() and back[2].signbit().all()
    assert torch.equal(back[3], x[3])


def test_empty_and_strided():
    for granularity in GRANULARITIES:
        q, scale = tiercel.fp8_quantize(torch.empty(0, 128), granularity)
        assert q.shape == (0, 128) and scale.shape[0] == (1 if granularity == "tensor" else 0)
        base = random(64, 40).t()
        got = tiercel.fp8_quantize(base, granularity)
        due = tiercel.fp8_quantize(base.contiguous(), granularity)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, due, strict=True))
    q, scale = tiercel.nvfp4_quantize(torch.empty(3, 0))
    assert q.shape == scale.shape == (3, 0)


def test_out():
    x = random(20, 256)
    for granularity in GRANULARITIES:
        due = tiercel.fp8_quantize(x, granularity)
        out = tuple(torch.empty_like(t) for t in due)
        got = tiercel.fp8_quantize(x, granularity, out=out)
        assert got[0] is out[0] and got[1] is out[1]
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, due, strict=True))
    due = tiercel.nvfp4_quantize(x)
    out = tuple(torch.empty_like(t) for t in due)
    assert tiercel.nvfp4_quantize(x, out=out)[0] is out[0]
    assert torch.equal(out[0].view(torch.uint8), due[0].view(torch.uint8))
    back = torch.empty(20, 256)
    assert tiercel.nvfp4_dequantize(*due, out=back) is back
    assert torch.equal(back, tiercel.nvfp4_dequantize(*due, dtype=torch.float32))


ONE = torch.ones(1, 1)
BAD = [
    (
        lambda: tiercel.fp8_quantize(torch.ones(4, 8), "row", scale=ONE),
        ValueError,
        "a given `scale` needs granularity='tensor', got 'row'",
    ),
    (
        lambda: tiercel.nvfp4_quantize(torch.ones(4, 24)),
        ValueError,
        "`x` must have a multiple of 16 columns, got [4, 24]",
    ),
    (
        lambda: tiercel.nvfp4_dequantize(
            torch.zeros(4, 12, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            torch.ones(4, 1).to(torch.float8_e4m3fn),
        ),
        ValueError,
        "`q` must have a multiple of 8 columns, got [4, 12]",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD)
def test_bad_arguments_are_named(call, error, text):
    with pytest.raises(error) as info:
        call()
    assert str(info.value).partition(": ")[2] == text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 8), (130, 40), (256, 300), (5, 1)])
def test_the_transpose_is_quantised_like_a_matrix_of_its_own(shape, dtype):
    rows, columns = shape
    x = random(*shape, dtype=dtype)
    padded = torch.cat([x, x.new_zeros(-rows % 128, columns)])
    for granularity in ("1x128", "128x128"):
        q, scale, q_t, scale_t = tiercel.fp8_quantize_transpose(x, granularity)
        due, of_due = tiercel.fp8_quantize(x, granularity)
        assert torch.equal(q.float(), due.float()) and torch.equal(scale, of_due)
        due, of_due = tiercel.fp8_quantize(padded.t().contiguous(), granularity)
        if granularity == "1x128":
            of_due = of_due.t()
        assert torch.equal(q_t.float(), due.float()) and torch.equal(scale_t, of_due)
        assert q_t.shape == (columns, len(padded)) and not q_t[:, rows:].float().any()
        assert all(t.is_contiguous() for t in (q, scale, q_t, scale_t))


def test_a_transpose_has_no_other_granularity():
    with pytest.raises(ValueError, match="`granularity` must be '1x128' or '128x128', got 'row'"):
        tiercel.fp8_quantize_transpose(random(4, 8), "row")
