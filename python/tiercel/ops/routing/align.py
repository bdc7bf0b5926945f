# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing: sorting tokens by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Backend, Op
from tiercel.core import platform
from tiercel.core.checks import (
    check_bool,
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.eager import empty
from tiercel.core.index_checks import Index, places
from tiercel.core.platform import Reason
from tiercel.ops.routing import reference as ref

__all__ = ["moe_align_block_size"]

_NAME = "moe_align_block_size"
_INT32 = (torch.int32,)
OUTPUTS = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")


def _check_int(op: str, name: str, value: object, least: int) -> None:
    if not hasattr(value, "__index__"):
        raise TypeError(f"{op}: `{name}` must be an int, got {type(value).__name__}")
    if value < least:  # type: ignore[operator]
        raise ValueError(f"{op}: `{name}` must be at least {least}, got {value}")


def check_sizes(op: str, block_size: int, num_experts: int, slots: int) -> None:
    _check_int(op, "block_size", block_size, 1)
    _check_int(op, "num_experts", num_experts, 1)
    # Sizes that vary from call to call are known, and checked, when it runs.
    if not isinstance(slots, torch.SymInt) and slots > 2**31 - 1:
        raise ValueError(f"{op}: more slots than int32 can number are needed, {slots}")


def check_map(op: str, expert_map: Tensor | None, experts: int, name: str, like: Tensor) -> None:
    if expert_map is None:
        return
    if not isinstance(expert_map, Tensor):
        got = type(expert_map).__name__
        raise TypeError(f"{op}: `expert_map` must be a torch.Tensor or None, got {got}")
    check_rank(op, "expert_map", expert_map, 1)
    check_dtype(op, "expert_map", expert_map.dtype, _INT32)
    check_shape(op, "expert_map", expert_map, (experts,), "[num_experts]")
    check_same_device(op, "expert_map", expert_map, name, like)
    check_contiguous(op, "expert_map", expert_map)


def check_outputs(
    op: str, outputs: tuple[Tensor, ...], needed: int, block_size: int, name: str, like: Tensor
) -> None:
    for output, tensor in zip(OUTPUTS, outputs, strict=True):
        check_rank(op, output, tensor, 1)
        check_dtype(op, output, tensor.dtype, _INT32)
        check_same_device(op, output, tensor, name, like)
        check_contiguous(op, output, tensor)
    slots = outputs[0].shape[0]
    if slots < needed:
        raise ValueError(
            f"{op}: `sorted_token_ids` must have at least {needed} elements, got {slots}"
        )
    blocks = (slots + block_size - 1) // block_size
    why = "[ceil(sorted_token_ids / block_size)]"
    check_shape(op, "expert_ids", outputs[1], (blocks,), why)
    check_shape(op, "num_tokens_post_padded", outputs[2], (1,), "[1]")


def _check_ids(topk_ids: Tensor) -> None:
    check_rank(_NAME, "topk_ids", topk_ids, 2)
    check_dtype(_NAME, "topk_ids", topk_ids.dtype, (torch.int32, torch.int64))
    check_contiguous(_NAME, "topk_ids", topk_ids)


def slots_for(numel: int, num_experts: int, block_size: int, pad: bool = False) -> int:
    """Slots that any distribution of `numel` ids fits in; ``pad``: whole blocks of them."""
    slots = numel + num_experts * (block_size - 1)
    if pad:
        slots = (slots + block_size - 1) // block_size * block_size
    # With fewer ids than experts, each id may need a block of its own. No branch on `numel`:
    # it is a symbol under torch.export.
    least = torch.sym_min if isinstance(numel, torch.SymInt) else min
    result: int = least(numel * block_size, slots)
    return result


def empty_outputs(
    like: Tensor, numel: int, num_experts: int, block_size: int, pad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    slots = slots_for(numel, num_experts, block_size, pad)
    blocks = (slots + block_size - 1) // block_size
    int32 = torch.int32
    return empty(like, (slots,), int32), empty(like, (blocks,), int32), empty(like, (1,), int32)


# moe_align_block_size


def _check(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
    backend: str | None,
) -> None:
    _check_ids(topk_ids)
    check_bool(_NAME, "pad_sorted_ids", pad_sorted_ids)
    check_bool(_NAME, "ignore_invalid_experts", ignore_invalid_experts)
    check_sizes(_NAME, block_size, num_experts, 0)
    slots = slots_for(topk_ids.numel(), num_experts, block_size, pad_sorted_ids)
    check_sizes(_NAME, block_size, num_experts, slots)
    check_map(_NAME, expert_map, num_experts, "topk_ids", topk_ids)


def _check_out(
    topk_ids: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None,
    ignore_invalid_experts: bool,
    backend: str | None,
) -> None:
    _check(topk_ids, block_size, num_experts, expert_map, False, ignore_invalid_experts, None)
    needed = slots_for(topk_ids.numel(), num_experts, block_size)
    outputs = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    check_outputs(_NAME, outputs, needed, block_size, "topk_ids", topk_ids)


def _fake(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Any, pad: bool, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_outputs(topk_ids, topk_ids.numel(), num_experts, block_size, pad)


def _indices(topk_ids: Tensor, experts: int, expert_map: Tensor | None) -> list[Index]:
    return [places("topk_ids", topk_ids, experts), map_index(expert_map, experts)]


def map_index(expert_map: Tensor | None, experts: int) -> Index:
    """There are no more experts on a device than on all of them."""
    return places("expert_map", expert_map, experts)


def _launch(
    topk_ids: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor],
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None,
    ignore_invalid_experts: bool,
    run: Any = _C.moe_align_block_size,
) -> Any:
    size = _C.moe_align_block_size_workspace(topk_ids.numel(), num_experts)
    workspace = empty(topk_ids, (size,), torch.int32) if size else None
    return run(
        topk_ids,
        expert_map,
        *outputs,
        workspace,
        block_size,
        num_experts,
        ignore_invalid_experts,
    )


def align_sm90(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = empty_outputs(topk_ids, topk_ids.numel(), num_experts, block_size, pad_sorted_ids)
    _launch(topk_ids, outputs, block_size, num_experts, expert_map, ignore_invalid_experts)
    return outputs


def align_for_products(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """With counters, zero, behind the number of slots: see kernels/moe/moe_mlp.h."""
    *lists, _ = empty_outputs(topk_ids, topk_ids.numel(), num_experts, block_size, False)
    outputs = (lists[0], lists[1], empty(topk_ids, (3 + lists[1].shape[0],), torch.int32))
    _launch(topk_ids, outputs, block_size, num_experts, expert_map, False)
    return outputs


def align_sm90_out(topk_ids: Tensor, *args: Any) -> None:
    _launch(topk_ids, args[:3], *args[3:7])


def _ref(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return ref.moe_align_block_size(
        topk_ids,
        block_size,
        num_experts,
        expert_map,
        pad_sorted_ids=pad_sorted_ids,
        ignore_invalid_experts=ignore_invalid_experts,
    )


def fill_outputs(
    outputs: tuple[Tensor, Tensor, Tensor], found: tuple[Tensor, Tensor, Tensor], numel: int
) -> None:
    """Copies results into outputs that may have more slots and blocks than needed."""
    for output, result, rest in zip(outputs, found, (numel, -1, 0), strict=True):
        output[: result.shape[0]].copy_(result)
        output[result.shape[0] :].fill_(rest)


def _ref_out(topk_ids: Tensor, *args: Any) -> None:
    block_size, num_experts, expert_map, ignore, _ = args[3:]
    found = _ref(topk_ids, block_size, num_experts, expert_map, False, ignore, None)
    fill_outputs(args[:3], found, topk_ids.numel())


def align_plan(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
    backend: str | None,
) -> dict[str, Any]:
    outputs = empty_outputs(topk_ids, topk_ids.numel(), num_experts, block_size, pad_sorted_ids)
    rest = (block_size, num_experts, expert_map, ignore_invalid_experts)
    return dict(_launch(topk_ids, outputs, *rest, run=_C.moe_align_block_size_plan))


def _why_not(topk_ids: Tensor, *rest: Any) -> Reason | None:
    reason = platform.why_not(topk_ids.device)
    if reason is not None:
        return reason
    try:
        align_plan(topk_ids[:0], *rest)  # limits do not depend on the number of tokens
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


def _why_not_out(topk_ids: Tensor, *args: Any) -> Reason | None:
    block_size, num_experts, expert_map, ignore, _ = args[3:]
    return _why_not(topk_ids, block_size, num_experts, expert_map, False, ignore, None)


_CUDA = ("ranks by ballots, sums over a cluster of blocks, one launch", "cuda")
_TORCH = ("a stable torch.sort", "torch")
_ALIGN_OPTIONS = "Tensor? expert_map=None, bool pad_sorted_ids=False, "
_IGNORE = "bool ignore_invalid_experts=False, str? backend=None"
_ALIGNED = "Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded"

_ALIGN = Op(
    _NAME,
    f"(Tensor topk_ids, int block_size, int num_experts, {_ALIGN_OPTIONS}{_IGNORE})"
    f" -> ({_ALIGNED})",
    check=_check,
    fake=_fake,
    sm90=Backend("sm90", align_sm90, *_CUDA, why_not=_why_not),
    ref=Backend("ref", _ref, *_TORCH),
    describe=align_plan,
    load=_C.moe_align_block_size_load,
    indices=lambda *args: _indices(args[0], args[2], args[3]),
)

_ALIGN_OUT = Op(
    f"{_NAME}_out",
    "(Tensor topk_ids, Tensor(a!) sorted_token_ids, Tensor(b!) expert_ids,"
    " Tensor(c!) num_tokens_post_padded, int block_size, int num_experts,"
    f" Tensor? expert_map=None, {_IGNORE}) -> ()",
    check=_check_out,
    fake=lambda *args: None,
    sm90=Backend("sm90", align_sm90_out, *_CUDA, why_not=_why_not_out),
    ref=Backend("ref", _ref_out, *_TORCH),
    family=_NAME,
    indices=lambda *args: _indices(args[0], args[5], args[6]),
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
    """Sorts chosen experts' tokens by expert, each expert's share padded to whole blocks.

    What a grouped matrix product over experts needs, with vLLM's contract: block ``b`` of
    ``block_size`` slots belongs to expert ``expert_ids[b]``, and slot ``s`` holds the number of an
    element of ``topk_ids``, ``t * k + j``, or ``T * k`` where it is padding. Within an expert the
    numbers ascend, so the result is the same every time.

    Works under torch.compile and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        topk_ids: ``[T, k]``, int32 or int64, contiguous: experts that were chosen, as from
            :func:`tiercel.topk_softmax`. Ids outside of 0 to ``num_experts - 1`` are left out.
        block_size: Slots of one block, such as 16 to 256.
        num_experts: How many experts there are; the precompiled kernels take up to 512.
        expert_map: ``[num_experts]`` int32, for expert parallelism: an expert's number on this
            device, or -1 where it is on another one. Any other number is handed on, and with
            ``ignore_invalid_experts`` counts as -1.
        pad_sorted_ids: Make the number of slots a multiple of ``block_size``.
        ignore_invalid_experts: What ``expert_map`` does. False: all experts' tokens are sorted, and
            ``expert_ids`` holds the mapped numbers, -1 included. True: tokens of experts that the
            map lacks are left out, and the sorting is by the mapped numbers.
        out: ``(sorted_token_ids, expert_ids, num_tokens_post_padded)`` to write to: contiguous and
            int32; the first may be longer than needed, and the second then has a block for each
            ``block_size`` of it. ``pad_sorted_ids`` does not count then.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``sorted_token_ids`` ``[S]``, where S is ``T * k + num_experts * (block_size - 1)``, or
        ``T * k * block_size`` where that is less and there are fewer ids than experts;
        ``expert_ids`` ``[ceil(S / block_size)]``, -1 for blocks behind the last one that is used;
        ``num_tokens_post_padded`` ``[1]``, the slots of the blocks that are used. All int32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor or no int.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and there are too many experts.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights, experts = tiercel.topk_softmax(router_logits, 8)
        >>> slots, blocks, used = tiercel.moe_align_block_size(experts, 64, 128)
    """
    if out is None:
        result: tuple[Tensor, Tensor, Tensor] = _ALIGN(
            topk_ids,
            block_size,
            num_experts,
            expert_map,
            pad_sorted_ids,
            ignore_invalid_experts,
            backend,
        )
        return result
    outputs = tuple_of(_NAME, out, OUTPUTS)
    rest = (block_size, num_experts, expert_map, ignore_invalid_experts, backend)
    _ALIGN_OUT(topk_ids, *outputs, *rest)
    return outputs[0], outputs[1], outputs[2]


def tuple_of(op: str, out: Any, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    if isinstance(out, (tuple, list)) and len(out) == len(names):
        return tuple(out)
    got = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
    raise TypeError(f"{op}: `out` must be a tuple ({', '.join(names)}), got {got}")
