# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing: sorting tokens by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tiercel import _C
from tiercel.core.eager import empty
from tiercel.core.index_checks import Index, places
from tiercel.core.op import Op, Python
from tiercel.core.spec import Call
from tiercel.ops.routing import reference as ref
from tiercel.ops.routing import spec

__all__ = ["moe_align_block_size"]

_Lists = tuple[Tensor, Tensor, Tensor]


def empty_lists(
    like: Tensor, elements: int, experts: int, block_size: int, whole_blocks: bool = False
) -> _Lists:
    slots = spec.slots_for(elements, experts, block_size, whole_blocks)
    blocks, int32 = (slots + block_size - 1) // block_size, torch.int32
    return empty(like, (slots,), int32), empty(like, (blocks,), int32), empty(like, (1,), int32)


def fill_lists(
    topk_ids: Tensor,
    lists: tuple[Tensor, ...],
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None,
    ignore_invalid_experts: bool = False,
    native: Callable[..., Any] = _C.moe_align_block_size,
) -> Any:
    size = _C.moe_align_block_size_workspace(topk_ids.numel(), num_experts)
    workspace = empty(topk_ids, (size,), torch.int32) if size else None
    rest = (block_size, num_experts, ignore_invalid_experts)
    return native(topk_ids, expert_map, *lists, workspace, *rest)


def align_for_products(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None
) -> _Lists:
    """With counters, zero, behind the number of slots: see kernels/moe/moe_mlp.h."""
    slots, blocks, _ = empty_lists(topk_ids, topk_ids.numel(), num_experts, block_size)
    lists = (slots, blocks, empty(topk_ids, (3 + blocks.shape[0],), torch.int32))
    fill_lists(topk_ids, lists, block_size, num_experts, expert_map)
    return lists


def _run(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
    *out: Tensor,
) -> _Lists | None:
    lists = out or empty_lists(topk_ids, topk_ids.numel(), num_experts, block_size, pad_sorted_ids)
    fill_lists(topk_ids, lists, block_size, num_experts, expert_map, ignore_invalid_experts)
    return None if out else lists  # type: ignore[return-value]


def _plan(call: Call) -> dict[str, Any]:
    lists = empty_lists(
        call.topk_ids, call.topk_ids.numel(), call.num_experts, call.block_size, call.pad_sorted_ids
    )
    rest = (call.block_size, call.num_experts, call.expert_map, call.ignore_invalid_experts)
    return dict(fill_lists(call.topk_ids, lists, *rest, native=_C.moe_align_block_size_plan))


def run_plain(declared: spec.Spec, function: Callable[..., Any], call: Call) -> tuple[Any, ...]:
    """The results of a function that takes the arguments by name and makes lists of the needed
    sizes. Given lists may be longer: those are filled up with padding."""
    arguments = {name: getattr(call, name) for name in declared.names}
    if "sorted_token_ids" not in call:
        return function(**arguments)  # type: ignore[no-any-return]
    arguments["pad_sorted_ids"] = False
    *first, slots, blocks, used = function(**arguments)
    elements = first[0].numel() if first else call.topk_ids.numel()
    more = call.sorted_token_ids.shape[0] - slots.shape[0]
    slots = pad(slots, (0, more), value=elements)
    more = call.expert_ids.shape[0] - blocks.shape[0]
    return *first, slots, pad(blocks, (0, more), value=-1), used


def run_plugin(declared: spec.Spec, function: Callable[..., Any], call: Call) -> tuple[Any, ...]:
    """Runs a plug-in, which takes the arguments by position."""
    return run_plain(declared, lambda **arguments: function(*arguments.values()), call)


def map_index(expert_map: Tensor | None, experts: int) -> Index:
    """There are no more experts on a device than on all of them."""
    return places("expert_map", expert_map, experts)


_ALIGN = Op(
    spec.MOE_ALIGN_BLOCK_SIZE,
    sm90=Python(
        _run,
        _plan,
        "ranks by ballots, sums over a cluster of blocks, one launch",
        load=_C.moe_align_block_size_load,
        sample=lambda call: {"topk_ids": call.topk_ids[:0]},  # no limit depends on their number
        positional=True,
    ),
    reference=lambda call: run_plain(spec.MOE_ALIGN_BLOCK_SIZE, ref.moe_align_block_size, call),
    plugin=lambda function, call: run_plugin(spec.MOE_ALIGN_BLOCK_SIZE, function, call),
    method="a stable torch.sort",
    indices=lambda call: [
        places("topk_ids", call.topk_ids, call.num_experts),
        map_index(call.expert_map, call.num_experts),
    ],
)


@_ALIGN.export
def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    *,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts tokens by chosen expert and pads each expert's share to whole blocks.

    A grouped matrix product over experts takes the result, which follows vLLM's contract: block
    ``b`` of ``block_size`` slots belongs to expert ``expert_ids[b]``, and slot ``s`` holds the
    index ``t * k + j`` of an element of ``topk_ids``, or ``T * k`` for padding. Within an expert
    the indices ascend, so the result is deterministic.

    Works under torch.compile and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        topk_ids: ``[T, k]``, int32 or int64, contiguous: the chosen experts, as from
            :func:`tiercel.topk_softmax`. Ids outside of 0 to ``num_experts - 1`` are left out.
        block_size: Slots of one block, such as 16 to 256.
        num_experts: How many experts there are; the precompiled kernels take up to 1024.
        expert_map: ``[num_experts]`` int32, for expert parallelism: an expert's index on this
            device, or -1 for an expert of another one. Other indices are passed on as they are;
            with ``ignore_invalid_experts`` they count as -1.
        pad_sorted_ids: Whether to round the number of slots up to a multiple of ``block_size``.
        ignore_invalid_experts: How to use ``expert_map``. False: all experts' tokens are sorted,
            and ``expert_ids`` holds the mapped indices, -1 included. True: tokens of experts mapped
            to -1 are left out, and sorting is by the mapped indices.
        out: ``(sorted_token_ids, expert_ids, num_tokens_post_padded)`` to write to: contiguous and
            int32; the first may be longer than needed, and the second then has a block for each
            ``block_size`` of it. ``pad_sorted_ids`` is then ignored.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``sorted_token_ids`` ``[S]``, where S is ``T * k + num_experts * (block_size - 1)``, or
        ``T * k * block_size`` where that is less and there are fewer ids than experts;
        ``expert_ids`` ``[ceil(S / block_size)]``, -1 for unused blocks at the end;
        ``num_tokens_post_padded`` ``[1]``, the number of slots in used blocks. All int32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor or no int.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and there are too many experts.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights, experts = tiercel.topk_softmax(router_logits, 8)
        >>> slots, blocks, used = tiercel.moe_align_block_size(experts, 64, 128)
    """
    options = (expert_map, pad_sorted_ids, ignore_invalid_experts, backend)
    if out is None:
        result: _Lists = _ALIGN.pick()(topk_ids, block_size, num_experts, *options)
        return result
    return _ALIGN.into()(out, topk_ids, block_size, num_experts, *options)  # type: ignore[no-any-return]
