# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, cache writes and both with norms in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotary_embedding(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.rotary_embedding`; float64 stays float64."""
    return (
        turned(q, positions, cos_sin_cache, interleaved),
        turned(k, positions, cos_sin_cache, interleaved),
    )


def axes_of(sections: Sequence[int], interleaved: bool) -> list[int]:
    """Which of a token's three positions turns each pair, of `sections` pairs in all."""
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    return axes


def turned(
    x: Tensor,
    positions: Tensor,
    cache: Tensor,
    interleaved: bool,
    axes: Sequence[int] | None = None,
) -> Tensor:
    """`x` [T, H, D] rotated; `cache` may have fewer columns. With `axes` the positions are
    [3, T]."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rotated = cache.shape[1]
    if rotated == 0:
        return x.clone()
    # A position that is no row takes the nearest one.
    angles = cache[positions.long().clamp(0, cache.shape[0] - 1)].to(wide)
    if axes is not None:
        by_axis = angles.unflatten(-1, (2, rotated // 2))  # [3, T, 2, R/2]
        angles = torch.stack([by_axis[axis, ..., i] for i, axis in enumerate(axes)], -1).flatten(1)
    angles = angles[:, None]
    cosines, sines = angles[..., : rotated // 2], angles[..., rotated // 2 :]
    turning = x[..., :rotated].to(wide)
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., : rotated // 2], turning[..., rotated // 2 :]
    pair = (first * cosines - second * sines, second * cosines + first * sines)
    both = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([both.to(x.dtype), x[..., rotated:]], dim=-1)


def turned_back(cache: Tensor) -> Tensor:
    """The cosines and sines of the opposite angles."""
    half = cache.shape[1] // 2
    return torch.cat([cache[:, :half], -cache[:, half:]], dim=1)


def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.kv_cache_write`."""
    kept = (slots >= 0) & (slots < key_cache.shape[0] * key_cache.shape[1])
    blocks = torch.div(slots[kept].long(), key_cache.shape[1], rounding_mode="floor")
    places = slots[kept].long() % key_cache.shape[1]
    for new, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        rows = _narrowed(new[kept], cache.dtype, scale)
        if cache.dtype == torch.float8_e4m3fn:
            # Not every device indexes float8: its bits are as good.
            cache.view(torch.uint8)[blocks, places] = rows.view(torch.uint8)
        else:
            cache[blocks, places] = rows
    return key_cache, value_cache


def _narrowed(heads: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """`heads` [T, H, D] in another dtype; to float8 divided by `scale`."""
    if dtype != torch.float8_e4m3fn:
        return heads.to(dtype)
    wide = heads if heads.dtype == torch.float64 else heads.float()
    if scale is not None:
        wide = wide / scale.reshape(-1, 1)
    return wide.clamp(-448.0, 448.0).to(dtype)  # NaN stays


def qk_norm_rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    q_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of :func:`tiercel.qk_norm_rope_cache`; float64 stays float64."""
    axes = None if sections is None else axes_of(sections, sections_interleaved)
    turned_q, turned_k = (
        turned(_normed(x, weight, eps), positions, cos_sin_cache, interleaved, axes)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    q_out.copy_(_narrowed(turned_q, q_out.dtype, q_scale))
    kv_cache_write(
        *(turned_k, v, key_cache, value_cache, slots), key_scale=key_scale, value_scale=value_scale
    )
    return q_out, key_cache, value_cache


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """In float32, not rounded."""
    wide = x if x.dtype == torch.float64 else x.float()
    if weight is None:
        return wide
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.to(wide)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.qk_norm_rope`; float64 stays float64."""
    q_out, k_out = (
        turned(_normed(x, weight, eps), positions, cos_sin_cache, interleaved).to(x.dtype)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return q_out, k_out


def qk_norm_rope_backward(
    q: Tensor,
    k: Tensor,
    grad_q_out: Tensor,
    grad_k_out: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    for_q_weight: bool = True,
    for_k_weight: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `qk_norm_rope`; those of weights that are not wanted are empty."""
    back = turned_back(cos_sin_cache)
    of_heads, of_weights = [], []
    for x, grad, weight, wanted in (
        (q, grad_q_out, q_weight, for_q_weight),
        (k, grad_k_out, k_weight, for_k_weight),
    ):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        inner = turned(grad.to(wide), positions, back, interleaved)
        of_weight = x.new_empty(0) if weight is None else weight.new_empty(0)
        if weight is not None:
            factor = torch.rsqrt(x.to(wide).square().mean(dim=-1, keepdim=True) + eps)
            normed = x.to(wide) * factor
            if wanted:
                of_weight = (inner * normed).sum(dim=(0, 1)).to(weight.dtype)
            inner = inner * weight.to(wide)
            mean = (inner * normed).mean(dim=-1, keepdim=True)
            inner = factor * (inner - normed * mean)
        of_heads.append(inner.to(x.dtype))
        of_weights.append(of_weight)
    return *of_heads, *of_weights  # type: ignore[return-value]
