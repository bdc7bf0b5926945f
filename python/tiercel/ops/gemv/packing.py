# SPDX-License-Identifier: Apache-2.0
"""4-bit weights of checkpoints in the layout of w4_linear."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LAYOUTS = ("gpt_oss", "modelopt", "compressed_tensors", "gptq", "awq")

# The place in a word of each of eight neighbouring columns, in AWQ.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class W4Weight(NamedTuple):
    """The arguments of :func:`tiercel.w4_linear` that hold a weight."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None
    format: str


def pack_w4(
    weight: Tensor,
    scale: Tensor,
    *,
    layout: str,
    zero_point: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> W4Weight:
    """Converts a checkpoint's weights, on their device, to the layout of :func:`tiercel.w4_linear`.

    gpt_oss, modelopt and compressed_tensors (without its zero points) are views, not copies. gptq
    with reordered K (``desc_act``) is not supported.

    ==================  =====================  ==================  ===================
    layout              weight                 scale               zero_point
    ==================  =====================  ==================  ===================
    gpt_oss             N, K / 32, 16 uint8    N, K / 32 uint8
    modelopt            N, K / 2 uint8         N, K / 16 e4m3
    compressed_tensors  N, K / 8 int32         N, K / group        N / 8, K / group int32
    gptq                K / 8, N int32         K / group, N        K / group, N / 8 int32, less 1
    awq                 K, N / 8 int32         K / group, N        K / group, N / 8 int32
    ==================  =====================  ==================  ===================
    """
    if layout not in LAYOUTS:
        raise ValueError(f"pack_w4: `layout` must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if layout == "gpt_oss":
        return W4Weight(weight.flatten(-2), scale, None, global_scale, "mxfp4")
    if layout == "modelopt":
        factor = None if global_scale is None else global_scale.float().reshape(1)
        return W4Weight(weight, scale, None, factor, "nvfp4")
    if weight.dtype != torch.int32:
        raise TypeError(f"pack_w4: `weight` must have dtype int32, got {weight.dtype}")
    zeros = None
    if layout == "compressed_tensors":
        packed = weight.contiguous().view(torch.uint8)
        if zero_point is not None:
            zeros = _nibbles(zero_point.mT).mT[: weight.shape[0]]
    else:
        places = _AWQ_PLACES if layout == "awq" else range(8)
        scale = scale.mT.contiguous()
        if layout == "gptq":
            packed = weight.mT.contiguous().view(torch.uint8)
        else:
            codes = _nibbles(weight, places).mT
            packed = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
        if zero_point is not None:
            zeros = _nibbles(zero_point, places).mT + (layout == "gptq")
    if zeros is not None:
        zeros = zeros.to(scale.dtype).contiguous()
    return W4Weight(packed, scale, zeros, global_scale, "int4")


def _nibbles(words: Tensor, places: tuple[int, ...] | range = range(8)) -> Tensor:
    """The eight numbers of each int32 along the last dimension, as uint8."""
    shifts = torch.tensor([4 * place for place in places], device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(-2)
