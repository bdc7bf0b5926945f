# SPDX-License-Identifier: Apache-2.0
"""The declarations of the routing ops."""

from __future__ import annotations

from tiercel.core.spec import (
    FLOATS,
    INDICES,
    Bool,
    Call,
    DType,
    Float,
    Int,
    Numerics,
    Spec,
    Str,
    Tensor,
)


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
    limits="up to 1024 experts, k up to 32",
    numerics=Numerics(
        4e-6,
        of="result",
        sums="float32, over the selected or the row; the selection is exact",
        batch_invariant=False,
        varies="weights: the kernel, which is chosen by the number of rows; "
        "indices, and all with other scores, a bias or groups, do not",
    ),
)

SCORING = ("softmax", "sigmoid", "sqrtsoftplus")


def _check_route(op: str, call: Call) -> None:
    experts, k = call.scores.shape[1], call.columns - call.n_shared
    check_k(op, k, experts)
    if call.scoring != "softmax" and not call.softmax_first:
        raise ValueError(f"{op}: `softmax_first` must be True with `scoring` {call.scoring!r}")
    if experts % call.n_group != 0:
        raise ValueError(
            f"{op}: `n_group` must divide the number of experts, got {call.n_group} "
            f"for {experts} experts"
        )
    if call.topk_group > call.n_group:
        raise ValueError(
            f"{op}: `topk_group` must be between 1 and `n_group`, got {call.topk_group} "
            f"of {call.n_group}"
        )
    within = experts // call.n_group * call.topk_group
    if k > within:
        raise ValueError(
            f"{op}: k must be at most the experts of `topk_group` groups, got k = {k} "
            f"for {within} experts"
        )


# topk_softmax with all that only some models need. `columns` are k and the shared experts.
TOPK_ROUTE = Spec(
    "topk_route",
    Tensor("scores", "T E", FLOATS, strided=True),
    Int("columns"),
    Bool("softmax_first", True),
    Bool("renormalize", False),
    DType("indices_dtype", "int32", choices=INDICES),
    Tensor("correction_bias", "E", "float32", optional=True),
    Str("scoring", "softmax", choices=SCORING),
    Int("n_group", 1, at_least=1),
    Int("topk_group", 1, at_least=1),
    Float("scaling_factor", 1.0),
    Int("n_shared", 0, at_least=0),
    results=[
        Tensor(
            "weights",
            "T columns",
            "float32",
            shape_text="[T, k + n_shared]",
            # Softmax, as above; the others with a few roundings more.
            rtol=1e-5,
            atol=1e-6,
        ),
        Tensor("indices", "T columns", "indices_dtype", shape_text="[T, k + n_shared]"),
    ],
    check=lambda call: _check_route("topk_softmax", call),
    gradient_of="topk_softmax",
)


def _check_hash(op: str, call: Call) -> None:
    from tiercel.core.checks import check_shape

    k = call.columns - call.n_shared
    check_k(op, k, call.scores.shape[1])
    table = call.expert_table
    check_shape(op, "expert_table", table, (table.shape[0], k), "[tokens, k]")
    if call.scoring != "softmax" and not call.softmax_first:
        raise ValueError(f"{op}: `softmax_first` must be True with `scoring` {call.scoring!r}")


# topk_softmax with the experts of a table.
HASH_ROUTE = Spec(
    "hash_route",
    Tensor("scores", "T E", FLOATS, strided=True),
    Tensor("token_ids", "T", INDICES),
    Tensor("expert_table", "tokens selected", "int32", shape_text="[tokens, k]"),
    Int("columns"),
    *(
        TOPK_ROUTE.argument(name)
        for name in ("softmax_first", "renormalize", "indices_dtype", "scoring", "scaling_factor")
    ),
    TOPK_ROUTE.argument("n_shared"),
    results=TOPK_ROUTE.results,
    check=lambda call: _check_hash("topk_softmax", call),
    gradient_of="topk_softmax",
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
    elif "columns" in call:
        elements = call.scores.shape[0] * call.columns
        experts = call.scores.shape[1] + call.n_shared
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
    limits="up to 1024 experts",
    numerics=Numerics(0),
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
    limits="up to 1024 experts, k up to 32",
    numerics=Numerics(
        4e-6,
        of="result",
        sums="as `topk_softmax`",
        batch_invariant=False,
        varies="weights: as `topk_softmax`",
    ),
)


def _check_route_align(call: Call) -> None:
    _check_route("topk_softmax_align", call)
    _check_lists(call)


def _check_hash_align(call: Call) -> None:
    _check_hash("topk_softmax_align", call)
    _check_lists(call)


def _check_lists(call: Call) -> None:
    from tiercel.core.checks import check_shape

    op = "topk_softmax_align"
    if call.expert_map is not None:
        experts = call.scores.shape[1] + call.n_shared
        check_shape(op, "expert_map", call.expert_map, (experts,), "[num_experts]")
    _check_slots(op, call)


_SCORES, _COLUMNS, *_ROUTE_OPTIONS = TOPK_ROUTE.arguments

TOPK_ROUTE_ALIGN = Spec(
    "topk_route_align",
    _SCORES,
    _COLUMNS,
    Int("block_size", at_least=1),
    Tensor("expert_map", "*", "int32", optional=True),
    *_ROUTE_OPTIONS,
    Bool("pad_sorted_ids", False),
    Bool("ignore_invalid_experts", False),
    results=[*TOPK_ROUTE.results, *_LISTS],
    dims=_DIMS,
    check=_check_route_align,
    gradient_of="topk_softmax_align",
)

_SCORES, _TOKENS, _TABLE, _COLUMNS, *_HASH_OPTIONS = HASH_ROUTE.arguments

HASH_ROUTE_ALIGN = Spec(
    "hash_route_align",
    _SCORES,
    _TOKENS,
    _TABLE,
    _COLUMNS,
    Int("block_size", at_least=1),
    Tensor("expert_map", "*", "int32", optional=True),
    *_HASH_OPTIONS,
    Bool("pad_sorted_ids", False),
    Bool("ignore_invalid_experts", False),
    results=[*HASH_ROUTE.results, *_LISTS],
    dims=_DIMS,
    check=_check_hash_align,
    gradient_of="topk_softmax_align",
)

MOE_SUM = Spec(
    "moe_sum",
    Tensor("x", "T k H", FLOATS, strided=True),
    Tensor("weights", "T k", "float32", optional=True),
    # One rounding to bfloat16, 2**-9; sums that cancel have an absolute error.
    results=[Tensor("out", "T H", "x", rtol=4e-3, atol=1e-5)],
    numerics=Numerics(4e-6, of="terms", sums="float32: a token's experts in order"),
)
