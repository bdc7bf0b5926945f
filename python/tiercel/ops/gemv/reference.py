# SPDX-License-Identifier: Apache-2.0
"""NVFP4 products in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tiercel.ops.gemv.packing import pack_w4 as pack_w4
from tiercel.ops.quant.reference import nvfp4_values


def nvfp4_gemv(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scale_a_permuted: Tensor,
    scale_b_permuted: Tensor,
    c: Tensor,
) -> Tensor:
    """Reference of :func:`tiercel.nvfp4_gemv`, for any k; uses the scales on the CPU."""
    wide = torch.promote_types(c.dtype, torch.float32)
    # Values that depend on no order of summation; [l, m, k] and [l, 1, k].
    matrix = _scaled(a, scale_a, wide)
    vector = _scaled(b, scale_b, wide)
    c.copy_((matrix @ vector.mT).permute(1, 2, 0))
    return c


def _scaled(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    values = nvfp4_values(q.permute(2, 0, 1)).to(dtype)
    scales = scale.to(q.device).permute(2, 0, 1).to(dtype)
    return (values.unflatten(-1, (scales.shape[-1], 16)) * scales[..., None]).flatten(-2)


def permute_scales(scale: Tensor) -> Tensor:
    """Scales ``[m, k / 16, l]`` in the layout of the block-scaled tensor-core instructions.

    Returns:
        ``[32, 4, ceil(m / 128), 4, ceil(k / 64), l]``: element ``[i, j, p, q, r, b]`` is the scale
        of row ``128 p + 32 j + i`` and group ``4 r + q`` of batch ``b``. In memory an atom of 128
        rows and 4 groups, 512 bytes, follows the other, along k first; what pads them is 0.
    """
    rows, groups, batches = scale.shape
    down, along = -(-rows // 128), -(-groups // 4)
    bits = scale.permute(2, 0, 1).view(torch.uint8)
    padded = bits.new_zeros(batches, down * 128, along * 4)
    padded[:, :rows, :groups] = bits
    atoms = padded.view(batches, down, 4, 32, along, 4)
    memory = atoms.permute(0, 1, 4, 3, 2, 5).contiguous()  # l, down, along, 32, 4, 4
    return memory.view(scale.dtype).permute(3, 4, 1, 5, 2, 0)


def nvfp4_linear(
    x: Tensor, weight: Tensor, scale: Tensor, *, global_scale: Tensor | None = None
) -> Tensor:
    """Reference of :func:`tiercel.nvfp4_linear`, for any number of tokens and any K."""
    wide = torch.promote_types(x.dtype, torch.float32)
    values = nvfp4_values(weight).to(wide).unflatten(-1, (scale.shape[-1], 16))
    matrix = (values * scale.to(wide)[..., None]).flatten(-2)
    product = x.to(wide) @ matrix.mT
    if global_scale is not None:
        product = product * global_scale
    return product.to(x.dtype)


def w4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    format: str = "mxfp4",  # noqa: A002
    zero_point: Tensor | None = None,
    global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    x_scale: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.w4_linear`, for any K; in float32, rounded once."""
    narrow = x.dtype if x_scale is None else torch.bfloat16
    wide = torch.promote_types(narrow, torch.float32)
    result = x.to(wide) @ w4_values(weight, scale, format, zero_point).to(wide).mT
    if x_scale is not None:
        result = result * x_scale.reshape(-1, 1)
    if global_scale is not None:
        result = result * global_scale
    if bias is not None:
        result = result + bias
    if activation == "gelu_tanh":
        result = functional.gelu(result, approximate="tanh")
    elif activation == "relu_squared":
        result = functional.relu(result).square()
    elif activation != "none":
        result = getattr(functional, activation)(result)
    return result.to(narrow)


def w4_values(weight: Tensor, scale: Tensor, kind: str, zero_point: Tensor | None = None) -> Tensor:
    """The values that 4-bit weights stand for, in float32."""
    if kind == "int4":
        packed = weight.view(torch.uint8)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).float()
        factors = scale.float()
    else:
        codes = nvfp4_values(weight.view(torch.float4_e2m1fn_x2)).float()
        factors = scale.float() if kind == "nvfp4" else _powers(scale)
    if not codes.numel():
        return codes
    groups = codes.unflatten(-1, (scale.shape[-1], -1))
    if kind == "int4":
        groups = groups - (8 if zero_point is None else zero_point.float()[..., None])
    return (groups * factors[..., None]).flatten(-2)


def _powers(exponents: Tensor) -> Tensor:
    """2 to the power of UE8M0's numbers less 127; 255 is NaN."""
    powers = torch.exp2(exponents.double() - 127).float()
    return powers.masked_fill(exponents == 255, torch.nan)
