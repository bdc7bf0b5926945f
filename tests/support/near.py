# SPDX-License-Identifier: Apache-2.0
"""Kernels on the emulator beside the reference in float64."""

import torch
from support.emulator import sm90  # before tiercel

from tiercel.core.dispatch import variants as families

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FLOATS = [F32, BF16, F16]

# A result is right to this much of its size, rounding to the type included.
RELATIVE = {F32: 4e-6, BF16: 2**-8, F16: 2**-11 * 1.02}

# One row a few lanes, a warp, a block, a cluster, several passes; vectors or not.
ROWS = [(7, 1), (5, 33), (3, 64), (2, 1000), (2, 4096), (1, 9000), (3, 40001)]


def normal(*shape, dtype=F32):
    return torch.randn(shape).to(dtype)


def reference(operator, *arguments):
    """What the reference makes of the arguments in float64, where they are floating point."""
    wide = [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in arguments
    ]
    for operators in families.values():
        for one in operators:
            if one.name == operator:
                return one.backends["ref"].run(*wide)
    raise LookupError(operator)


def close(result, expected, scale=None):
    """scale: the size that errors are a part of, where it is not the result's own."""
    if result is None or isinstance(result, torch.Tensor):
        result, expected = [result], [expected]
    for one, exact in zip(result, expected, strict=True):
        if one is None:
            continue
        assert one.shape == exact.shape
        if not one.is_floating_point():
            assert torch.equal(one, exact.to(one.dtype))
            continue
        exact = exact.double()
        size = exact.abs() if scale is None else torch.as_tensor(scale).expand_as(exact)
        tiny = torch.finfo(one.dtype).smallest_normal
        wrong = (one.double() - exact).abs() - RELATIVE[one.dtype] * size.clamp_min(tiny)
        same = (one.double() == exact) | (one.isnan() & exact.isnan())  # infinities, too
        assert ((wrong <= 0) | same).all(), f"off by {(one.double() - exact).abs().max():.3g}"


def check(operator, *arguments, scale=None):
    close(sm90(operator)(*arguments), reference(operator, *arguments), scale)
