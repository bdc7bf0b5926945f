# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions in plain PyTorch: each tap's rows gathered, in float32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.conv import spec


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _bounds(
    rows: int, length: int, starts: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The first row of each sequence, and the row behind its last."""
    if starts is None:
        count = rows // length if length else 0
        begins = torch.arange(count, device=device) * length
        return begins, begins + length
    starts = starts.long().clamp(0, rows)
    return starts[:-1], starts[1:]


def _owners(rows: int, length: int, starts: Tensor | None, device: torch.device) -> Tensor:
    """Each row's sequence; -1 for rows in none."""
    numbers = torch.arange(rows, device=device)
    if starts is None:
        return numbers // max(length, 1)
    count = starts.shape[0] - 1
    found = torch.searchsorted(starts.long().contiguous(), numbers, right=True) - 1
    return torch.where(found >= count, -1, found)


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor | None,
    length: int,
    activation: str | None,
    states: Tensor | None = None,
) -> Tensor:
    """x [rows, D]; states [sequences, W - 1, D], what is before each sequence."""
    rows, width = x.shape[0], weight.shape[1]
    owners = _owners(rows, length, starts, x.device)
    begins, _ = _bounds(rows, length, starts, x.device)
    numbers = torch.arange(rows, device=x.device)
    inside = owners >= 0
    if begins.shape[0] == 0:
        return x.new_zeros(x.shape) + 0 * weight.sum() if rows == 0 else torch.zeros_like(x)
    begin = begins[owners.clamp(min=0)]
    wide, filters = _wide(x), _wide(weight)
    total = torch.zeros_like(wide) if bias is None else _wide(bias).expand_as(wide).clone()
    for j in range(width):
        source = numbers - j
        taken = wide[source.clamp(min=0)]
        before = torch.zeros_like(taken)
        if states is not None:
            place = (width - 1 + source - begin).clamp(0, width - 2)
            before = _wide(states)[owners.clamp(min=0), place]
        taken = torch.where((source >= begin)[:, None], taken, before)
        total = total + taken * filters[:, width - 1 - j]
    if activation == "silu":
        total = torch.nn.functional.silu(total)
    return torch.where(inside[:, None], total, 0.0).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Reference of :func:`tiercel.causal_conv1d`, on any device."""
    flat = x.reshape(-1, x.shape[-1])
    out = _convolved(flat, weight, bias, cu_seqlens, x.shape[-2], activation)
    return out.view(x.shape)


def causal_conv1d_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of weight and bias as the kernel returns them: the first part has
    them all."""
    columns, width = weight.shape
    flat, wide, filters = _wide(x).reshape(-1, columns), _wide(grad), _wide(weight)
    rows, length = flat.shape[0], x.shape[-2]
    shape = spec.CAUSAL_CONV1D_BACKWARD.results[1].shape
    assert shape is not None
    sums = flat.new_zeros(shape(spec.Call(x=x, weight=weight)))
    owners = _owners(rows, length, cu_seqlens, x.device)
    begins, ends = _bounds(rows, length, cu_seqlens, x.device)
    if x.numel() == 0 or begins.shape[0] == 0:
        return torch.zeros_like(x), sums
    inside = (owners >= 0)[:, None]
    given = torch.where(inside, wide.reshape(-1, columns), 0.0)
    if activation == "silu":
        offset = None if bias is None else _wide(bias)
        total = _convolved(flat, filters, offset, cu_seqlens, length, None)
        gate = total.sigmoid()
        given = given * gate * (1 + total * (1 - gate))
    numbers, owners = torch.arange(rows, device=x.device), owners.clamp(min=0)
    dx = torch.zeros_like(flat)
    for j in range(width):
        before, behind = numbers - j, numbers + j
        seen = torch.where((before >= begins[owners])[:, None], flat[before.clamp(min=0)], 0.0)
        sums[0, width - 1 - j] = (given * seen).sum(0)
        later = torch.where(
            (behind < ends[owners])[:, None], given[behind.clamp(max=rows - 1)], 0.0
        )
        dx = dx + filters[:, width - 1 - j] * later
    sums[0, width] = given.sum(0)
    return torch.where(inside, dx, 0.0).to(x.dtype).view(x.shape), sums


def causal_conv1d_update(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`tiercel.causal_conv1d_update`; writes to `states` and `out`."""
    flat = x.reshape(-1, x.shape[-1])
    rows, width, slots = flat.shape[0], weight.shape[1], states.shape[0]
    length = x.shape[1]
    begins, ends = _bounds(rows, length, cu_seqlens, x.device)
    if length == 0 and cu_seqlens is None:
        return states, out
    if state_indices is None:
        state_indices = torch.arange(begins.shape[0], device=x.device)
    chosen = state_indices.long()
    valid = (chosen >= 0) & (chosen < slots)
    before = states.new_zeros(begins.shape[0], *states.shape[1:])
    if slots:
        counts = valid if has_state is None else valid & has_state
        before = torch.where(counts[:, None, None], states[chosen.clamp(0, slots - 1)], before)
    made = _convolved(flat, weight, bias, cu_seqlens, length, activation, before)
    out.copy_(made.view(x.shape))
    valid = valid & (ends > begins)
    if rows and slots:
        after = torch.empty_like(before)
        for j in range(1, width):
            place = ends - j
            old = (width - 1 + place - begins).clamp(0, width - 2)
            kept = before[torch.arange(begins.shape[0], device=x.device), old]
            new = flat[place.clamp(0, rows - 1)]
            after[:, width - 1 - j] = torch.where((place >= begins)[:, None], new, kept)
        states[chosen[valid]] = after[valid]
    return states, out
