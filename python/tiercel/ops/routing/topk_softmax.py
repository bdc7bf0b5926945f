# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from tiercel import _C, _platform
from tiercel._checks import (
    check_bool,
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel._eager import empty, is_dynamo_compiling
from tiercel._op import Autograd, Backend, Op
from tiercel._platform import Reason
from tiercel.ops.routing import reference as ref

__all__ = ["topk_softmax"]

_NAME = "topk_softmax"
SCORES = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int32, torch.int64)


def _check_is_int(op: str, k: int) -> None:
    if not hasattr(k, "__index__"):
        raise TypeError(f"{op}: `k` must be an int, got {type(k).__name__}")


def check_k(op: str, k: int, experts: int) -> None:
    _check_is_int(op, k)
    if k < 1 or k > experts:
        raise ValueError(
            f"{op}: k must be between 1 and the number of experts, got k = {k} "
            f"for {experts} experts"
        )


def check_columns(op: str, weights: object, k: int) -> None:
    """That ``out=`` is made for k."""
    _check_is_int(op, k)
    shape = getattr(weights, "shape", ())
    if len(shape) == 2 and shape[1] != operator.index(k):
        raise ValueError(f"{op}: `out` has {shape[1]} columns, but `k` is {k}")


def check_pair(op: str, out: object) -> None:
    """That ``out=`` is a pair."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"{op}: `out` must be a pair (weights, indices), got {got}")


def _has_columns(matrix: Any, k: Any) -> bool:
    try:
        return type(k) is int and matrix.shape[1] == k
    except (AttributeError, IndexError):
        return False


def _check(
    scores: Tensor,
    k: int,
    softmax_first: bool,
    renormalize: bool,
    indices_dtype: torch.dtype,
    backend: str | None,
) -> None:
    check_rank(_NAME, "scores", scores, 2)
    check_dtype(_NAME, "scores", scores.dtype, SCORES)
    check_dtype(_NAME, "indices_dtype", indices_dtype, INDICES)
    check_bool(_NAME, "softmax_first", softmax_first)
    check_bool(_NAME, "renormalize", renormalize)
    check_k(_NAME, k, scores.shape[1])


def _check_out(
    scores: Tensor,
    weights: Tensor,
    indices: Tensor,
    softmax_first: bool,
    renormalize: bool,
    backend: str | None,
) -> None:
    check_rank(_NAME, "scores", scores, 2)
    check_rank(_NAME, "weights", weights, 2)
    check_dtype(_NAME, "scores", scores.dtype, SCORES)
    check_dtype(_NAME, "weights", weights.dtype, (torch.float32,))
    check_dtype(_NAME, "indices", indices.dtype, INDICES)
    check_bool(_NAME, "softmax_first", softmax_first)
    check_bool(_NAME, "renormalize", renormalize)
    k = weights.shape[1]
    check_k(_NAME, k, scores.shape[1])
    for name, tensor in (("weights", weights), ("indices", indices)):
        check_shape(_NAME, name, tensor, (scores.shape[0], k), "[T, k]")
        check_same_device(_NAME, name, tensor, "scores", scores)
        check_contiguous(_NAME, name, tensor)


def _outputs(scores: Tensor, k: int, *options: Any) -> tuple[Tensor, Tensor]:
    rows = scores.shape[0]
    device = scores.device
    indices_dtype = options[2]
    return (
        torch.empty(rows, k, dtype=torch.float32, device=device),
        torch.empty(rows, k, dtype=indices_dtype, device=device),
    )


# The fast path: kept flat, each line costs host time.
def topk_sm90(
    scores: Tensor,
    k: int,
    softmax_first: bool,
    renormalize: bool,
    indices_dtype: torch.dtype,
    backend: str | None,
    *,
    empty: Any = empty,
    float32: torch.dtype = torch.float32,
    launch: Any = _C.topk_softmax,
) -> tuple[Tensor, Tensor]:
    shape = (scores.shape[0], k)
    weights = empty(scores, shape, float32)
    indices = empty(scores, shape, indices_dtype)
    launch(scores, weights, indices, softmax_first, renormalize)
    return weights, indices


def _sm90_out(
    scores: Tensor,
    weights: Tensor,
    indices: Tensor,
    softmax_first: bool,
    renormalize: bool,
    backend: str | None,
) -> None:
    _C.topk_softmax(scores, weights, indices, softmax_first, renormalize)


def _ref(
    scores: Tensor,
    k: int,
    softmax_first: bool,
    renormalize: bool,
    indices_dtype: torch.dtype,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    return ref.topk_softmax(
        scores,
        k,
        softmax_first=softmax_first,
        renormalize=renormalize,
        indices_dtype=indices_dtype,
    )


def _ref_out(
    scores: Tensor,
    weights: Tensor,
    indices: Tensor,
    softmax_first: bool,
    renormalize: bool,
    backend: str | None,
) -> None:
    k, dtype = weights.shape[1], indices.dtype
    result = _ref(scores, k, softmax_first, renormalize, dtype, None)
    weights.copy_(result[0])
    indices.copy_(result[1])


def _plan(scores: Tensor, k: int, *options: Any) -> dict[str, Any]:
    weights, indices = _outputs(scores, k, *options)
    return dict(_C.topk_softmax_plan(scores, weights, indices, options[0], options[1]))


def _why_not(scores: Tensor, k: int, *options: Any) -> Reason | None:
    reason = _platform.why_not(scores.device)
    if reason is not None:
        return reason
    try:
        _plan(scores[:0], k, *options)  # limits do not depend on the number of rows
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


def _why_not_out(scores: Tensor, weights: Tensor, indices: Tensor, *options: Any) -> Reason | None:
    return _why_not(scores, weights.shape[1], *options[:2], indices.dtype, None)


def save(ctx: Any, args: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    scores, _, softmax_first, renormalize = args[:4]
    weights, indices = outputs
    ctx.mark_non_differentiable(indices)
    # The softmax over all scores is needed only where its denominator stays in the weights.
    ctx.full_softmax = softmax_first and not renormalize
    ctx.scores_dtype = scores.dtype
    ctx.experts = scores.shape[1]
    ctx.save_for_backward(scores if ctx.full_softmax else None, weights, indices)


def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None]:
    if grad is None:
        return (None,)
    scores, weights, indices = ctx.saved_tensors
    indices = indices.long()
    # d softmax: p * (g - sum(g * p)); scores that were not selected have g = 0.
    inner = (grad * weights).sum(dim=-1, keepdim=True)
    if ctx.full_softmax:
        probabilities = torch.softmax(scores.float(), dim=-1)
        result = (-inner * probabilities).scatter_add(-1, indices, grad * weights)
    else:
        empty = grad.new_zeros(grad.shape[0], ctx.experts)
        result = empty.scatter(-1, indices, (grad - inner) * weights)
    return (result.to(ctx.scores_dtype),)


_CUDA = ("one warp or less a row, selection in registers", "cuda")
_TORCH = ("torch.sort and torch.softmax", "torch")

_TOPK_SOFTMAX = Op(
    _NAME,
    "(Tensor scores, int k, bool softmax_first=True, bool renormalize=False,"
    " ScalarType indices_dtype=int, str? backend=None) -> (Tensor weights, Tensor indices)",
    check=_check,
    fake=_outputs,
    sm90=Backend("sm90", topk_sm90, *_CUDA, why_not=_why_not),
    ref=Backend("ref", _ref, *_TORCH),
    autograd=Autograd(save, backward),
    defaults={"indices_dtype": torch.int32},
    describe=_plan,
    load=_C.topk_softmax_load,
)

_TOPK_SOFTMAX_OUT = Op(
    f"{_NAME}_out",
    "(Tensor scores, Tensor(a!) weights, Tensor(b!) indices, bool softmax_first=True,"
    " bool renormalize=False, str? backend=None) -> ()",
    check=_check_out,
    fake=lambda *args: None,
    sm90=Backend("sm90", _sm90_out, *_CUDA, why_not=_why_not_out),
    ref=Backend("ref", _ref_out, *_TORCH),
    family=_NAME,
    launch=_C.topk_softmax,
)


@_TOPK_SOFTMAX.export
def topk_softmax(
    scores: Tensor,
    k: int,
    *,
    softmax_first: bool = True,
    renormalize: bool = False,
    indices_dtype: torch.dtype = torch.int32,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the k largest scores of each row and gives them softmax weights.

    This is the router of a mixture of experts (Shazeer et al., 2017, arXiv:1701.06538): with
    ``softmax_first`` as in Switch Transformer and DeepSeek-MoE, without it as in Mixtral.

    The selection is exact and made on the scores themselves: descending, ties by lowest index,
    -0.0 equal to +0.0, NaN above everything. Arithmetic is float32. A row that holds NaN or +inf,
    or nothing but -inf, gets NaN weights, as from :func:`torch.softmax`; its indices still hold.

    Differentiable in ``scores``. Works under torch.compile and torch.export, and in CUDA graphs;
    it never synchronises.

    Args:
        scores: ``[T, E]``, float32, bfloat16 or float16, any strides; T may be 0. The precompiled
            kernels take E up to 512 and k up to 16, larger ones run on ref.
        k: How many to select, from 1 to E.
        softmax_first: Weights are ``softmax(scores)`` at the selected places; otherwise the softmax
            of the selected scores alone.
        renormalize: Divide the selected weights by their sum (without ``softmax_first`` it is 1
            already).
        indices_dtype: ``torch.int32`` or ``torch.int64``.
        out: ``(weights, indices)`` to write to: contiguous, of the shapes and dtypes below, on
            the device of ``scores``. Then ``indices_dtype`` does not count and no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``weights`` ``[T, k]`` float32, and ``indices`` ``[T, k]``.

    Raises:
        TypeError: A dtype is not one of the above, or ``scores`` is no tensor.
        ValueError: A shape, stride or device does not fit, k is not from 1 to E, or there is no
            such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and E or k is too large for it.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights, experts = tiercel.topk_softmax(router_logits, 8, renormalize=True)
    """
    if out is None:
        result: tuple[Tensor, Tensor] = _TOPK_SOFTMAX.pick()(
            scores, k, softmax_first, renormalize, indices_dtype, backend
        )
        return result
    if type(out) is not tuple or len(out) != 2:
        check_pair(_NAME, out)
    weights, indices = out
    if not is_dynamo_compiling():  # the usual call reads no shape in Python
        run = _TOPK_SOFTMAX_OUT.direct
        done = run(scores, weights, indices, softmax_first, renormalize, backend, k)
        if done is not NotImplemented:
            return weights, indices
    if not _has_columns(weights, k):
        check_columns(_NAME, weights, k)
    _TOPK_SOFTMAX_OUT(scores, weights, indices, softmax_first, renormalize, backend)
    return weights, indices
