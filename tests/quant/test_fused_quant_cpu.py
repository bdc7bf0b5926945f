# SPDX-License-Identifier: Apache-2.0
"""rms_norm_quant, layer_norm_quant and act_and_mul_quant with PyTorch and without a GPU."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

GRANULARITIES = ["tensor", "row", "1x128"]


def to_write(rows, columns, granularity):
    shape = {"tensor": (1, 1), "row": (rows, 1), "1x128": (rows, -(-columns // 128))}[granularity]
    return torch.zeros(rows, columns).to(torch.float8_e4m3fn), torch.full(shape, 0.03)


def assert_quantised(q, scale, values, granularity):
    """The result is fp8_quantize's of the values, but for float32's last places."""
    given = scale.clone() if granularity == "tensor" else None
    codes, scales = tiercel.fp8_quantize(values, granularity, scale=given)
    torch.testing.assert_close(scale, scales, rtol=1e-6, atol=0)
    torch.testing.assert_close(q.float(), codes.float(), rtol=2**-3, atol=2**-9)
    assert (q.float() != codes.float()).float().mean() < 0.01


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("columns", [128, 300])
@pytest.mark.parametrize("weighted", [False, True])
def test_norm(columns, granularity, weighted):
    x = torch.randn(5, columns).bfloat16()
    weight = torch.rand(columns) + 0.5 if weighted else None
    q, scale = to_write(5, columns, granularity)
    got = tiercel.rms_norm_quant(x, q, scale, weight, granularity=granularity, eps=1e-5)
    assert got[0] is q and got[1] is scale
    values = tiercel.rms_norm(x.float(), weight, eps=1e-5)
    assert_quantised(q, scale, values, granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("columns", [128, 300])
@pytest.mark.parametrize("parameters", ["", "weight", "bias", "weight bias"])
def test_layer_norm(columns, granularity, parameters):
    x = (torch.randn(5, columns) + 7).bfloat16()
    weight = torch.rand(columns) + 0.5 if "weight" in parameters else None
    bias = torch.randn(columns).bfloat16() if "bias" in parameters else None
    q, scale = to_write(5, columns, granularity)
    got = tiercel.layer_norm_quant(x, q, scale, weight, bias, granularity=granularity, eps=1e-3)
    assert got[0] is q and got[1] is scale
    wide = None if bias is None else bias.float()
    values = tiercel.layer_norm(x.float(), weight, wide, eps=1e-3)
    assert_quantised(q, scale, values, granularity)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_residual_and_normed(name):
    x, residual = torch.randn(2, 5, 128).bfloat16().unbind()
    q, scale = to_write(5, 128, "row")
    normed, total = torch.zeros_like(x), x + residual
    getattr(tiercel, f"{name}_quant")(x, q, scale, residual=residual, normed=normed)
    assert torch.equal(residual, total)
    values = getattr(tiercel, name)(total.float())
    assert torch.equal(normed, values.bfloat16())
    assert_quantised(q, scale, values, "row")


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activation(activation, granularity):
    x = torch.randn(5, 600).bfloat16()
    q, scale = to_write(5, 300, granularity)
    got = tiercel.act_and_mul_quant(x, q, scale, activation=activation, granularity=granularity)
    assert got[0] is q and got[1] is scale
    function = getattr(tiercel, activation.removesuffix("_tanh") + "_and_mul")
    more = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    assert_quantised(q, scale, function(x.float(), **more), granularity)


def norm(**changes):
    q, scale = to_write(5, 256, "row")
    return {"x": torch.randn(5, 256).bfloat16(), "q": q, "scale": scale} | changes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"granularity": "128x128"}, "`granularity` must be one of 'tensor', 'row', '1x128'"),
        (
            {"granularity": "1x128"},
            r"`scale` must have shape \[T, N / 128\] = \[5, 2\], got \[5, 1\]",
        ),
        ({"granularity": "tensor"}, r"`scale` must have shape \[1, 1\] = \[1, 1\], got \[5, 1\]"),
        ({"scale": torch.ones(5)}, r"`scale` must have shape \[T, 1\] = \[5, 1\], got \[5\]"),
    ],
)
def test_scales_are_as_the_granularity_says(changes, text):
    for name in ("rms_norm_quant", "layer_norm_quant"):
        with pytest.raises(ValueError, match=f"^{name}: {text}"):
            getattr(tiercel, name)(**norm(**changes))
    gated = norm(x=torch.randn(5, 512).bfloat16(), **changes)
    with pytest.raises(ValueError, match=f"^act_and_mul_quant: {text}"):
        tiercel.act_and_mul_quant(**gated)


def test_gates_and_factors_are_as_many():
    with pytest.raises(ValueError, match="`x` must have an even number of columns"):
        tiercel.act_and_mul_quant(torch.zeros(5, 513).bfloat16(), *to_write(5, 256, "row"))


@pytest.mark.parametrize("name", ["rms_norm_quant", "layer_norm_quant"])
def test_there_is_no_derivative(name):
    x = torch.randn(5, 256).bfloat16().requires_grad_()
    with pytest.raises(RuntimeError, match=f"^{name}: there is no derivative"):
        getattr(tiercel, name)(**norm(x=x))


def test_a_plug_in():
    """It returns codes and scales; a call with a residual runs the reference."""
    made = []

    def backend(x, q, scale, weight, granularity, eps, residual, normed):
        made.append(granularity)
        codes, scales = tiercel.fp8_quantize(x.float() * 0, granularity)
        return codes, scales

    tiercel.backends.register(op="rms_norm_quant", name="zeros", fn=backend)
    try:
        given = norm()
        tiercel.rms_norm_quant(**given, backend="zeros")
        assert made == ["row"] and not given["q"].float().any()
        given = norm(residual=torch.randn(5, 256).bfloat16())
        tiercel.rms_norm_quant(**given, backend="zeros")
        assert made == ["row"] and given["q"].float().any()
    finally:
        tiercel.backends.unregister("rms_norm_quant", "zeros")
