# SPDX-License-Identifier: Apache-2.0
"""Activation functions of float32 values in registers, for epilogues in the CuTe DSL."""

import math

import cutlass.cute as cute
from cutlass import Float32

_LOG2_E = math.log2(math.e)

# log2 of the normal distribution's tail at -a as a polynomial in a on [0, 5.5], lowest power first:
# relative error of the tail 2.6e-5, a tenth of float16's rounding. One exponential an element.
_LOG2_NORMAL_TAIL = (
    -1.0000361204147339,
    -1.1505839824676514,
    -0.46032947301864624,
    -0.051970403641462326,
    0.007488309871405363,
    -0.000660981226246804,
    2.6153751605306752e-05,
)
_NORMAL_TAIL_END = 10.0  # the tail is below 2**-67 there, and the polynomial still falls


def none(x):
    return x


def relu(x):
    return cute.arch.fmax(x, 0.0, nan=True)


def _times_sigmoid(x, minus_log2_odds):
    """x / (1 + 2**minus_log2_odds); an infinite power gives 0, as it should."""
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(minus_log2_odds, fastmath=True))


def silu(x):
    return _times_sigmoid(x, x * -_LOG2_E)


def gelu(x):
    """x * normal_cdf(x), as max(x, 0) - a * tail(a) with a = |x|."""
    a = cute.arch.fmin(cute.arch.fmax(x, -x), _NORMAL_TAIL_END)
    power = Float32(_LOG2_NORMAL_TAIL[-1])
    for coefficient in reversed(_LOG2_NORMAL_TAIL[:-1]):
        power = power * a + coefficient
    return relu(x) - a * cute.math.exp2(power, fastmath=True)


def gelu_tanh(x):
    """0.5 * x * (1 + tanh(u)) is x * sigmoid(2 * u)."""
    scale = -2.0 * _LOG2_E * math.sqrt(2.0 / math.pi)
    return _times_sigmoid(x, x * (x * x * (scale * 0.044715) + scale))


def relu_squared(x):
    positive = relu(x)
    return positive * positive


ACTIVATIONS = {
    "none": none,
    "relu": relu,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu_squared": relu_squared,
}
