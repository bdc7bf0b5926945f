# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing: choosing experts and sorting tokens by them, in one launch."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.eager import empty
from tiercel.core.op import Gradient, Op, Python
from tiercel.core.spec import Call
from tiercel.ops.routing import reference as ref
from tiercel.ops.routing import spec
from tiercel.ops.routing.align import empty_lists, fill_lists, map_index, run_plain, run_plugin
from tiercel.ops.routing.topk_softmax import (
    DEFAULTS,
    SCORING,
    check_hash,
    columns_of,
    gradients,
    no_rows,
    save,
    table_indices,
)

__all__ = ["topk_softmax_align"]

_MOST_TOKENS = 128  # of one launch: kTopkAlignMaxTokens

_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _empty(
    scores: Tensor,
    k: int,
    block_size: int,
    indices_dtype: torch.dtype,
    pad_sorted_ids: bool,
    experts: int,
) -> _Five:
    rows = scores.shape[0]
    weights = empty(scores, (rows, k), torch.float32)
    indices = empty(scores, (rows, k), indices_dtype)
    return weights, indices, *empty_lists(scores, rows * k, experts, block_size, pad_sorted_ids)


def _run(
    scores: Tensor,
    k: int,
    block_size: int,
    expert_map: Tensor | None,
    softmax_first: bool,
    renormalize: bool,
    indices_dtype: torch.dtype,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
    *out: Tensor,
) -> _Five | None:
    results = out or _empty(scores, k, block_size, indices_dtype, pad_sorted_ids, scores.shape[1])
    weights, indices, *lists = results
    if out and weights.shape[1] != k:  # the kernels take k from there
        raise ValueError("`weights` must have k columns")
    options = (softmax_first, renormalize)
    if scores.shape[0] > _MOST_TOKENS:
        _C.topk_softmax(scores, weights, indices, *options)
        rest = (block_size, scores.shape[1], expert_map, ignore_invalid_experts)
        fill_lists(indices, tuple(lists), *rest)
    else:
        rest = (block_size, *options, ignore_invalid_experts)
        _C.topk_softmax_align(scores, weights, indices, expert_map, *lists, *rest)
    return None if out else results  # type: ignore[return-value]


def _plan(call: Call) -> dict[str, Any]:
    if call.scores.shape[0] > _MOST_TOKENS:
        return {"kernel": "topk_softmax, then moe_align_block_size", "launches": 2}
    weights, indices, *lists = _empty(
        call.scores,
        call.k,
        call.block_size,
        call.indices_dtype,
        call.pad_sorted_ids,
        call.scores.shape[1],
    )
    rest = (call.block_size, call.softmax_first, call.renormalize, call.ignore_invalid_experts)
    plan = _C.topk_softmax_align_plan
    return dict(plan(call.scores, weights, indices, call.expert_map, *lists, *rest))


def _save(ctx: Any, call: Call, results: _Five) -> None:
    save(ctx, call, results)
    ctx.mark_non_differentiable(*results[1:])


def _plain_route(columns: int, **others: Any) -> _Five:
    return ref.topk_softmax_align(k=columns - others["n_shared"], **others)


_TOPK_SOFTMAX_ALIGN = Op(
    spec.TOPK_SOFTMAX_ALIGN,
    sm90=Python(
        _run,
        _plan,
        "a warp a row, then a cluster sorts; one launch up to 128 tokens",
        load=_C.topk_softmax_align_load,
        sample=lambda call: {"scores": call.scores[:0]},  # no limit depends on the number of tokens
        positional=True,
    ),
    reference=lambda call: run_plain(spec.TOPK_SOFTMAX_ALIGN, ref.topk_softmax_align, call),
    plugin=lambda function, call: run_plugin(spec.TOPK_SOFTMAX_ALIGN, function, call),
    method="torch.sort, torch.softmax and a stable torch.sort",
    gradient=Gradient(_save, gradients),
    indices=lambda call: [map_index(call.expert_map, call.scores.shape[1])],
)


def _run_route(
    scores: Tensor,
    columns: int,
    block_size: int,
    expert_map: Tensor | None,
    softmax_first: bool,
    renormalize: bool,
    indices_dtype: torch.dtype,
    correction_bias: Tensor | None,
    scoring: str,
    n_group: int,
    topk_group: int,
    scaling_factor: float,
    n_shared: int,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
    *out: Tensor,
    table: tuple[Tensor | None, Tensor | None] = (None, None),
    aligned: Any = _C.topk_route_align,
) -> Any:
    results = out or _empty(
        scores, columns, block_size, indices_dtype, pad_sorted_ids, scores.shape[1] + n_shared
    )
    weights, indices, *lists = results
    if out and weights.shape[1] != columns:  # the kernels take k from there
        raise ValueError("`weights` must have k + n_shared columns")
    softmax = (softmax_first, renormalize)
    groups = (n_group, topk_group)
    options = (SCORING.get(scoring, -1), *groups, scaling_factor, n_shared, *table)
    if scores.shape[0] > _MOST_TOKENS:
        _C.topk_route(scores, correction_bias, weights, indices, *softmax, *options)
        rest = (block_size, scores.shape[1] + n_shared, expert_map, ignore_invalid_experts)
        fill_lists(indices, tuple(lists), *rest)
        return None if out else results
    tensors = (scores, correction_bias, weights, indices, expert_map, *lists)
    plan = aligned(*tensors, block_size, *softmax, ignore_invalid_experts, *options)
    return plan if plan is not None else None if out else results


def _plan_route(call: Call) -> dict[str, Any]:
    if call.scores.shape[0] > _MOST_TOKENS:
        return {"kernel": "topk_route, then moe_align_block_size", "launches": 2}
    arguments = spec.TOPK_ROUTE_ALIGN.values(call).values()
    return dict(_run_route(*arguments, aligned=_C.topk_route_align_plan))


_ROUTE_ALIGN = Op(
    spec.TOPK_ROUTE_ALIGN,
    sm90=Python(
        _run_route,
        _plan_route,
        "a warp a row, then a cluster sorts; one launch up to 128 tokens",
        load=_C.topk_route_load,
        sample=lambda call: {"scores": call.scores[:0]},
        positional=True,
    ),
    reference=lambda call: run_plain(spec.TOPK_ROUTE_ALIGN, _plain_route, call),
    method="torch.sort on scores, and on groups of them, and a stable torch.sort",
    gradient=Gradient(_save, gradients),
    indices=lambda call: [map_index(call.expert_map, call.scores.shape[1] + call.n_shared)],
)


def _run_hash(
    scores: Tensor,
    token_ids: Tensor,
    expert_table: Tensor,
    columns: int,
    block_size: int,
    expert_map: Tensor | None,
    softmax_first: bool,
    renormalize: bool,
    indices_dtype: torch.dtype,
    scoring: str,
    scaling_factor: float,
    n_shared: int,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
    *out: Tensor,
    aligned: Any = _C.topk_route_align,
) -> Any:
    first = (scores, columns, block_size, expert_map, softmax_first, renormalize, indices_dtype)
    rest = (pad_sorted_ids, ignore_invalid_experts, *out)
    route = (None, scoring, 1, 1, scaling_factor, n_shared)
    return _run_route(*first, *route, *rest, table=(token_ids, expert_table), aligned=aligned)


def _plan_hash(call: Call) -> dict[str, Any]:
    if call.scores.shape[0] > _MOST_TOKENS:
        return {"kernel": "hash_route, then moe_align_block_size", "launches": 2}
    arguments = spec.HASH_ROUTE_ALIGN.values(call).values()
    return dict(_run_hash(*arguments, aligned=_C.topk_route_align_plan))


_HASH_ALIGN = Op(
    spec.HASH_ROUTE_ALIGN,
    sm90=Python(
        _run_hash,
        _plan_hash,
        "a warp a row, then a cluster sorts; one launch up to 128 tokens",
        load=_C.topk_route_load,
        sample=no_rows,
        positional=True,
    ),
    reference=lambda call: run_plain(spec.HASH_ROUTE_ALIGN, _plain_route, call),
    method="torch.gather and a stable torch.sort",
    gradient=Gradient(_save, gradients),
    indices=lambda call: [
        map_index(call.expert_map, call.scores.shape[1] + call.n_shared),
        *table_indices(call),
    ],
)


@_TOPK_SOFTMAX_ALIGN.export
def topk_softmax_align(
    scores: Tensor,
    k: int,
    block_size: int,
    expert_map: Tensor | None = None,
    *,
    softmax_first: bool = True,
    renormalize: bool = False,
    indices_dtype: torch.dtype = torch.int32,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax",
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scaling_factor: float = 1.0,
    n_shared: int = 0,
    token_ids: Tensor | None = None,
    expert_table: Tensor | None = None,
    out: _Five | None = None,
    backend: str | None = None,
) -> _Five:
    """:func:`tiercel.topk_softmax`, then :func:`tiercel.moe_align_block_size` of its indices.

    One launch for up to 128 tokens, else two. The routing has the bits of
    :func:`tiercel.moe_align_block_size` with ``num_experts = E + n_shared``, and the weights are
    the same to within one or two roundings.

    Differentiable in ``scores``, through the weights. Works under torch.compile and torch.export,
    and in CUDA graphs; it never synchronises.

    Args:
        scores: ``[T, E]``, float32, bfloat16 or float16, any strides; T may be 0. The precompiled
            kernels take E (with ``n_shared``) up to 1024 and k (likewise) up to 32, larger ones run
            on ref.
        k: How many to select, from 1 to E.
        block_size: Slots of one block.
        expert_map: ``[E + n_shared]`` int32 or None, as for :func:`tiercel.moe_align_block_size`.
        softmax_first: As for :func:`tiercel.topk_softmax`.
        renormalize: The same.
        indices_dtype: ``torch.int32`` or ``torch.int64``.
        pad_sorted_ids: As for :func:`tiercel.moe_align_block_size`.
        ignore_invalid_experts: The same.
        scoring: As for :func:`tiercel.topk_softmax`, like the next seven.
        correction_bias: The same.
        n_group: The same.
        topk_group: The same.
        scaling_factor: The same.
        n_shared: The same.
        token_ids: The same.
        expert_table: The same. What is no expert is in no list.
        out: All five results, to write to; as for the two functions.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``weights`` and ``indices`` ``[T, k + n_shared]``, then ``sorted_token_ids``,
        ``expert_ids`` and ``num_tokens_post_padded``.

    Raises:
        TypeError: A dtype is not one of those above, or an argument is not a tensor or no int.
        ValueError: A shape, stride or device does not fit, k is not from 1 to E, or there is no
            such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and E or k is too large for it.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights, experts, *blocks = tiercel.topk_softmax_align(router_logits, 8, 16)
    """
    route = (scoring, n_group, topk_group, scaling_factor, n_shared)
    softmax = (softmax_first, renormalize, indices_dtype)
    if token_ids is not None or expert_table is not None:
        groups = (n_group, topk_group)
        check_hash("topk_softmax_align", token_ids, expert_table, correction_bias, groups)
        columns = columns_of("topk_softmax_align", k, n_shared)
        first = (scores, token_ids, expert_table, columns, block_size, expert_map, *softmax)
        last = (scaling_factor, n_shared, pad_sorted_ids, ignore_invalid_experts, backend)
        if out is None:
            return _HASH_ALIGN.pick()(*first, scoring, *last)  # type: ignore[no-any-return]
        return _HASH_ALIGN.into()(out, *first, scoring, *last)  # type: ignore[no-any-return]
    if correction_bias is not None or route != DEFAULTS:
        columns = columns_of("topk_softmax_align", k, n_shared)
        rest = (correction_bias, *route, pad_sorted_ids, ignore_invalid_experts, backend)
        arguments = (scores, columns, block_size, expert_map, *softmax, *rest)
        if out is None:
            return _ROUTE_ALIGN.pick()(*arguments)  # type: ignore[no-any-return]
        return _ROUTE_ALIGN.into()(out, *arguments)  # type: ignore[no-any-return]
    options = (*softmax, pad_sorted_ids)
    arguments = (scores, k, block_size, expert_map, *options, ignore_invalid_experts, backend)
    if out is None:
        result: _Five = _TOPK_SOFTMAX_ALIGN.pick()(*arguments)
        return result
    return _TOPK_SOFTMAX_ALIGN.into()(out, *arguments)  # type: ignore[no-any-return]
