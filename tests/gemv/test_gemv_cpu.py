# SPDX-License-Identifier: Apache-2.0
"""nvfp4_gemv and nvfp4_linear with PyTorch and without a GPU."""

import pytest
import torch

import tiercel
from tiercel.ops.gemv.reference import permute_scales

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


def codes(generator, *shape):
    drawn = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return drawn.view(torch.float4_e2m1fn_x2)


def scales(generator, *shape):
    return (torch.rand(shape, generator=generator) + 0.1).to(torch.float8_e4m3fn)


def gemv_data(generator, m=9, k=64, batches=2):
    scale_a = scales(generator, batches, m, k // 16).permute(1, 2, 0)
    scale_b = scales(generator, batches, 1, k // 16).permute(1, 2, 0)
    return (
        codes(generator, batches, m, k // 2).permute(1, 2, 0),
        codes(generator, batches, 1, k // 2).permute(1, 2, 0),
        scale_a,
        scale_b,
        permute_scales(scale_a),
        permute_scales(scale_b),
        torch.zeros(m, 1, batches, dtype=torch.float16),
    )


def value(packed, i):
    code = packed.view(torch.uint8)[i // 2].item() >> 4 * (i % 2) & 15
    return E2M1[code & 7] * (-1 if code & 8 else 1)


def test_gemv_by_the_definition(generator):
    a, b, scale_a, scale_b, *_, c = data = gemv_data(generator)
    result = tiercel.nvfp4_gemv(*data)
    assert result is c
    for batch in range(2):
        for row in range(9):
            due = sum(
                value(a[row, :, batch].contiguous(), i)
                * scale_a[row, i // 16, batch].item()
                * value(b[0, :, batch].contiguous(), i)
                * scale_b[0, i // 16, batch].item()
                for i in range(64)
            )
            assert c[row, 0, batch].item() == pytest.approx(due, rel=1e-3, abs=1e-2)


def test_permuted_scales(generator):
    scale = scales(generator, 2, 300, 9).permute(1, 2, 0)
    permuted = permute_scales(scale)
    assert permuted.shape == (32, 4, 3, 4, 3, 2)
    assert permuted.stride() == (16, 4, 1536, 1, 512, 4608)
    wide, due = permuted.float(), scale.float()
    for row in (0, 31, 32, 127, 128, 299):
        for group in range(9):
            place = (row % 32, row % 128 // 32, row // 128, group % 4, group // 4)
            assert torch.equal(wide[place], due[row, group])


def test_linear_by_the_definition(generator):
    x = torch.randn(3, 64, generator=generator).bfloat16()
    weight, scale = codes(generator, 5, 32), scales(generator, 5, 4)
    given = torch.tensor([0.5])
    plain = tiercel.nvfp4_linear(x, weight, scale)
    scaled = tiercel.nvfp4_linear(x, weight, scale, global_scale=given)
    for t in range(3):
        for n in range(5):
            due = sum(
                x[t, i].item() * value(weight[n], i) * scale[n, i // 16].item() for i in range(64)
            )
            assert plain[t, n].item() == pytest.approx(due, rel=5e-3, abs=1e-3)
            assert scaled[t, n].item() == pytest.approx(due / 2, rel=5e-3, abs=1e-3)
    out = torch.empty(3, 5, dtype=torch.bfloat16)
    assert tiercel.nvfp4_linear(x, weight, scale, out=out) is out and torch.equal(out, plain)


def test_quantised_weights(generator):
    weight = torch.randn(32, 128, generator=generator).bfloat16()
    x = torch.randn(4, 128, generator=generator).bfloat16()
    q, scale = tiercel.nvfp4_quantize(weight)
    due = x.double() @ tiercel.nvfp4_dequantize(q, scale).double().T
    got = tiercel.nvfp4_linear(x, q, scale)
    torch.testing.assert_close(got.double(), due, rtol=5e-3, atol=1e-3)


def gemv_with(place, tensor):
    data = list(gemv_data(torch.Generator()))
    data[place] = tensor
    return tiercel.nvfp4_gemv(*data)


def linear_with(**changes):
    generator = torch.Generator()
    arguments = {
        "x": torch.ones(2, 64, dtype=torch.bfloat16),
        "weight": codes(generator, 8, 32),
        "scale": scales(generator, 8, 4),
    } | changes
    return tiercel.nvfp4_linear(**arguments)


BAD = [
    (
        lambda: gemv_with(4, torch.zeros(32, 4, 1, 4, 1, 2).to(torch.float8_e4m3fn)),
        ValueError,
        "nvfp4_gemv: `scale_a_permuted` must have the strides of the permuted layout, "
        "[16, 4, 512, 1, 512, 512], got [32, 8, 8, 2, 2, 1]",
    ),
    (
        lambda: gemv_with(5, torch.zeros(32, 4, 1, 4, 1, 2).to(torch.float8_e4m3fn)),
        ValueError,
        "nvfp4_gemv: `scale_b_permuted` must have the strides of the permuted layout, "
        "[16, 4, 512, 1, 512, 512], got [32, 8, 8, 2, 2, 1]",
    ),
    (
        lambda: tiercel.nvfp4_gemv(*gemv_data(torch.Generator(), k=24)),
        ValueError,
        "nvfp4_gemv: `a` must have a multiple of 16 values along K, 8 bytes, got 12 bytes "
        "(shape [9, 12, 2])",
    ),
    (
        lambda: linear_with(
            x=torch.ones(2, 24, dtype=torch.bfloat16),
            weight=codes(torch.Generator(), 8, 12),
            scale=scales(torch.Generator(), 8, 1),
        ),
        ValueError,
        "nvfp4_linear: `x` must have a multiple of 16 columns, got [2, 24]",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD)
def test_bad_arguments_are_named(call, error, text):
    with pytest.raises(error) as info:
        call()
    assert str(info.value) == text


def test_registered_backends_write_c(generator):
    data = gemv_data(generator)

    @tiercel.backends.register(op="nvfp4_gemv", name="test", language="torch")
    def backend(a, b, scale_a, scale_b, scale_a_permuted, scale_b_permuted, c):
        return tiercel.ref.nvfp4_gemv(
            a, b, scale_a, scale_b, scale_a_permuted, scale_b_permuted, c if keeps else c.clone()
        )

    try:
        keeps = True
        due = tiercel.nvfp4_gemv(*data).clone()
        data[-1].zero_()
        assert torch.equal(tiercel.nvfp4_gemv(*data, backend="test"), due)
        keeps = False
        with pytest.raises(ValueError, match="must return `c` itself, got another tensor"):
            tiercel.nvfp4_gemv(*data, backend="test")
    finally:
        tiercel.backends.unregister("nvfp4_gemv", "test")
