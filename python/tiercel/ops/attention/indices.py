# SPDX-License-Identifier: Apache-2.0
"""The rules for attention's index tensors, for TIERCEL_CHECK=1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel.core.index_checks import Index, ascending, between


def bounds_of_sequences(name: str, starts: Tensor, rows: int, longest: int | None) -> list[Index]:
    """`cu_seqlens` begins and ends sequences among `rows`, none of them longer than `longest`."""
    found = [between(name, starts, 0, rows), ascending(name, starts)]
    if longest is not None:
        due = f"hold sequences of at most `{name.replace('cu_seqlens', 'max_seqlen')}` = {longest}"
        found.append(Index(name, starts[1:] - starts[:-1], lambda n: n > longest, f"{due} rows"))
    return found


def packed_indices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *_: Any,
) -> list[Index]:
    """The rules for attention_varlen, whose operators begin with these arguments."""
    return [
        *bounds_of_sequences("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q),
        *bounds_of_sequences("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k),
    ]


def packed_gradients_indices(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *_: Any,
) -> list[Index]:
    """The rules for attention_varlen's gradients."""
    return [
        *bounds_of_sequences("cu_seqlens_q", cu_seqlens_q, q.shape[0], None),
        *bounds_of_sequences("cu_seqlens_k", cu_seqlens_k, k.shape[0], None),
    ]


def paged_indices(
    *,
    k_cache: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    prefix: Tensor | None,
    max_seqused_k: int | None,
    **_: Any,
) -> list[Index]:
    """The rules for decode_attention; page entries count only for keys that exist."""
    pages, size = k_cache.shape[:2]
    columns = page_table.shape[1]
    first_keys = torch.arange(columns, device=page_table.device) * size

    def wrong(table: Tensor) -> Tensor:
        used = first_keys < seqused_k[:, None]
        return ((table < 0) | (table >= pages)) & used

    most = between("seqused_k", seqused_k, 0, columns * size)
    if max_seqused_k is not None and max_seqused_k < columns * size:
        due = f"hold numbers from 0 to `max_seqused_k` = {max_seqused_k}"
        most = between("seqused_k", seqused_k, 0, max_seqused_k)._replace(due=due)
    due = f"hold pages from 0 to {pages - 1} for the keys before `seqused_k`"
    found = [most, Index("page_table", page_table, wrong, due)]
    if prefix is not None:
        found.append(Index("prefix", prefix, lambda n: n < 0, "hold numbers of at least 0"))
    return found
