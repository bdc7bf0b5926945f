# SPDX-License-Identifier: Apache-2.0
"""rms_norm_quant, layer_norm_quant and act_and_mul_quant on an H100 or H200, against float64."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

GRANULARITIES = ["tensor", "row", "1x128"]
FP8 = torch.float8_e4m3fn


@pytest.fixture
def draw():
    generator = torch.Generator("cuda").manual_seed(5)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    return normal


def to_write(rows, columns, granularity):
    shape = {"tensor": (1, 1), "row": (rows, 1), "1x128": (rows, -(-columns // 128))}[granularity]
    q = torch.zeros(rows, columns, device="cuda").to(FP8)
    return q, torch.full(shape, 0.03, device="cuda")


def assert_right(q, scale, values, granularity):
    """Scales to 16 of float32's last places; codes times scales to half a unit of e4m3."""
    columns = q.shape[1]
    if granularity == "tensor":
        assert (scale == torch.full_like(scale, 0.03)).all()
    else:
        wide = torch.nn.functional.pad(values.abs(), (0, -columns % 128))
        due = wide.unflatten(1, (-1, 128)).amax(-1)
        due = (due if granularity == "1x128" else due.amax(1, keepdim=True)) / 448
        torch.testing.assert_close(scale.double(), due, rtol=2**-17, atol=2**-126)
    each = scale.double().repeat_interleave(128 if scale.shape[1] > 1 else columns, 1)[:, :columns]
    due = values.clamp(-448 * each, 448 * each)
    allowed = 2.0**-4 * 1.001 * values.abs() + 2.0**-10 * 1.001 * each
    assert ((q.double() * each - due).abs() <= allowed).all()


def normed(x, weight, eps=1e-6):
    wide = x.double()
    wide = wide * (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    return wide if weight is None else wide * weight.double()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("columns", [8, 200, 4096, 7168, 8200, 16384])
@pytest.mark.parametrize("rows", [0, 1, 17, 300])
def test_rms_norm_quant(draw, rows, columns, granularity, dtype):
    x = draw(rows, columns + 8, dtype=dtype)[:, :columns]
    for weight in (None, draw(columns, dtype=dtype), draw(columns, dtype=torch.float32)):
        q, scale = to_write(rows, columns, granularity)
        tiercel.rms_norm_quant(x, q, scale, weight, granularity=granularity)
        assert_right(q, scale, normed(x, weight), granularity)


def layer_normed(x, weight, bias, eps=1e-5):
    wide = x.double()
    wide = wide - wide.mean(1, keepdim=True)
    wide = wide * (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    wide = wide if weight is None else wide * weight.double()
    return wide if bias is None else wide + bias.double()


def assert_near(q, scale, values, granularity):
    """assert_right for a sum that may cancel: float32's rounding of its terms, of a few units."""
    columns = q.shape[1]
    each = scale.double().repeat_interleave(128 if scale.shape[1] > 1 else columns, 1)[:, :columns]
    if granularity != "tensor":
        wide = torch.nn.functional.pad(values.abs(), (0, -columns % 128))
        due = wide.unflatten(1, (-1, 128)).amax(-1)
        due = (due if granularity == "1x128" else due.amax(1, keepdim=True)) / 448
        torch.testing.assert_close(scale.double(), due, rtol=2**-16, atol=2**-30)
    due = values.clamp(-448 * each, 448 * each)
    allowed = 2.0**-4 * 1.001 * values.abs() + 2.0**-10 * 1.001 * each + 2.0**-19
    assert ((q.double() * each - due).abs() <= allowed).all()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("columns", [8, 200, 4096, 7168, 8200, 16384])
@pytest.mark.parametrize("rows", [0, 1, 17, 300])
def test_layer_norm_quant(draw, rows, columns, granularity, dtype):
    """With a mean of 5 deviations, and parameters of both dtypes."""
    x = (draw(rows, columns + 8, dtype=torch.float32) + 5).to(dtype)[:, :columns]
    for weight, bias in (
        (None, None),
        (draw(columns, dtype=dtype), draw(columns, dtype=dtype)),
        (draw(columns, dtype=torch.float32), None),
        (None, draw(columns, dtype=torch.float32)),
    ):
        q, scale = to_write(rows, columns, granularity)
        tiercel.layer_norm_quant(x, q, scale, weight, bias, granularity=granularity)
        assert_near(q, scale, layer_normed(x, weight, bias), granularity)


@pytest.mark.sanitize
@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("columns", [200, 4096])
def test_residual_and_normed_of_layer_norm(draw, rows, columns):
    x, residual, weight, bias = (
        draw(*shape) for shape in ((rows, columns), (rows, columns), (columns,), (columns,))
    )
    total, result = x + residual, torch.zeros_like(x)
    q, scale = to_write(rows, columns, "row")
    tiercel.layer_norm_quant(x, q, scale, weight, bias, residual=residual, normed=result)
    assert torch.equal(residual, total)
    due = layer_normed(total, weight, bias)
    assert ((result.double() - due).abs() <= 1.02 * 2.0**-8 * due.abs() + 1e-5).all()
    assert_near(q, scale, due, "row")


@pytest.mark.sanitize
@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("columns", [200, 4096])
def test_residual_and_normed(draw, rows, columns):
    x, residual, weight = draw(rows, columns), draw(rows, columns), draw(columns)
    total, result = x + residual, torch.zeros_like(x)
    q, scale = to_write(rows, columns, "row")
    tiercel.rms_norm_quant(x, q, scale, weight, residual=residual, normed=result)
    assert torch.equal(residual, total)
    due = normed(total, weight)
    assert ((result.double() - due).abs() <= 1.02 * 2.0**-8 * due.abs() + 1e-6).all()
    assert_right(q, scale, due, "row")


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("columns", [8, 200, 2048, 14336, 32768])
@pytest.mark.parametrize("rows", [0, 1, 17, 300])
def test_act_and_mul_quant(draw, rows, columns, granularity, activation):
    x = draw(rows, 2 * columns)
    gate, factor = x.double().chunk(2, 1)
    function = getattr(torch.nn.functional, activation.removesuffix("_tanh"))
    more = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    q, scale = to_write(rows, columns, granularity)
    tiercel.act_and_mul_quant(x, q, scale, activation=activation, granularity=granularity)
    assert_right(q, scale, function(gate, **more) * factor, granularity)


@pytest.mark.parametrize("name", ["rms_norm_quant", "layer_norm_quant"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_special_values(draw, granularity, name):
    x = draw(4, 512)
    x[0, 300], x[1], x[2, 5] = torch.nan, 0, torch.inf
    results = []
    for backend in ("sm90", "ref"):
        q, scale = to_write(4, 512, granularity)
        getattr(tiercel, name)(x, q, scale, granularity=granularity, backend=backend)
        results.append((q.float(), scale))
    for got, due in zip(*results, strict=True):
        assert torch.equal(got.isnan(), due.isnan())
        assert torch.equal(got[1:2], due[1:2])


def test_graph_replay(draw):
    x, residual = draw(64, 4096), draw(64, 4096)
    q, scale = to_write(64, 4096, "1x128")
    codes, scales = to_write(64, 2048, "1x128")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = x * 2
        tiercel.rms_norm_quant(product, q, scale, granularity="1x128", residual=residual)
        tiercel.act_and_mul_quant(residual, codes, scales, granularity="1x128")
    for _ in range(3):
        x.normal_()
        total = x * 2 + residual
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(residual, total)
        assert_right(q, scale, normed(total, None), "1x128")
        gate, factor = total.double().chunk(2, 1)
        assert_right(codes, scales, torch.nn.functional.silu(gate) * factor, "1x128")
