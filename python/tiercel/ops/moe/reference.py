# SPDX-License-Identifier: Apache-2.0
"""Expert MLPs in plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tiercel.ops.quant.reference import fp8_quantize


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


def _scaled_rows(x: Tensor, scale: Tensor, of_weights: Tensor) -> Tensor:
    """float8 rows times their scales."""
    rows = _wide(x)
    factors = scale.to(rows.dtype)
    return rows * (_spread(factors, rows, 1) if of_weights.ndim == 3 else factors)


def _scaled_matrix(w: Tensor, scale: Tensor, expert: int, dtype: torch.dtype) -> Tensor:
    of_expert, factors = w[expert].to(dtype), scale[expert].to(dtype)
    if scale.ndim == 3:
        return of_expert * _spread(_spread(factors, of_expert, 0), of_expert, 1)
    return of_expert * factors[:, None]


def _product(x: Tensor, w: Tensor, scale: Tensor | None, expert: int) -> Tensor:
    if scale is None:
        return _wide(x) @ _wide(w[expert]).T
    q, scales = fp8_quantize(x.float(), "1x128" if scale.ndim == 3 else "row")
    rows = _scaled_rows(q.to(_wide(x).dtype), scales, scale)
    return rows @ _scaled_matrix(w, scale, expert, rows.dtype).T


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
    """Reference of :func:`tiercel.fused_moe`, for any sizes; float64 is computed in float64."""
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
    """Reference of :func:`tiercel.grouped_gemm`, for any sizes; float64 is computed in float64."""
    out = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype, device=x.device)
    bounds = offsets.clamp(0, x.shape[0]).tolist()
    for group, (first, end) in enumerate(itertools.pairwise(bounds)):
        out[first:end] = (_wide(x[first:end]) @ _wide(w[group]).T).to(x.dtype)
    return out


def grouped_gemm_backward_x(grad: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of x in :func:`grouped_gemm`."""
    return grouped_gemm(grad, w.transpose(1, 2), offsets)


def grouped_gemm_backward_weight(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of w in :func:`grouped_gemm`; zeros where a group is empty."""
    bounds = offsets.clamp(0, grad.shape[0]).tolist()
    sizes = (len(bounds) - 1, grad.shape[1], x.shape[1])
    out = torch.zeros(sizes, dtype=x.dtype, device=x.device)
    for group, (first, end) in enumerate(itertools.pairwise(bounds)):
        out[group] = (_wide(grad[first:end]).T @ _wide(x[first:end])).to(x.dtype)
    return out


def _blocks(
    routing: tuple[Tensor, Tensor, Tensor], block_size: int, elements: int, matrices: int
) -> Iterator[tuple[int, Tensor]]:
    """The expert and the elements of each block in use that has an expert."""
    sorted_ids, experts, used = routing
    slots = min(max(int(used), 0), sorted_ids.shape[0])
    for block, expert in enumerate(experts[: slots // block_size].tolist()):
        ids = sorted_ids[block * block_size : (block + 1) * block_size].long()
        if 0 <= expert < matrices:
            yield expert, ids[(ids >= 0) & (ids < elements)]


def _half(x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor | None) -> Any:
    """The rows, in float32 or wider; an expert's matrix likewise; the result's dtype."""
    if w_scale is None or x_scale is None:
        return _wide(x), lambda expert: _wide(w[expert]), x.dtype
    rows = _scaled_rows(x, x_scale, w_scale)
    dtype = torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype
    return rows, lambda expert: _scaled_matrix(w, w_scale, expert, rows.dtype), dtype


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
    x_scale: Tensor | None = None,
    w_up_scale: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.moe_up`, for any sizes."""
    rows, matrix, dtype = _half(x, w_up, x_scale, w_up_scale)
    elements = x.shape[0] * top_k
    out = torch.zeros(elements, w_up.shape[1] // 2, dtype=dtype, device=x.device)
    routing = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    for expert, ids in _blocks(routing, block_size, elements, w_up.shape[0]):
        out[ids] = _activate(rows[ids // top_k] @ matrix(expert).T, activation).to(dtype)
    return out


def moe_down(
    x: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    block_size: int,
    *,
    x_scale: Tensor | None = None,
    w_down_scale: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.moe_down`, for any sizes."""
    rows, matrix, dtype = _half(x, w_down, x_scale, w_down_scale)
    out = torch.zeros(x.shape[0], w_down.shape[1], dtype=dtype, device=x.device)
    weights = _wide(topk_weights)
    routing = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    for expert, ids in _blocks(routing, block_size, x.shape[0], w_down.shape[0]):
        out[ids] = (rows[ids] @ matrix(expert).T * weights[ids, None]).to(dtype)
    return out
