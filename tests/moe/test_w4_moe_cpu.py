# SPDX-License-Identifier: Apache-2.0
"""w4_moe and pack_w4_experts without a GPU."""

import pytest
import torch
from support.w4_weights import Experts, draw, gate

import tiercel
from tiercel.ops.moe.spec import W4_ACTIVATIONS as ACTIVATIONS

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


def arguments(up, down, x, k=2):
    experts = up.packed.shape[0]
    return {
        "x": x,
        "w_up": up.packed,
        "w_up_scale": up.scale,
        "w_down": down.packed,
        "w_down_scale": down.scale,
        "topk_weights": torch.rand(x.shape[0], k),
        "topk_ids": torch.rand(x.shape[0], experts).topk(k).indices,
        "format": up.format,
        "up_bias": up.bias,
        "down_bias": down.bias,
        "up_zero_point": up.zero_point,
        "down_zero_point": down.zero_point,
        "up_global_scale": up.factor,
        "down_global_scale": down.factor,
    }


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["mxfp4", "nvfp4", "int4-32-zero"])
def test_the_reference(layout, activation, interleaved):
    rows = 64 if activation == "relu_squared" else 128
    up = Experts(layout, 3, rows, 128, torch.bfloat16, "cpu", rounded=False)
    down = Experts(layout, 3, 128, 64, torch.bfloat16, "cpu", rounded=False)
    named = arguments(up, down, torch.randn(7, 128).bfloat16())
    options = {"activation": activation, "alpha": 1.702, "limit": 1.0, "interleaved": interleaved}
    got = tiercel.w4_moe(**named, **options)
    due = torch.zeros(7, 128, dtype=torch.float64)
    for token, expert in enumerate(named["topk_ids"].tolist()):
        for choice, e in enumerate(expert):
            sums, _ = up.product(named["x"][token], e)
            inner = gate(sums, activation, interleaved, 1.702, 1.0).bfloat16()
            due[token] += down.product(inner, e)[0] * named["topk_weights"][token, choice].double()
    torch.testing.assert_close(got.double(), due, rtol=1e-2, atol=1e-2)


def gpt_oss_experts(x, up, up_bias, down, down_bias, weights, ids):
    """transformers' GptOssExperts in float64, with matrices [E, in, out]."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, experts in enumerate(ids.tolist()):
        for choice, e in enumerate(experts):
            both = x[token].double() @ up[e] + up_bias[e].double()
            a, b = both[::2].clamp(max=7.0), both[1::2].clamp(min=-7.0, max=7.0)
            inner = (b + 1) * (a * torch.sigmoid(a * 1.702))
            rows = inner @ down[e] + down_bias[e].double()
            out[token] += rows * weights[token, choice].double()
    return out


def test_gpt_oss_checkpoints_are_views():
    up = draw("mxfp4", 3 * 128, 128, torch.bfloat16, "cpu")
    down = draw("mxfp4", 3 * 128, 64, torch.bfloat16, "cpu")
    blocks = {
        "up": (up.packed.view(3, 128, 4, 16), up.scale.view(3, 128, 4)),
        "down": (down.packed.view(3, 128, 2, 16), down.scale.view(3, 128, 2)),
    }
    named = tiercel.ref.moe.pack_w4_experts(**blocks, layout="gpt_oss")
    assert named["w_up"].data_ptr() == up.packed.data_ptr()
    assert named["w_up"].shape == (3, 128, 64) and named["format"] == "mxfp4"
    x = (torch.randn(5, 128) / 16).bfloat16()
    weights, ids = torch.rand(5, 2), torch.rand(5, 3).topk(2).indices
    biases = {name: torch.randn(3, 128).bfloat16() for name in ("up_bias", "down_bias")}
    gpt_oss = {"activation": "silu_residual", "alpha": 1.702, "limit": 7.0, "interleaved": True}
    got = tiercel.w4_moe(x, topk_weights=weights, topk_ids=ids, **named, **biases, **gpt_oss)
    matrices = [w.values.view(3, 128, -1).mT for w in (up, down)]
    both = (matrices[0], biases["up_bias"], matrices[1], biases["down_bias"])
    due = gpt_oss_experts(x, *both, weights, ids)
    torch.testing.assert_close(got.double(), due, rtol=1e-2, atol=1e-2 * due.abs().max().item())


@pytest.mark.parametrize("zeros", [False, True])
def test_int4_checkpoints(zeros):
    words = torch.randint(-(2**31), 2**31 - 1, (2, 16, 64), dtype=torch.int32)  # gptq: [K / 8, N]
    scale = torch.rand(2, 2, 64).half()
    points = torch.randint(-(2**31), 2**31 - 1, (2, 2, 8), dtype=torch.int32) if zeros else None
    named = tiercel.ref.moe.pack_w4_experts(
        (words, scale), (words, scale), layout="gptq", up_zero_point=points, down_zero_point=points
    )
    for expert in range(2):
        point = None if points is None else points[expert]
        due = tiercel.ref.gemv.pack_w4(
            words[expert], scale[expert], layout="gptq", zero_point=point
        )
        for half in ("up", "down"):
            assert torch.equal(named[f"w_{half}"][expert], due.weight)
            assert torch.equal(named[f"w_{half}_scale"][expert], due.scale)
            if zeros:
                assert torch.equal(named[f"{half}_zero_point"][expert], due.zero_point)
            else:
                assert named[f"{half}_zero_point"] is None


def call(layout="mxfp4", **changes):
    up = Experts(layout, 2, 128, 64, torch.bfloat16, "cpu")
    down = Experts(layout, 2, 64, 64, torch.bfloat16, "cpu")
    return tiercel.w4_moe(**arguments(up, down, torch.zeros(2, 64).bfloat16()) | changes)


def test_experts_elsewhere_add_nothing():
    x = torch.ones(2, 64).bfloat16()
    assert call(x=x, expert_map=torch.tensor([1, 0], dtype=torch.int32)).all(dim=1).any()
    assert not call(x=x, expert_map=torch.tensor([2, -7], dtype=torch.int32)).any()


BYTES = torch.zeros(2, 128, 3, dtype=torch.uint8)
HALVES = BYTES.bfloat16()
BAD = [
    (
        lambda: call(w_up_scale=BYTES),
        ValueError,
        "`w_up_scale` must have shape [E, N, K / 32] = [2, 128, 2], got [2, 128, 3]",
    ),
    (
        lambda: call("nvfp4", w_up_scale=BYTES),
        TypeError,
        "`w_up_scale` must have dtype float8_e4m3fn, got uint8",
    ),
    (
        lambda: call(up_zero_point=HALVES),
        ValueError,
        "`up_zero_point` is for int4 only",
    ),
    (
        lambda: call("int4-32", w_up_scale=HALVES),
        ValueError,
        "`w_up_scale` must have shape [E, N, K / group] with a group of 32, 64 or 128, "
        "got [2, 128, 3]",
    ),
    (
        lambda: call("int4-32", up_zero_point=HALVES),
        ValueError,
        "`up_zero_point` must have shape as `w_up_scale` = [2, 128, 2], got [2, 128, 3]",
    ),
    (
        lambda: call(activation="relu_squared"),
        ValueError,
        "`w_up` must have 64 rows an expert, for `w_down` and the activation 'relu_squared', "
        "got 128",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "text"), BAD)
def test_bad_arguments_are_named(wrong, error, text):
    with pytest.raises(error) as info:
        wrong()
    assert str(info.value) == f"w4_moe: {text}"


def quantized(x):
    """Arguments of float8."""
    values, scale = tiercel.fp8_quantize(x)
    return {"x": values, "x_scale": scale}


@pytest.mark.parametrize("layout", ["mxfp4", "int4-32-zero"])
def test_float8_activations(layout):
    up = Experts(layout, 3, 128, 128, torch.bfloat16, "cpu", rounded=False)
    down = Experts(layout, 3, 128, 64, torch.bfloat16, "cpu", rounded=False)
    named = arguments(up, down, torch.randn(7, 128).bfloat16())
    named |= quantized(named["x"])
    got = tiercel.w4_moe(**named)
    assert got.dtype == torch.bfloat16
    rows = named["x"].double() * named["x_scale"].double()
    due = torch.zeros(7, 128, dtype=torch.float64)
    for token, experts in enumerate(named["topk_ids"].tolist()):
        for choice, e in enumerate(experts):
            inner = gate(up.product(rows[token], e)[0], "silu", False, 1.0, 0.0).bfloat16()
            values, scale = tiercel.fp8_quantize(inner[None])
            inner = (values.double() * scale.double())[0]
            due[token] += down.product(inner, e)[0] * named["topk_weights"][token, choice].double()
    torch.testing.assert_close(got.double(), due, rtol=1e-2, atol=1e-2)
    # One scale of all rows is as good as one for each.
    one = {"x_scale": torch.tensor(0.25)}
    each = {"x_scale": torch.full((7,), 0.25)}
    assert torch.equal(tiercel.w4_moe(**named | one), tiercel.w4_moe(**named | each))


X8 = torch.zeros(2, 64).to(torch.float8_e4m3fn)
SCALE = torch.ones(2, 1)
BAD_FLOAT8 = [
    ({"x": X8}, TypeError, "`x` must have dtype bfloat16 or float16, got float8_e4m3fn"),
    ({"x_scale": SCALE}, TypeError, "`x` must have dtype float8_e4m3fn, got bfloat16"),
    (
        {"x": X8, "x_scale": torch.ones(3)},
        ValueError,
        "`x_scale` must have 1 or T = 2 elements, got shape [3]",
    ),
    (
        {"x": X8, "x_scale": SCALE, "layout": "nvfp4"},
        ValueError,
        "`format` must be 'mxfp4' or 'int4' where `x` is float8_e4m3fn, got 'nvfp4'",
    ),
    (
        {"x": X8, "x_scale": SCALE, "layout": "int4-32", "w_up_scale": HALVES.half()},
        TypeError,
        "`w_up_scale` must have dtype bfloat16, got float16",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD_FLOAT8)
def test_bad_float8_arguments_are_named(changes, error, text):
    with pytest.raises(error) as info:
        call(**changes)
    assert str(info.value) == f"w4_moe: {text}"


def test_bad_widths_are_named():
    with pytest.raises(ValueError, match=r"w4_moe: `x` must have a multiple of 32 values a row"):
        call(
            x=torch.zeros(2, 48).bfloat16(),
            w_up=torch.zeros(2, 128, 24, dtype=torch.uint8),
            w_down=torch.zeros(2, 48, 32, dtype=torch.uint8),
            down_bias=torch.zeros(2, 48).bfloat16(),
        )
