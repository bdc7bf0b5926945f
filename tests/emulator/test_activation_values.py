# SPDX-License-Identifier: Apache-2.0
"""Activations of every bfloat16 and float16 value, and of float32 values down to where results
vanish, against float64: relative errors, as docs/kernels/activations.md promises them."""

import pytest
import torch
from support.activation_truth import (
    FUNCTIONS,
    NORMAL,
    SLACK,
    allowed_of,
    assert_right,
    every_value,
    slope,
    value,
)
from support.emulator import sm90  # before tiercel
from support.near import F16, F32, FLOATS

FP8 = torch.float8_e4m3fn


def arguments(function):
    return (function.partition("_")[2] or "none",) if function.startswith("gelu") else ()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_value(function, dtype):
    x = every_value(dtype)
    name, options = function.partition("_")[0], arguments(function)
    exact, slack = value(function, x), SLACK[function, dtype == F32]
    assert_right(sm90(name)(x, *options, None, None), exact, allowed_of(dtype, exact, slack))
    # Gated, with a factor that brings the smallest values back; also in rows not on 16 bytes.
    factor = torch.full_like(x, 2.0**40 if dtype != F16 else 2.0**4)
    for columns in (None, 8191 if dtype == F32 else 13_107):
        gate, up = (t if columns is None else t[: columns * 5].view(5, -1) for t in (x, factor))
        result, exact = (
            sm90(f"{name}_and_mul")(gate, up, *options, None, None),
            value(function, gate),
        )
        exact = exact * up.double()
        assert_right(result, exact, allowed_of(dtype, exact, slack, factor=up.double()))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_float8_of_every_value(function, dtype):
    x = every_value(dtype)
    name, options = function.partition("_")[0], arguments(function)
    for scale in (1.0, 2.0**-100):
        scales = torch.tensor([scale])
        result = sm90(name)(x, *options, scales, None)
        assert result.dtype == FP8
        due = (value(function, x) / scale).clamp(-448, 448)
        allowed = due.abs().clamp_min(2.0**-6) * (2.0**-4 + 1e-5)
        error = (result.double() - due).abs()
        assert ((error <= allowed) | (result.double().isnan() & due.isnan())).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_slope_of_every_value(function, dtype):
    """Near its root a slope is right to 2^-19 of 1."""
    x = every_value(dtype)
    x = x[x.isnan() | (x.abs() < 1e18)]  # beyond, some of PyTorch's are NaN, too
    name, options = function.partition("_")[0], arguments(function)
    result, exact = (
        sm90(f"{name}_backward")(torch.ones_like(x), x, *options, None),
        slope(function, x),
    )
    allowed = allowed_of(dtype, exact, 4 * SLACK[function, dtype == F32], smallest=8 * NORMAL)
    assert_right(result, exact, allowed + ((x > -4) & (x < 1)) * 2.0**-19)
