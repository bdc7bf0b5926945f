# SPDX-License-Identifier: Apache-2.0
"""The rules for attention's index tensors, for TIERCEL_CHECK=1."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.core.index_checks import Index, between, part_bounds
from tiercel.core.spec import Call


def bounds_of_sequences(name: str, starts: Tensor, rows: int, longest: int | None) -> list[Index]:
    """`cu_seqlens` begins and ends sequences among `rows`, none of them longer than `longest`."""
    found = part_bounds(name, starts, rows)
    if longest is not None:
        due = f"hold sequences of at most `{name.replace('cu_seqlens', 'max_seqlen')}` = {longest}"
        found.append(Index(name, starts[1:] - starts[:-1], lambda n: n > longest, f"{due} rows"))
    return found


def packed_indices(call: Call) -> list[Index]:
    """The rules for attention_varlen and its gradients, which know no longest sequence."""
    found = []
    for name, rows in (("q", call.q), ("k", call.k)):
        starts, longest = f"cu_seqlens_{name}", getattr(call, f"max_seqlen_{name}", None)
        found += bounds_of_sequences(starts, getattr(call, starts), rows.shape[0], longest)
    return found


def paged_indices(call: Call) -> list[Index]:
    """The rules for a paged cache; page entries count only for keys that exist."""
    page_table, seqused_k, longest = call.page_table, call.seqused_k, call.max_seqused_k
    pages, size = call.k_cache.shape[:2]
    columns = page_table.shape[1]
    first_keys = torch.arange(columns, device=page_table.device) * size

    def wrong(table: Tensor) -> Tensor:
        used = first_keys < seqused_k[:, None]
        return ((table < 0) | (table >= pages)) & used

    most = between("seqused_k", seqused_k, 0, columns * size)
    if longest is not None and longest < columns * size:
        due = f"hold numbers from 0 to `max_seqused_k` = {longest}"
        most = between("seqused_k", seqused_k, 0, longest)._replace(due=due)
    due = f"hold pages from 0 to {pages - 1} for the keys before `seqused_k`"
    found = [most, Index("page_table", page_table, wrong, due)]
    if getattr(call, "prefix", None) is not None:
        found.append(Index("prefix", call.prefix, lambda n: n < 0, "hold numbers of at least 0"))
    return found


def mixed_indices(call: Call) -> list[Index]:
    """The rules for paged_attention."""
    starts = bounds_of_sequences(
        "cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0], call.max_seqlen_q
    )
    return [*starts, *paged_indices(call), *_tree_indices(call)]


def _tree_indices(call: Call) -> list[Index]:
    """A row sees itself and earlier rows of its sequence; rows of no sequence hold anything."""
    words, starts = call.tree_mask, call.cu_seqlens_q
    if words is None:
        return []
    row = torch.arange(len(words), device=words.device, dtype=starts.dtype)
    entry = torch.searchsorted(starts.contiguous(), row, right=True)  # with the row, from 1 on
    inside = (entry > 0) & (entry < len(starts))
    own = (row - starts[(entry - 1).clamp(0)]).long().clamp(0, 63)

    def wrong(words: Tensor) -> Tensor:
        return inside & ((words >> own) != 1) & ((own < 63) | (words >= 0))

    due = "hold for each row its own bit and earlier ones"
    return [Index("tree_mask", words, wrong, due)]
