# SPDX-License-Identifier: Apache-2.0
"""The declarations of the routing ops."""

from __future__ import annotations

from tiercel.core.spec import FLOATS, INDICES, Bool, Call, DType, Int, Spec, Tensor


def check_k(op: str, k: int, experts: int) -> None:
    if k < 1 or k > experts:
        raise ValueError(
            f"{op}: k must be between 1 and the number of experts, got k = {k} "
            f"for {experts} experts"
        )


def _check_topk(call: Call) -> None:
    check_k("topk_softmax", call.k, call.scores.shape[1])


TOPK_SOFTMAX = Spec(
    "topk_softmax",
    Tensor("scores", "T E", FLOATS, strided=True),
    Int("k"),
    Bool("softmax_first", True),
    Bool("renormalize", False),
    DType("indices_dtype", "int32", choices=INDICES),
    results=[
        # float32 arithmetic: some roundings of 2**-24 each.
        Tensor("weights", "T k", "float32", rtol=1e-5, atol=1e-6),
        Tensor("indices", "T k", "indices_dtype"),
    ],
    check=_check_topk,
    limits="512 experts, k up to 16",
)


def slots_for(elements: int, experts: int, block_size: int, whole_blocks: bool = False) -> int:
    """The slots that suffice for any distribution of `elements` ids over the experts' blocks."""
    slots = elements + experts * (block_size - 1)
    if whole_blocks:
        slots = (slots + block_size - 1) // block_size * block_size
    # With fewer ids than experts, each id may need a block of its own. No branch on `elements`:
    # it is a symbol under torch.export.
    if isinstance(elements, int):
        return min(elements * block_size, slots)
    import torch

    return torch.sym_min(elements * block_size, slots)  # type: ignore[no-any-return]


def _needed_slots(call: Call) -> int:
    """`pad_sorted_ids` does not count where the lists are given."""
    if "topk_ids" in call:
        elements, experts = call.topk_ids.shape[0] * call.topk_ids.shape[1], call.num_experts
    else:
        elements, experts = call.scores.shape[0] * call.k, call.scores.shape[1]
    pad = call.pad_sorted_ids and "sorted_token_ids" not in call
    return slots_for(elements, experts, call.block_size, pad)


def _slots(call: Call) -> int | None:
    """The size of `sorted_token_ids`; a given one may be longer than needed."""
    if "sorted_token_ids" not in call:
        return _needed_slots(call)
    given = call.sorted_token_ids
    return given.shape[0] if given.dim() == 1 else None  # type: ignore[no-any-return]


def _blocks(call: Call) -> int | None:
    slots = _slots(call)
    return None if slots is None else (slots + call.block_size - 1) // call.block_size


def _check_slots(op: str, call: Call) -> None:
    needed = _needed_slots(call)
    # Sizes that vary from call to call are known, and checked, when it runs.
    if isinstance(needed, int) and needed > 2**31 - 1:
        raise ValueError(f"{op}: more slots than int32 can number are needed, {needed}")
    given = _slots(call)
    if given is not None and given < needed:
        raise ValueError(
            f"{op}: `sorted_token_ids` must have at least {needed} elements, got {given}"
        )


def _check_topk_align(call: Call) -> None:
    check_k("topk_softmax_align", call.k, call.scores.shape[1])
    _check_slots("topk_softmax_align", call)


_LISTS = (
    Tensor("sorted_token_ids", "slots", "int32"),
    Tensor("expert_ids", "blocks", "int32", shape_text="[ceil(sorted_token_ids / block_size)]"),
    Tensor("num_tokens_post_padded", "1", "int32"),
)
_DIMS = {"slots": _slots, "blocks": _blocks}

MOE_ALIGN_BLOCK_SIZE = Spec(
    "moe_align_block_size",
    Tensor("topk_ids", "T k", INDICES),
    Int("block_size", at_least=1),
    Int("num_experts", at_least=1),
    Tensor("expert_map", "num_experts", "int32", optional=True),
    Bool("pad_sorted_ids", False),
    Bool("ignore_invalid_experts", False),
    results=_LISTS,
    dims=_DIMS,
    check=lambda call: _check_slots("moe_align_block_size", call),
    limits="512 experts",
)

_SCORES, _K, *_TOPK_OPTIONS = TOPK_SOFTMAX.arguments

TOPK_SOFTMAX_ALIGN = Spec(
    "topk_softmax_align",
    _SCORES,
    _K,
    Int("block_size", at_least=1),
    Tensor("expert_map", "E", "int32", optional=True, shape_text="[num_experts]"),
    *_TOPK_OPTIONS,
    Bool("pad_sorted_ids", False),
    Bool("ignore_invalid_experts", False),
    results=[*TOPK_SOFTMAX.results, *_LISTS],
    dims=_DIMS,
    check=_check_topk_align,
    limits="512 experts, k up to 16",
)

MOE_SUM = Spec(
    "moe_sum",
    Tensor("x", "T k H", FLOATS, strided=True),
    Tensor("weights", "T k", "float32", optional=True),
    # One rounding to bfloat16, 2**-9; sums that cancel have an absolute error.
    results=[Tensor("out", "T H", "x", rtol=4e-3, atol=1e-5)],
)
