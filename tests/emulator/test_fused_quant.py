# SPDX-License-Identifier: Apache-2.0
"""rms_norm_quant, layer_norm_quant and act_and_mul_quant, run by the emulator, against float64."""

import pytest
import torch
from support.emulator import sm90
from support.near import BF16, F16, normal

import tiercel
from tiercel.core.dispatch import variants as families

FP8, INF, NAN = torch.float8_e4m3fn, float("inf"), float("nan")
GRANULARITIES = ["tensor", "row", "1x128"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def quantised(values, granularity):
    """Tensors to write to, and what the values' scales are in float64."""
    rows, columns = values.shape
    shape = {"tensor": (1, 1), "row": (rows, 1), "1x128": (rows, -(-columns // 128))}[granularity]
    given = torch.full(shape, 0.02)
    if granularity == "tensor":
        return torch.zeros(rows, columns).to(FP8), given, given.double()
    wide = torch.nn.functional.pad(values.abs(), (0, -columns % 128))
    groups = wide.view(rows, -1, 128).amax(-1)
    largest = groups if granularity == "1x128" else groups.amax(1, keepdim=True)
    return torch.zeros(rows, columns).to(FP8), given, largest / 448


def check_quantised(q, scale, values, scales, more=0.0):
    """Scales to float32's sums; codes times scales to half a unit of e4m3. `more`: float32's error
    of a value that is a difference."""
    torch.testing.assert_close(scale.double(), scales, rtol=2**-20, atol=more / 448)
    wide = scale.double().repeat_interleave(128 if scale.shape[1] > 1 else q.shape[1], 1)
    wide = wide[:, : q.shape[1]]
    allowed = 2.0**-4 * 1.001 * values.abs() + 2.0**-10 * 1.001 * wide + more
    due = values.clamp(-448 * wide, 448 * wide)
    assert ((q.double() * wide - due).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("rows", "columns", "kind"),
    [(3, 256, "plain"), (2, 4104, "residual"), (3, 200, "both"), (2, 8200, "plain")],
)
def test_rms_norm_quant(rows, columns, kind, granularity, dtype):
    x = normal(rows, columns + 8, dtype=dtype)[:, :columns]
    weight = None if columns == 200 else torch.rand(columns) + 0.5
    weight = weight.to(dtype) if columns == 256 else weight
    residual = None if kind == "plain" else normal(rows, columns, dtype=dtype)
    normed = torch.zeros(rows, columns, dtype=dtype) if kind == "both" else None
    total = x if residual is None else x + residual
    values = total.double()
    values = values * (values.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    values = values if weight is None else values * weight.double()
    q, scale, scales = quantised(values, granularity)
    sm90("rms_norm_quant")(x, q, scale, weight, granularity, 1e-5, residual, normed, None)
    check_quantised(q, scale, values, scales)
    if residual is not None:
        assert torch.equal(residual, total)
    if normed is not None:
        torch.testing.assert_close(normed.double(), values, rtol=2**-7, atol=1e-6)


def layer_normed(x, weight, bias, eps):
    """In float64."""
    wide = x.double()
    wide = wide - wide.mean(1, keepdim=True)
    wide = wide * (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    wide = wide if weight is None else wide * weight.double()
    return wide if bias is None else wide + bias.double()


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("rows", "columns", "kind"),
    [(3, 256, "plain"), (2, 4104, "residual"), (3, 200, "both"), (2, 8200, "plain"), (1, 8, "")],
)
def test_layer_norm_quant(rows, columns, kind, granularity, dtype):
    """Rows whose mean is 9 deviations; parameters of x's dtype, of float32, or none."""
    x = (normal(rows, columns + 8, dtype=torch.float32) + 9).to(dtype)[:, :columns]
    weight, bias = torch.rand(columns) + 0.5, normal(columns, dtype=torch.float32)
    if columns == 256:
        weight, bias = weight.to(dtype), bias.to(dtype)
    if columns in (8, 200):
        weight = None
    if columns == 8200:
        bias = None
    residual = None if kind in ("plain", "") else normal(rows, columns, dtype=dtype)
    normed = torch.zeros(rows, columns, dtype=dtype) if kind == "both" else None
    total = x if residual is None else x + residual
    values = layer_normed(total, weight, bias, 1e-5)
    q, scale, scales = quantised(values, granularity)
    given = (weight, bias, granularity, 1e-5, residual, normed, None)
    sm90("layer_norm_quant")(x, q, scale, *given)
    check_quantised(q, scale, values, scales, more=2.0**-19)
    if residual is not None:
        assert torch.equal(residual, total)
    if normed is not None:
        torch.testing.assert_close(normed.double(), values, rtol=2**-7, atol=1e-5)


def test_layer_norm_quant_cancels_nothing():
    """A mean of 256 deviations, which float32's squares of x would bury."""
    x = (normal(3, 512, dtype=torch.float32) + 256).to(F16)
    values = layer_normed(x, None, None, 0.0)
    q, scale, scales = quantised(values, "row")
    sm90("layer_norm_quant")(x, q, scale, None, None, "row", 0.0, None, None, None)
    check_quantised(q, scale, values, scales, more=2.0**-18)


def test_layer_norm_quant_of_many_rows():
    x, weight, bias = normal(270, 264, dtype=BF16), torch.rand(264), torch.rand(264)
    values = layer_normed(x, weight, bias, 1e-5)
    q, scale, scales = quantised(values, "row")
    sm90("layer_norm_quant")(x, q, scale, weight, bias, "row", 1e-5, None, None, None)
    check_quantised(q, scale, values, scales, more=2.0**-19)


def test_rms_norm_quant_of_many_rows():
    x, weight = normal(270, 264, dtype=BF16), torch.rand(264)
    values = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight
    q, scale, scales = quantised(values, "row")
    sm90("rms_norm_quant")(x, q, scale, weight, "row", 1e-6, None, None, None)
    check_quantised(q, scale, values, scales)


@pytest.mark.parametrize("name", ["rms_norm_quant", "layer_norm_quant"])
def test_scales_in_the_batch_invariant_mode(name):
    """With more than 264 rows a thread would have two vectors, and sums another order: of so many
    rows, some have another scale then."""
    parameters = [None] * (2 if name == "layer_norm_quant" else 1)
    x = normal(270, 2048, dtype=BF16)

    def scales(rows):
        q, scale, _ = quantised(rows.double(), "row")
        sm90(name)(rows, q, scale, *parameters, "row", 1e-6, None, None, None)
        return scale

    assert not torch.equal(scales(x)[:100], scales(x[:100]))
    with tiercel.batch_invariant():
        assert torch.equal(scales(x)[:100], scales(x[:100]))


@pytest.mark.parametrize("name", ["rms_norm_quant", "layer_norm_quant"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_special_values_of_a_norm(granularity, name):
    """A NaN makes NaN of what shares its scale; a row of zeros has the smallest scale."""
    x = normal(4, 512, dtype=BF16)
    x[0, 300], x[1], x[2, 5] = NAN, 0, INF
    results = []
    parameters = [None] * (2 if name == "layer_norm_quant" else 1)
    for run in (sm90(name), families[name][0].backends["ref"].run):
        q, scale, _ = quantised(x.double(), granularity)
        run(x, q, scale, *parameters, granularity, 1e-6, None, None, None)
        results.append((q.float(), scale))
    for got, due in zip(*results, strict=True):
        assert torch.equal(got.isnan(), due.isnan())
        assert torch.equal(got[1:2], due[1:2])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("rows", "columns"), [(3, 256), (2, 200), (1, 8200), (266, 8)])
def test_act_and_mul_quant(rows, columns, granularity, activation, dtype):
    x = normal(rows, 2 * columns, dtype=dtype)
    gate, factor = x.double().chunk(2, 1)
    function = getattr(torch.nn.functional, activation.removesuffix("_tanh"))
    more = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    values = function(gate, **more) * factor
    q, scale, scales = quantised(values, granularity)
    sm90("act_and_mul_quant")(x, q, scale, activation, granularity, None)
    torch.testing.assert_close(scale.double(), scales, rtol=2**-16, atol=0)
    check_quantised(q, scale, values, scale.double())
