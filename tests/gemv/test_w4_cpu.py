# SPDX-License-Identifier: Apache-2.0
"""w4_linear and pack_w4 without a GPU."""

import pytest
import torch
from support.w4_weights import draw

import tiercel
from tiercel.ops.gemv.reference import pack_w4, w4_values

pytestmark = pytest.mark.torch

LAYOUTS = ["nvfp4", "mxfp4", "int4-32", "int4-64-zero", "int4-128", "int4-128-zero"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_products(layout):
    weights = draw(layout, 12, 256, torch.bfloat16, "cpu")
    values = w4_values(weights.packed, weights.scale, weights.format, weights.zero_point)
    assert torch.equal(values.double(), weights.values)
    x = torch.randn(3, 256).bfloat16()
    bias, factor = torch.randn(12).bfloat16(), torch.tensor([0.3])
    got = tiercel.w4_linear(
        x,
        weights.packed,
        weights.scale,
        format=weights.format,
        zero_point=weights.zero_point,
        global_scale=factor,
        bias=bias,
        activation="relu",
    )
    due = (x.double() @ weights.values.T * factor.double() + bias.double()).relu()
    torch.testing.assert_close(got.double(), due, rtol=5e-3, atol=1e-3)


def test_exponents():
    scale = torch.tensor([[0, 1, 127, 254, 255]], dtype=torch.uint8)
    packed = torch.full((1, 80), 0x22, dtype=torch.uint8)  # ones
    values = w4_values(packed, scale, "mxfp4").view(5, 32)[:, 0].double().tolist()
    assert values[:4] == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and values[4] != values[4]


def packed_words(codes, order=range(8)):
    """int32 of eight codes each along the last dimension; place i of a word has code order[i]."""
    groups = codes.long().unflatten(-1, (-1, 8))
    words = sum(groups[..., source] << 4 * place for place, source in enumerate(order))
    return (
        words.to(torch.int32) if int(words.max()) < 2**31 else (words - (words >> 31 << 32)).int()
    )


AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("layout", ["compressed_tensors", "gptq", "awq"])
def test_int4_checkpoints(layout, zeros):
    n, k, group = 16, 256, 64
    codes = torch.randint(0, 16, (n, k))
    points = torch.randint(1, 16, (n, k // group))
    scale = torch.rand(n, k // group).half()
    if layout == "compressed_tensors":
        given = packed_words(codes), scale, packed_words(points.T).T
    elif layout == "gptq":
        given = packed_words(codes).T, scale.T, packed_words(points.T - 1)
    else:
        given = packed_words(codes.T, AWQ), scale.T, packed_words(points.T, AWQ)
    packed = pack_w4(given[0], given[1], layout=layout, zero_point=given[2] if zeros else None)
    assert packed.format == "int4"
    assert packed.weight.dtype == torch.uint8 and packed.weight.is_contiguous()
    got = w4_values(packed.weight, packed.scale, packed.format, packed.zero_point)
    offsets = (points if zeros else torch.full_like(points, 8)).repeat_interleave(group, 1)
    assert torch.equal(got, (codes - offsets) * scale.float().repeat_interleave(group, 1))


def test_float_checkpoints_are_views():
    weights = draw("mxfp4", 8, 128, torch.bfloat16, "cpu")
    blocks = weights.packed.view(8, 4, 16)
    packed = pack_w4(blocks, weights.scale, layout="gpt_oss")
    assert packed.weight.data_ptr() == blocks.data_ptr() and packed.format == "mxfp4"
    x = torch.randn(2, 128).bfloat16()
    due = tiercel.w4_linear(x, weights.packed, weights.scale)
    assert torch.equal(tiercel.w4_linear(x, **packed._asdict()), due)
    weights = draw("nvfp4", 8, 128, torch.bfloat16, "cpu")
    packed = pack_w4(
        weights.packed, weights.scale, layout="modelopt", global_scale=torch.tensor(0.5)
    )
    assert packed.format == "nvfp4" and packed.global_scale.tolist() == [0.5]
    with pytest.raises(ValueError, match="`layout` must be one of gpt_oss, .*, got 'exl2'"):
        pack_w4(weights.packed, weights.scale, layout="exl2")
    with pytest.raises(TypeError, match="`weight` must have dtype int32, got torch.uint8"):
        pack_w4(weights.packed, weights.scale, layout="awq")


@pytest.mark.parametrize("layout", ["mxfp4", "int4-64-zero", "int4-128"])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_float8_activations(layout, scale_dtype):
    weights = draw(layout, 12, 256, scale_dtype, "cpu")
    x, x_scale = tiercel.fp8_quantize(torch.randn(3, 256).bfloat16(), "row")
    bias = torch.randn(12).bfloat16()
    arguments = {"format": weights.format, "zero_point": weights.zero_point, "bias": bias}
    terms = x.double() @ weights.values.T
    for scale in (x_scale, x_scale[:, 0], x_scale[:1], x_scale[0, 0]):
        got = tiercel.w4_linear(x, weights.packed, weights.scale, x_scale=scale, **arguments)
        factor = scale.double().reshape(-1, 1)
        assert got.dtype == torch.bfloat16
        due = terms * factor + bias.double()
        torch.testing.assert_close(got.double(), due, rtol=5e-3, atol=1e-3)


def call(layout="mxfp4", **changes):
    weights = draw(layout, 8, 128, torch.bfloat16, "cpu")
    arguments = {
        "x": torch.ones(2, 128, dtype=torch.bfloat16),
        "weight": weights.packed,
        "scale": weights.scale,
        "format": weights.format,
    } | changes
    return tiercel.w4_linear(**arguments)


HALVES = torch.ones(8, 3, dtype=torch.bfloat16)
BYTES = torch.ones(8, 2, dtype=torch.uint8)
FLOAT8 = torch.ones(2, 128).to(torch.float8_e4m3fn)
BAD = [
    (
        lambda: call(x=torch.ones(2, 48, dtype=torch.bfloat16), weight=torch.zeros(8, 24).byte()),
        ValueError,
        "w4_linear: `x` must have a multiple of 32 columns, got [2, 48]",
    ),
    (
        lambda: call("nvfp4", scale=torch.zeros(8, 8, dtype=torch.uint8)),
        TypeError,
        "w4_linear: `scale` must have dtype float8_e4m3fn, got uint8",
    ),
    (
        lambda: call(scale=torch.zeros(8, 8, dtype=torch.uint8)),
        ValueError,
        "w4_linear: `scale` must have shape [N, K / 32] = [8, 4], got [8, 8]",
    ),
    (
        lambda: call(zero_point=torch.ones(8, 4, dtype=torch.bfloat16)),
        ValueError,
        "w4_linear: `zero_point` is for int4 only",
    ),
    (
        lambda: call("int4-64", scale=HALVES),
        ValueError,
        "w4_linear: `scale` must have shape [N, K / group] with a group of 32, 64 or 128, "
        "got [8, 3]",
    ),
    (
        lambda: call("int4-64", zero_point=HALVES),
        ValueError,
        "w4_linear: `zero_point` must have shape as `scale` = [8, 2], got [8, 3]",
    ),
    (
        lambda: call("int4-64", zero_point=torch.ones(8, 2, dtype=torch.float16)),
        TypeError,
        "w4_linear: `zero_point` must have dtype bfloat16, got float16",
    ),
    (
        lambda: call(x=FLOAT8),
        TypeError,
        "w4_linear: `x` must have dtype bfloat16 or float16, got float8_e4m3fn",
    ),
    (
        lambda: call(x_scale=torch.ones(1)),
        TypeError,
        "w4_linear: `x` must have dtype float8_e4m3fn, got bfloat16",
    ),
    (
        lambda: call("nvfp4", x=FLOAT8, x_scale=torch.ones(1)),
        ValueError,
        "w4_linear: `format` must be 'mxfp4' or 'int4' where `x` is float8_e4m3fn, got 'nvfp4'",
    ),
    (
        lambda: call(x=FLOAT8, x_scale=torch.ones(3)),
        ValueError,
        "w4_linear: `x_scale` must have 1 or T = 2 elements, got shape [3]",
    ),
    (
        lambda: call("int4-64", x=FLOAT8, x_scale=torch.ones(2), scale=torch.ones(8, 2)),
        TypeError,
        "w4_linear: `scale` must have dtype uint8, float8_e4m3fn, bfloat16 or float16, got float32",
    ),
    (
        lambda: call("int4-64", x=FLOAT8, x_scale=torch.ones(2), scale=BYTES),
        TypeError,
        "w4_linear: `scale` must have dtype bfloat16 or float16, got uint8",
    ),
    (
        lambda: call(x=FLOAT8, x_scale=torch.ones(2), bias=torch.ones(8, dtype=torch.float16)),
        TypeError,
        "w4_linear: `bias` must have dtype bfloat16, got float16",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "text"), BAD)
def test_bad_arguments_are_named(wrong, error, text):
    with pytest.raises(error) as info:
        wrong()
    assert str(info.value) == text
