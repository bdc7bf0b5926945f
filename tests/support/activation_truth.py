# SPDX-License-Identifier: Apache-2.0
"""The activations and their slopes in float64, right in the tails too; and what to try."""

import math

import torch

FUNCTIONS = ["silu", "gelu", "gelu_tanh", "relu"]

# What docs/kernels/activations.md promises beside the result's rounding: a part of the activation's
# value, by function and whether x is float32.
SLACK = {
    ("silu", False): 1.2e-5,
    ("gelu", False): 1.2e-5,
    ("gelu_tanh", False): 4e-5,
    ("relu", False): 0.0,
    ("silu", True): 4e-7,
    ("gelu", True): 1.2e-6,
    ("gelu_tanh", True): 4e-5,
    ("relu", True): 0.0,
}


# A smaller value may be 0 instead; so may a slope of less than 8 times this.
NORMAL = 2.0**-126


def every_value(dtype):
    """Every value of a type of 16 bits; of float32, many down to where results vanish."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    near = torch.linspace(-110, 20, 30_011, dtype=torch.float64)
    small = 2.0 ** torch.linspace(-140, 10, 3000, dtype=torch.float64)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e19, -1e19])
    return torch.cat([near, small, -small, special.double()]).float()


def _sigmoid(z):
    power = torch.where(z < 0, z, -z).exp()  # -z.abs() has no slope at 0
    return torch.where(z >= 0, 1.0, power) / (1 + power)


def _two_u(x):
    return math.sqrt(8 / math.pi) * x * (1 + 0.044715 * x * x)


def _normal_cdf(x):
    return 0.5 * torch.special.erfc(-x / math.sqrt(2.0))


def value(function, x):
    """float64, of a tensor of any floating type."""
    x = x.double()
    if function == "relu":
        return torch.where(x <= 0, 0.0, x)
    if function == "gelu":
        return x * _normal_cdf(x)
    return x * _sigmoid(x if function == "silu" else _two_u(x))


def allowed_of(dtype, exact, parts, smallest=NORMAL, factor=1.0):
    """How far from `exact`, which is an activation times `factor`, a result of `dtype` may be."""
    info = torch.finfo(dtype)
    rounding = info.eps / 2 * 1.001 * exact.abs().clamp_min(info.smallest_normal)
    return rounding + torch.where((exact / factor).abs() < smallest, 1.0, parts) * exact.abs()


def assert_right(result, exact, allowed):
    info = torch.finfo(result.dtype)
    same = (result.double() == exact) | (result.isnan() & exact.isnan())
    same |= result.isinf() & (exact.abs() > info.max * (1 - info.eps))
    worst = torch.where(same, 0.0, (result.double() - exact).abs() / allowed)
    assert not worst.isnan().any() and (worst <= 1).all(), worst.nan_to_num(9e9).max()


def slope(function, x):
    """The derivative of `value`."""
    x = x.double()
    if function == "relu":
        return torch.where(x <= 0, 0.0, 1.0)  # of NaN 1, as PyTorch has it
    if function == "gelu":
        return _normal_cdf(x) + x * (-0.5 * x * x).exp() / math.sqrt(2 * math.pi)
    z = x if function == "silu" else _two_u(x)
    of_z = 1.0 if function == "silu" else math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x * x)
    sigmoid = _sigmoid(z)
    return sigmoid + x * of_z * sigmoid * _sigmoid(-z)
