# SPDX-License-Identifier: Apache-2.0
"""Quantisation in plain PyTorch. The kernels give the same bits: every operation here is float32,
rounded once, to nearest even."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.norm.reference import layer_norm
from tiercel.ops.quant.spec import TILES, scale_shape

E4M3_MAX = 448.0
E2M1_MAX = 6.0
SMALLEST_SCALE = 2.0**-126  # its reciprocal is still finite

# Halfway between two neighbouring e2m1 magnitudes, and whether that rounds up: to the even code.
_HALFWAY = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _divide(x: Tensor, divisor: float) -> Tensor:
    """Rounded once: on a GPU torch multiplies by a number's reciprocal, but divides by a tensor."""
    return x / torch.full_like(x, divisor)


def tile_of(x: Tensor, granularity: str) -> tuple[int, int]:
    """Rows and columns of x [T, K] that share a scale, at least 1."""
    rows, columns = TILES[granularity]
    return rows or max(x.shape[0], 1), columns or max(x.shape[1], 1)


def fp8_quantize(
    x: Tensor, granularity: str = "row", *, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.fp8_quantize`, for x ``[T, K]`` of any sizes."""
    wide = x.float()
    tile = tile_of(x, granularity)
    down, across = scale_shape(*x.shape, granularity)
    if scale is None:
        padding = (0, across * tile[1] - x.shape[1], 0, down * tile[0] - x.shape[0])
        padded = torch.nn.functional.pad(wide.abs(), padding)
        largest = padded.view(down, tile[0], across, tile[1]).amax((1, 3))
        scale = _divide(largest, E4M3_MAX).clamp_min(SMALLEST_SCALE)
    inverse = scale.reciprocal().repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
    scaled = wide * inverse[: x.shape[0], : x.shape[1]]
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def fp8_quantize_transpose(
    x: Tensor, granularity: str = "1x128"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference of :func:`tiercel.fp8_quantize_transpose`, for x ``[T, K]`` of any sizes."""
    rows = x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, scale_shape(*x.shape, "128x128")[0] * 128 - rows))
    q, scale = fp8_quantize(padded, granularity)
    if granularity == "128x128":  # copies, also where a transpose is the same in memory
        q_t = q.view(torch.uint8).t().clone(memory_format=torch.contiguous_format)
        scale_t = scale.t().clone(memory_format=torch.contiguous_format)
        return q[:rows], scale, q_t.view(q.dtype), scale_t
    q_t, scale_t = fp8_quantize(padded.t().contiguous(), granularity)
    return q[:rows], scale[:rows], q_t, scale_t.t().contiguous()


def _quantized(values: Tensor, q: Tensor, scale: Tensor, granularity: str) -> None:
    """Float32 or float64 values to `q` and `scale`, which is given with "tensor"."""
    given = scale if granularity == "tensor" else None
    codes, found = fp8_quantize(values, granularity, scale=given)
    q.copy_(codes)
    if given is None:
        scale.copy_(found)


def rms_norm_quant(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    weight: Tensor | None = None,
    *,
    granularity: str = "row",
    eps: float = 1e-6,
    residual: Tensor | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.rms_norm_quant`."""
    if residual is not None:
        x = x + residual
        residual.copy_(x)
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + eps)
    values = (wide if weight is None else wide * weight.float()) * factor
    if normed is not None:
        normed.copy_(values)
    _quantized(values, q, scale, granularity)
    return q, scale


def layer_norm_quant(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    granularity: str = "row",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.layer_norm_quant`."""
    if residual is not None:
        x = x + residual
        residual.copy_(x)
    values = layer_norm(x.float(), weight, bias, eps=eps)
    assert isinstance(values, Tensor)
    if normed is not None:
        normed.copy_(values)
    _quantized(values, q, scale, granularity)
    return q, scale


def act_and_mul_quant(
    x: Tensor, q: Tensor, scale: Tensor, *, activation: str = "silu", granularity: str = "row"
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.act_and_mul_quant`."""
    gate, factor = x.float().chunk(2, dim=1)
    if activation.startswith("gelu"):
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        value = torch.nn.functional.gelu(gate, approximate=approximate)
    else:
        value = getattr(torch.nn.functional, activation)(gate)
    _quantized(value * factor, q, scale, granularity)
    return q, scale


def nvfp4_quantize(x: Tensor, *, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.nvfp4_quantize`."""
    groups = x.float().unflatten(-1, (x.shape[-1] // 16, 16))
    wanted = _divide(groups.abs().amax(-1), E2M1_MAX)
    if global_scale is not None:
        wanted = wanted / global_scale.float()
    scale = wanted.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    total = scale.float() if global_scale is None else scale.float() * global_scale.float()
    inverse = torch.where(total == 0, 0.0, total.reciprocal())
    # Halves, as the kernel has them: the same but below the normal floats.
    halves = groups.abs() * (inverse * 0.5)[..., None]
    codes = groups.signbit().to(torch.uint8) * 8
    for value, up in _HALFWAY:
        codes += halves >= value / 2 if up else halves > value / 2
    codes = codes.flatten(-2)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed.contiguous().view(torch.float4_e2m1fn_x2), scale


def nvfp4_values(q: Tensor) -> Tensor:
    """The values of packed e2m1 as float32: twice as many along the last dimension."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=q.device)
    packed = q.contiguous().view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return table[codes.long()]


def nvfp4_dequantize(
    q: Tensor,
    scale: Tensor,
    *,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Reference of :func:`tiercel.nvfp4_dequantize`."""
    total = scale.float() if global_scale is None else scale.float() * global_scale.float()
    values = nvfp4_values(q).unflatten(-1, (scale.shape[-1], 16))
    return (values * total[..., None]).flatten(-2).to(dtype)
