# SPDX-License-Identifier: Apache-2.0
"""Layer norms of rows that are far from zero, on the emulator: what docs/kernels/norm.md promises.

A row of one value gives exactly the bias. Otherwise errors are a part of the normalised value or of
1, never of mean / deviation: `x * rstd - mean * rstd`, or a mean that is rounded to float32, fails.
"""

import pytest
import torch
from support.emulator import options, sm90
from support.near import BF16, F16, F32, FLOATS, RELATIVE, normal, reference

# A few lanes, a warp, a block, a cluster; in registers or in shared memory; on 16 bytes or not.
COLUMNS = [1, 33, 64, 128, 255, 256, 504, 768, 1000, 1001, 4096, 9000, 9001, 16_400, 40_001]
VALUES = {
    F32: [1.1, -59904.3, 1e-30, 3e30],
    BF16: [1.1, -59904.0, 1e-30, 3e30],
    F16: [1.1, -59904.0, 6e-8, 2.0**-10],
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def run(operator, *arguments):
    with options(multiprocessors=2):
        return sm90(operator)(*arguments)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [*COLUMNS, 131_072])
def test_rows_of_one_value_give_the_bias(columns, dtype):
    rows = 1 if columns > 50_000 else len(VALUES[dtype])
    x = torch.tensor(VALUES[dtype][1 : 1 + rows] if rows == 1 else VALUES[dtype])
    x = x.to(dtype)[:, None].repeat(1, columns)
    weight, bias = normal(columns, dtype=dtype), normal(columns, dtype=dtype)
    for eps in (1e-5, 1e-6, 1e-12):
        assert torch.equal(run("layer_norm", x, weight, bias, eps, None), bias + 0 * x)
    # Half of it from the residual; parameters of another type; without either.
    half = x / 2
    result, total = run("add_layer_norm", half, half, weight, bias, 1e-6, None)
    assert torch.equal(total, half + half) and torch.equal(result, bias + 0 * x)
    wide = run("layer_norm", x, weight.float(), bias.float(), 1e-6, None)
    assert torch.equal(wide, bias + 0 * x)
    assert not run("layer_norm", x, None, None, 1e-6, None).any()


@pytest.mark.parametrize("rows", [70, 3000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_many_short_rows_of_one_value(rows, dtype):
    for columns in (64, 256, 1000) if rows == 70 else (128,):
        x = torch.full((rows, columns), -59904.0, dtype=dtype)
        weight, bias = normal(columns, dtype=dtype), normal(columns, dtype=dtype)
        result = sm90("layer_norm")(x, weight, bias, 1e-6, None)
        assert torch.equal(result, bias.expand_as(x))


def far(rows, columns, dtype, ratio):
    """Rows whose mean is `ratio` deviations from zero, as far as the type can say it, some with an
    outlier where threads may measure from."""
    x = normal(rows, columns)
    x[1, ::8] *= 30.0
    x[2, 0] = 40.0
    signs = torch.tensor([1.0, -1.0, 1.0])[:rows, None]
    return (x * (1000.0 / ratio) + 1000.0 * signs).to(dtype)


@pytest.mark.parametrize("ratio", [1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("dtype", FLOATS)
def test_mean_far_from_zero(dtype, ratio):
    for columns in COLUMNS[1:]:
        x = far(3, columns, dtype, ratio)
        weight, bias = normal(columns, dtype=dtype), normal(columns, dtype=dtype)
        standard = reference("layer_norm", x, None, None, 1e-9, None)
        exact = weight.double() * standard + bias.double()
        size = weight.double().abs() * (1 + standard.abs())
        allowed = RELATIVE[dtype] * exact.abs() + 8e-6 * size
        result = run("layer_norm", x, weight, bias, 1e-9, None).double()
        assert ((result - exact).abs() <= allowed).all(), (
            columns,
            ((result - exact).abs() / allowed).max(),
        )


def check_backward(x, grad, weight, eps):
    """Errors are a part of the terms that the gradients are sums of."""
    dtype = x.dtype
    arguments = (x, weight, grad, None, True, True, dtype, eps, None)
    result = run("layer_norm_backward", *arguments)
    exact = reference("layer_norm_backward", *arguments)
    wide, grads = x.double(), grad.double()
    centred = wide - wide.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    normals, weighted = (centred * rstd).abs(), (grads * weight.double()).abs()
    terms = weighted + weighted.mean(-1, keepdim=True)
    terms = rstd * (terms + normals * (weighted * normals).mean(-1, keepdim=True))
    sizes = (terms, (grads.abs() * (1 + normals)).sum(0), grads.abs().sum(0))
    for name, one, due, size in zip(("x", "weight", "bias"), result, exact, sizes, strict=True):
        rounding = RELATIVE[dtype] * due.abs().clamp_min(torch.finfo(dtype).smallest_normal)
        share = ((one.double() - due).abs() / (rounding + 8e-6 * size)).max()
        assert share <= 1, (name, tuple(x.shape), share)


@pytest.mark.parametrize("ratio", [1e3, 1e4, 1e6])
@pytest.mark.parametrize("dtype", FLOATS)
def test_backward_with_a_mean_far_from_zero(dtype, ratio):
    for columns in (33, 128, 256, 768, 1001, 4096, 9001, 17_000):
        x = far(3, columns, dtype, ratio)
        grad = (normal(3, columns) * 2.0**-10).to(dtype)  # of constant rows float16 overflows soon
        check_backward(x, grad, normal(columns, dtype=dtype), 1e-6 if dtype == F16 else 1e-9)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [33, 128, 256, 768, 1001, 4096, 9001, 17_000, 65_536])
def test_backward_of_rows_of_one_value(columns, dtype):
    """Normalised values are 0: so is the weight's gradient, exactly."""
    x = torch.full((3, columns), -59904.0, dtype=dtype)
    grad = (normal(3, columns) * 2.0**-6).to(dtype)
    weight = normal(columns, dtype=dtype)
    arguments = (x, weight, grad, None, True, True, dtype, 1e-6, None)
    _, of_weight, _ = run("layer_norm_backward", *arguments)
    assert not of_weight.any()
    check_backward(x, grad, weight, 1e-6)
