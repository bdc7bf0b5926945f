# SPDX-License-Identifier: Apache-2.0
"""Expert MLPs in plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tiercel.ops.gemv.reference import w4_values
from tiercel.ops.moe.packing import pack_w4_experts as pack_w4_experts
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
    ids = _local_ids(topk_ids, w_up.shape[0], expert_map)
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


def grouped_gemm(
    x: Tensor,
    w: Tensor,
    offsets: Tensor | None,
    *,
    counts: Tensor | None = None,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.grouped_gemm`, for any sizes; float64 is computed in float64. It
    writes zeros to the rows beyond `counts`."""
    if counts is None:
        assert offsets is not None
        bounds = offsets.clamp(0, x.shape[0]).tolist()
        return _groups(x, w, list(itertools.pairwise(bounds)), x_scale, w_scale)
    capacity = x.shape[1]
    of_each = enumerate(counts.clamp(0, capacity).tolist())
    places = [(group * capacity, group * capacity + count) for group, count in of_each]
    scale = None if x_scale is None else x_scale.flatten(0, 1)
    return _groups(x.flatten(0, 1), w, places, scale, w_scale).view(*x.shape[:2], w.shape[1])


def _groups(
    x: Tensor,
    w: Tensor,
    places: list[tuple[int, int]],
    x_scale: Tensor | None,
    w_scale: Tensor | None,
) -> Tensor:
    rows, matrix, dtype = _half(x, w, x_scale, w_scale)
    out = torch.zeros(x.shape[0], w.shape[1], dtype=dtype, device=x.device)
    for group, (first, end) in enumerate(places):
        out[first:end] = (rows[first:end] @ matrix(group).T).to(dtype)
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


def _local_ids(topk_ids: Tensor, experts: int, expert_map: Tensor | None) -> Tensor:
    """The place of each id's expert in the weights; `experts` for an id without one."""
    ids = topk_ids.flatten().long()
    if expert_map is not None:
        real = (ids >= 0) & (ids < expert_map.shape[0])
        ids = torch.where(real, expert_map.long()[ids.clamp(0, expert_map.shape[0] - 1)], -1)
    return torch.where((ids >= 0) & (ids < experts), ids, experts)


def _places(topk_ids: Tensor, experts: int, expert_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """The row of each id in the order of the experts, -1 for one that is no expert's, and where
    experts' rows begin."""
    ids = _local_ids(topk_ids, experts, expert_map)
    rows = torch.empty_like(ids)
    rows[ids.argsort(stable=True)] = torch.arange(ids.shape[0], device=ids.device)
    ends = ids.bincount(minlength=experts + 1)[:experts].cumsum(0)
    places = torch.where(ids < experts, rows, -1).view(topk_ids.shape)
    return places.int(), torch.cat([ends.new_zeros(1), ends]).int()


def _to_rows(x: Tensor, places: Tensor) -> Tensor:
    """Tokens' rows in the order of the experts; zeros behind them."""
    out = torch.zeros(places.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    token, at = (places >= 0).nonzero(as_tuple=True)
    out[places[token, at].long()] = x[token]
    return out


def _from_rows(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """The sum of each token's rows by their weights."""
    tokens, k = places.shape
    taken = _wide(rows)[places.clamp(min=0).flatten().long()].view(tokens, k, rows.shape[1])
    taken = torch.where((places >= 0)[..., None], taken, 0.0)
    if weights is not None:
        taken = taken * weights.to(taken.dtype)[..., None]
    return taken.sum(1).to(rows.dtype)


def fused_moe_with_gradient(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`tiercel.fused_moe` where a gradient is wanted, and what its backward needs."""
    places, offsets = _places(topk_ids, w_up.shape[0], expert_map)
    pre = grouped_gemm(_to_rows(x, places), w_up, offsets)
    inner = _activate(_wide(pre), activation).to(x.dtype)
    outer = grouped_gemm(inner, w_down, offsets)
    return _from_rows(outer, places, topk_weights), pre, places, offsets


def _slopes(pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns f(a), its derivative and c(b) of act(a, b) = f(a) * c(b); that of c is 1."""
    a, b = pre.chunk(2, dim=-1)
    if activation == "relu":
        return a.relu(), (a > 0).to(a.dtype), b
    if activation == "silu":
        s = a.sigmoid()
        return a * s, s * (1 + a * (1 - s)), b
    cdf = 0.5 * (1 + torch.erf(a * 0.5**0.5))
    bell = torch.exp(-0.5 * a * a) * (0.5 / torch.pi) ** 0.5
    return a * cdf, cdf + a * bell, b + 1 if activation == "gelu_residual" else b


def fused_moe_backward(
    x: Tensor,
    grad: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    pre: Tensor | None = None,
    places: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    for_x: bool = True,
    for_w_up: bool = True,
    for_w_down: bool = True,
    for_topk_weights: bool = True,
    overwrites_pre: bool = False,
) -> tuple[Tensor, ...]:
    """The gradients of :func:`tiercel.fused_moe`; without elements where none is wanted. Whether
    `pre` may be overwritten makes no difference here."""
    if pre is None or places is None or offsets is None:
        places, offsets = _places(topk_ids, w_up.shape[0], expert_map)
        pre = grouped_gemm(_to_rows(x, places), w_up, offsets)
    none = x.new_empty(0)
    results = dict.fromkeys(("x", "w_up", "w_down"), none)
    results["topk_weights"] = none.to(topk_weights.dtype)
    value, slope, factor = _slopes(_wide(pre), activation)
    rows = _to_rows(grad, places)
    weights = _to_rows(topk_weights.reshape(-1, 1), places.view(-1, 1)).to(value.dtype)
    inner = value * factor
    of_inner = _wide(grouped_gemm_backward_x(rows, w_down, offsets))
    if for_w_down:
        weighted = (inner * weights).to(x.dtype)
        results["w_down"] = grouped_gemm_backward_weight(rows, weighted, offsets)
    if for_topk_weights:
        dots = (of_inner * inner).sum(1, keepdim=True)
        of_weights = _from_rows(dots, places.view(-1, 1), None)
        results["topk_weights"] = of_weights.view(places.shape).to(topk_weights.dtype)
    of_inner = of_inner * weights
    of_pre = torch.cat([of_inner * factor * slope, of_inner * value], dim=1).to(x.dtype)
    if for_w_up:
        results["w_up"] = grouped_gemm_backward_weight(of_pre, _to_rows(x, places), offsets)
    if for_x:
        results["x"] = _from_rows(grouped_gemm_backward_x(of_pre, w_up, offsets), places, None)
    return tuple(results.values())


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


def _w4_activate(
    sums: Tensor, activation: str, alpha: float, limit: float, interleaved: bool
) -> Tensor:
    """The activation between the two products."""
    if activation == "relu_squared":
        return functional.relu(sums).square()
    a, b = (sums[..., 0::2], sums[..., 1::2]) if interleaved else sums.chunk(2, dim=-1)
    if limit:
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    if activation in ("silu", "silu_residual"):
        gate = a * torch.sigmoid(alpha * a)
        return gate * (b + 1 if activation == "silu_residual" else b)
    result: Tensor = getattr(functional, activation)(a) * b
    return result


def w4_moe(
    x: Tensor,
    w_up: Tensor,
    w_up_scale: Tensor,
    w_down: Tensor,
    w_down_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    format: str = "mxfp4",  # noqa: A002
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float = 0.0,
    interleaved: bool = False,
    expert_map: Tensor | None = None,
    up_zero_point: Tensor | None = None,
    down_zero_point: Tensor | None = None,
    up_global_scale: Tensor | None = None,
    down_global_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.w4_moe`, for any sizes; float64 is computed in float64."""
    narrow = x.dtype if x_scale is None else torch.bfloat16
    wide = torch.promote_types(narrow, torch.float32)
    tokens, k = topk_ids.shape
    ids = _local_ids(topk_ids, w_down.shape[0], expert_map)
    out = torch.zeros(tokens * k, x.shape[1], dtype=wide, device=x.device)

    def product(rows: Tensor, expert: int, *given: Tensor | None) -> Tensor:
        weight, scale, zeros, factors, bias = (None if t is None else t[expert] for t in given)
        assert weight is not None and scale is not None
        result = rows.to(wide) @ w4_values(weight, scale, format, zeros).to(wide).mT
        if factors is not None:
            result = result * factors
        return result if bias is None else result + bias

    rows = x if x_scale is None else x.to(wide) * x_scale.reshape(-1, 1)
    up = (w_up, w_up_scale, up_zero_point, up_global_scale, up_bias)
    down = (w_down, w_down_scale, down_zero_point, down_global_scale, down_bias)
    for expert in range(w_down.shape[0]):
        mine = torch.nonzero(ids == expert).flatten()
        if mine.numel() == 0:
            continue
        sums = product(rows[mine // k], expert, *up)
        inner = _w4_activate(sums, activation, alpha, limit, interleaved).to(narrow)
        if x_scale is not None:
            quantized, scale = fp8_quantize(inner, "row")
            inner = quantized.to(wide) * scale
        outer = product(inner, expert, *down)
        out = out.index_add(0, mine, outer * topk_weights.flatten()[mine, None].to(wide))
    return out.view(tokens, k, x.shape[1]).sum(dim=1).to(narrow)
