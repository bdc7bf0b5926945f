# SPDX-License-Identifier: Apache-2.0
"""Expert MLPs in plain PyTorch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional

from tiercel.ref.quant import fp8_quantize

ACTIVATIONS = ("silu", "gelu", "relu", "gelu_residual")


def _activate(sums: Tensor, activation: str) -> Tensor:
    a, b = sums.chunk(2, dim=-1)
    if activation == "gelu_residual":
        return functional.gelu(a) * (b + 1)
    result: Tensor = getattr(functional, activation)(a) * b
    return result


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _spread(scales: Tensor, values: Tensor, dim: int) -> Tensor:
    """A factor of 128 neighbours, for each of them."""
    return scales.repeat_interleave(128, dim).narrow(dim, 0, values.shape[dim])


def _product(x: Tensor, w: Tensor, scale: Tensor | None, expert: int) -> Tensor:
    rows, of_expert = _wide(x), _wide(w[expert])
    if scale is not None and scale.ndim == 3:
        q, scales = fp8_quantize(x.float(), "1x128")
        rows = q.to(rows.dtype) * _spread(scales.to(rows.dtype), rows, 1)
        of_expert = of_expert.to(rows.dtype)
        blocks = _spread(scale[expert].to(rows.dtype), of_expert, 0)
        of_expert = of_expert * _spread(blocks, of_expert, 1)
    elif scale is not None:
        q, scales = fp8_quantize(x.float())
        rows = q.to(rows.dtype) * scales.to(rows.dtype)
        of_expert = of_expert.to(rows.dtype) * scale[expert][:, None].to(rows.dtype)
    return rows @ of_expert.T


def fused_moe(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    w_up_scale: Tensor | None = None,
    w_down_scale: Tensor | None = None,
) -> Tensor:
    """As :func:`tiercel.fused_moe`, for any sizes; float64 is computed in float64."""
    tokens, k = topk_ids.shape
    ids = topk_ids.flatten().long()
    if expert_map is not None:
        real = (ids >= 0) & (ids < expert_map.shape[0])
        ids = torch.where(real, expert_map.long()[ids.clamp(0, expert_map.shape[0] - 1)], -1)
    out = torch.zeros(tokens * k, x.shape[1], dtype=_wide(x).dtype, device=x.device)
    weights = topk_weights.flatten().to(out.dtype)
    for expert in range(w_up.shape[0]):
        mine = torch.nonzero(ids == expert).flatten()
        if mine.numel() == 0:
            continue
        sums = _product(x[mine // k], w_up, w_up_scale, expert)
        inner = _activate(sums, activation).to(x.dtype)  # as it is kept between the halves
        outer = _product(inner, w_down, w_down_scale, expert) * weights[mine, None]
        out = out.index_add(0, mine, outer)
    return out.view(tokens, k, x.shape[1]).sum(dim=1).to(x.dtype)


def grouped_gemm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """As :func:`tiercel.grouped_gemm`, for any sizes; float64 is computed in float64."""
    out = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype, device=x.device)
    bounds = offsets.tolist()
    for group, (first, end) in enumerate(itertools.pairwise(bounds)):
        out[first:end] = (_wide(x[first:end]) @ _wide(w[group]).T).to(x.dtype)
    return out


def moe_up(
    x: Tensor,
    w_up: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    top_k: int,
    block_size: int,
    *,
    activation: str = "silu",
) -> Tensor:
    """As :func:`tiercel.moe_up`, for any sizes."""
    elements = x.shape[0] * top_k
    out = torch.zeros(elements, w_up.shape[1] // 2, dtype=x.dtype, device=x.device)
    used = int(num_tokens_post_padded)
    for block, expert in enumerate(expert_ids[: used // block_size].tolist()):
        ids = sorted_token_ids[block * block_size : (block + 1) * block_size].long()
        ids = ids[ids < elements]
        if expert >= 0:
            sums = _wide(x)[ids // top_k] @ _wide(w_up[expert]).T
            out[ids] = _activate(sums, activation).to(x.dtype)
    return out


def moe_down(
    x: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    block_size: int,
) -> Tensor:
    """As :func:`tiercel.moe_down`, for any sizes."""
    out = torch.zeros(x.shape[0], w_down.shape[1], dtype=x.dtype, device=x.device)
    weights = _wide(topk_weights)
    used = int(num_tokens_post_padded)
    for block, expert in enumerate(expert_ids[: used // block_size].tolist()):
        ids = sorted_token_ids[block * block_size : (block + 1) * block_size].long()
        ids = ids[ids < x.shape[0]]
        if expert >= 0:
            sums = _wide(x)[ids] @ _wide(w_down[expert]).T
            out[ids] = (sums * weights[ids, None]).to(x.dtype)
    return out
