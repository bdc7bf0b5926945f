# SPDX-License-Identifier: Apache-2.0
"""What becomes of a gate a and its partner b, float32 in registers."""

from activations_cute import gelu, relu, silu


def _gated(function):
    return lambda a, b: function(a) * b


ACTIVATIONS = {
    "silu": _gated(silu),
    "gelu": _gated(gelu),
    "relu": _gated(relu),
    "gelu_residual": lambda a, b: gelu(a) * (b + 1.0),
}
