# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing: choosing experts and sorting tokens by them, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Autograd, Backend, Op
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
from tiercel.core.platform import Reason
from tiercel.core.spec import Call
from tiercel.ops.routing import reference as ref
from tiercel.ops.routing import topk_softmax as routing
from tiercel.ops.routing.align import (
    OUTPUTS,
    align_sm90,
    align_sm90_out,
    check_map,
    check_outputs,
    check_sizes,
    empty_outputs,
    fill_outputs,
    map_index,
    slots_for,
    tuple_of,
)
from tiercel.ops.routing.spec import check_k

__all__ = ["topk_softmax_align"]

_NAME = "topk_softmax_align"

# Tokens up to which it is one launch (kTopkAlignMaxTokens).
_ONE_LAUNCH = 128

_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _check(
    scores: Tensor,
    k: int,
    block_size: int,
    expert_map: Tensor | None,
    softmax_first: bool,
    renormalize: bool,
    indices_dtype: torch.dtype,
    pad_sorted_ids: bool,
    ignore_invalid_experts: bool,
    backend: str | None,
) -> None:
    check_rank(_NAME, "scores", scores, 2)
    check_dtype(_NAME, "scores", scores.dtype, (torch.float32, torch.bfloat16, torch.float16))
    check_dtype(_NAME, "indices_dtype", indices_dtype, (torch.int32, torch.int64))
    check_bool(_NAME, "softmax_first", softmax_first)
    check_bool(_NAME, "renormalize", renormalize)
    check_bool(_NAME, "pad_sorted_ids", pad_sorted_ids)
    check_bool(_NAME, "ignore_invalid_experts", ignore_invalid_experts)
    rows, experts = scores.shape
    check_k(_NAME, k, experts)
    check_sizes(_NAME, block_size, experts, 0)
    slots = slots_for(rows * k, experts, block_size, pad_sorted_ids)
    check_sizes(_NAME, block_size, experts, slots)
    check_map(_NAME, expert_map, experts, "scores", scores)


def _check_out(scores: Tensor, weights: Tensor, indices: Tensor, *args: Any) -> None:
    outputs, (block_size, expert_map, *options, ignore, _) = args[:3], args[3:]
    check_rank(_NAME, "weights", weights, 2)
    dtype = indices.dtype
    k = weights.shape[1]
    _check(scores, k, block_size, expert_map, *options, dtype, False, ignore, None)
    check_dtype(_NAME, "weights", weights.dtype, (torch.float32,))
    for name, tensor in (("weights", weights), ("indices", indices)):
        check_shape(_NAME, name, tensor, (scores.shape[0], k), "[T, k]")
        check_same_device(_NAME, name, tensor, "scores", scores)
        check_contiguous(_NAME, name, tensor)
    needed = slots_for(weights.numel(), scores.shape[1], block_size)
    check_outputs(_NAME, outputs, needed, block_size, "scores", scores)


def _outputs(
    scores: Tensor,
    k: int,
    block_size: int,
    expert_map: Any,
    softmax_first: bool,
    renormalize: bool,
    indices_dtype: torch.dtype,
    pad: bool,
    *rest: Any,
) -> _Five:
    rows, experts = scores.shape
    weights = empty(scores, (rows, k), torch.float32)
    indices = empty(scores, (rows, k), indices_dtype)
    return weights, indices, *empty_outputs(scores, rows * k, experts, block_size, pad)


def _sm90(scores: Tensor, k: int, block_size: int, expert_map: Any, *args: Any) -> _Five:
    softmax_first, renormalize, indices_dtype, pad, ignore, _ = args
    if scores.shape[0] > _ONE_LAUNCH:
        weights, indices = routing._TOPK_SOFTMAX._run(
            Call(
                scores=scores,
                k=k,
                softmax_first=softmax_first,
                renormalize=renormalize,
                indices_dtype=indices_dtype,
            )
        )
        experts = scores.shape[1]
        aligned = align_sm90(indices, block_size, experts, expert_map, pad, ignore, None)
        return weights, indices, *aligned
    outputs = _outputs(scores, k, block_size, expert_map, *args)
    rest = (block_size, softmax_first, renormalize, ignore)
    _C.topk_softmax_align(scores, *outputs[:2], expert_map, *outputs[2:], *rest)
    return outputs


def _sm90_out(scores: Tensor, weights: Tensor, indices: Tensor, *args: Any) -> None:
    outputs, (block_size, expert_map, softmax_first, renormalize, ignore, _) = args[:3], args[3:]
    if scores.shape[0] > _ONE_LAUNCH:
        _C.topk_softmax(scores, weights, indices, softmax_first, renormalize)
        rest = (block_size, scores.shape[1], expert_map, ignore, None)
        align_sm90_out(indices, *outputs, *rest)
        return
    rest = (block_size, softmax_first, renormalize, ignore)
    _C.topk_softmax_align(scores, weights, indices, expert_map, *outputs, *rest)


def _ref(scores: Tensor, k: int, block_size: int, expert_map: Any, *args: Any) -> _Five:
    softmax_first, renormalize, indices_dtype, pad, ignore, _ = args
    return ref.topk_softmax_align(
        scores,
        k,
        block_size,
        expert_map,
        softmax_first=softmax_first,
        renormalize=renormalize,
        indices_dtype=indices_dtype,
        pad_sorted_ids=pad,
        ignore_invalid_experts=ignore,
    )


def _ref_out(scores: Tensor, weights: Tensor, indices: Tensor, *args: Any) -> None:
    outputs, (block_size, expert_map, *options, ignore, _) = args[:3], args[3:]
    k = weights.shape[1]
    found = _ref(scores, k, block_size, expert_map, *options, indices.dtype, False, ignore, None)
    weights.copy_(found[0])
    indices.copy_(found[1])
    fill_outputs(outputs, found[2:], indices.numel())


def _plan(scores: Tensor, k: int, block_size: int, expert_map: Any, *args: Any) -> dict[str, Any]:
    if scores.shape[0] > _ONE_LAUNCH:
        return {"kernel": "topk_softmax, then moe_align_block_size", "launches": 2}
    softmax_first, renormalize, _, _, ignore, _ = args
    outputs = _outputs(scores, k, block_size, expert_map, *args)
    rest = (block_size, softmax_first, renormalize, ignore)
    return dict(_C.topk_softmax_align_plan(scores, *outputs[:2], expert_map, *outputs[2:], *rest))


def _why_not(scores: Tensor, *args: Any) -> Reason | None:
    reason = platform.why_not(scores.device)
    if reason is not None:
        return reason
    try:
        _plan(scores[:0], *args)  # limits do not depend on the number of tokens
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


def _why_not_out(scores: Tensor, weights: Tensor, indices: Tensor, *args: Any) -> Reason | None:
    block_size, expert_map, *options, ignore, _ = args[3:]
    dtype = indices.dtype
    k = weights.shape[1]
    return _why_not(scores, k, block_size, expert_map, *options, dtype, False, ignore, None)


def _save(ctx: Any, args: tuple[Any, ...], outputs: _Five) -> None:
    routing.save(ctx, Call(scores=args[0], softmax_first=args[4], renormalize=args[5]), outputs)
    ctx.mark_non_differentiable(*outputs[1:])


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None]:
    return (routing.gradients(ctx, grad).get("scores"),)


_CUDA = ("a warp a row, then a cluster sorts; one launch up to 128 tokens", "cuda")
_TORCH = ("torch.sort, torch.softmax and a stable torch.sort", "torch")
_OPTIONS = "bool softmax_first=True, bool renormalize=False, "
_END = "bool ignore_invalid_experts=False, str? backend=None"

_FUSED = Op(
    _NAME,
    f"(Tensor scores, int k, int block_size, Tensor? expert_map=None, {_OPTIONS}"
    f"ScalarType indices_dtype=int, bool pad_sorted_ids=False, {_END}) -> (Tensor weights,"
    " Tensor indices, Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded)",
    check=_check,
    fake=_outputs,
    sm90=Backend("sm90", _sm90, *_CUDA, why_not=_why_not),
    ref=Backend("ref", _ref, *_TORCH),
    autograd=Autograd(_save, _backward),
    defaults={"indices_dtype": torch.int32},
    describe=_plan,
    load=_C.topk_softmax_align_load,
    indices=lambda *args: [map_index(args[3], args[0].shape[1])],
)

_FUSED_OUT = Op(
    f"{_NAME}_out",
    "(Tensor scores, Tensor(a!) weights, Tensor(b!) indices, Tensor(c!) sorted_token_ids,"
    " Tensor(d!) expert_ids, Tensor(e!) num_tokens_post_padded, int block_size,"
    f" Tensor? expert_map=None, {_OPTIONS}{_END}) -> ()",
    check=_check_out,
    fake=lambda *args: None,
    sm90=Backend("sm90", _sm90_out, *_CUDA, why_not=_why_not_out),
    ref=Backend("ref", _ref_out, *_TORCH),
    family=_NAME,
    indices=lambda *args: [map_index(args[7], args[0].shape[1])],
)


@_FUSED.export
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
    out: _Five | None = None,
    backend: str | None = None,
) -> _Five:
    """:func:`tiercel.topk_softmax`, then :func:`tiercel.moe_align_block_size` of its indices.

    Up to 128 tokens this is one launch, where two would cost more than the work; beyond that it is
    the two. Results are the same, bit for bit, as those of :func:`tiercel.moe_align_block_size`
    with ``num_experts = E`` on the indices, and the weights are the same to a rounding or two.

    Differentiable in ``scores``, through the weights. Works under torch.compile and torch.export,
    and in CUDA graphs; it never synchronises.

    Args:
        scores: ``[T, E]``, float32, bfloat16 or float16, any strides; T may be 0. The precompiled
            kernels take E up to 512 and k up to 16, larger ones run on ref.
        k: How many to select, from 1 to E.
        block_size: Slots of one block.
        expert_map: ``[E]`` int32 or None, as for :func:`tiercel.moe_align_block_size`.
        softmax_first: As for :func:`tiercel.topk_softmax`.
        renormalize: The same.
        indices_dtype: ``torch.int32`` or ``torch.int64``.
        pad_sorted_ids: As for :func:`tiercel.moe_align_block_size`.
        ignore_invalid_experts: The same.
        out: All five results, to write to; as for the two functions.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``weights`` and ``indices`` ``[T, k]``, then ``sorted_token_ids``, ``expert_ids`` and
        ``num_tokens_post_padded``.

    Raises:
        TypeError: A dtype is not one of those above, or an argument is no tensor or no int.
        ValueError: A shape, stride or device does not fit, k is not from 1 to E, or there is no
            such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and E or k is too large for it.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights, experts, *blocks = tiercel.topk_softmax_align(router_logits, 8, 16)
    """
    if out is None:
        options = (softmax_first, renormalize, indices_dtype, pad_sorted_ids)
        result: _Five = _FUSED(
            scores, k, block_size, expert_map, *options, ignore_invalid_experts, backend
        )
        return result
    outputs = tuple_of(_NAME, out, ("weights", "indices", *OUTPUTS))
    options_out = (softmax_first, renormalize, ignore_invalid_experts)
    _FUSED_OUT(scores, *outputs, block_size, expert_map, *options_out, backend)
    return outputs  # type: ignore[return-value]
