# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Gradient, Native, Op
from tiercel.core.spec import Call
from tiercel.ops.routing import reference as ref
from tiercel.ops.routing import spec

__all__ = ["topk_softmax"]


def save(ctx: Any, call: Call, results: tuple[Tensor, ...]) -> None:
    weights, indices = results[:2]
    ctx.mark_non_differentiable(indices)
    # The softmax over all scores is needed only where its denominator stays in the weights.
    ctx.full_softmax = call.softmax_first and not call.renormalize
    ctx.scores_dtype = call.scores.dtype
    ctx.experts = call.scores.shape[1]
    ctx.save_for_backward(call.scores if ctx.full_softmax else None, weights, indices)


def gradients(ctx: Any, grad: Tensor | None, *_: Any) -> dict[str, Tensor | None]:
    if grad is None:
        return {}
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
    return {"scores": result.to(ctx.scores_dtype)}


_TOPK_SOFTMAX = Op(
    spec.TOPK_SOFTMAX,
    sm90=Native(
        _C.topk_softmax,
        _C.topk_softmax_plan,
        ("scores", "weights", "indices", "softmax_first", "renormalize"),
        "one warp or less a row, selection in registers",
        load=_C.topk_softmax_load,
        sample=lambda call: {"scores": call.scores[:0]},  # no limit depends on the number of rows
    ),
    reference=lambda call: ref.topk_softmax(**spec.TOPK_SOFTMAX.values(call)),
    method="torch.sort and torch.softmax",
    gradient=Gradient(save, gradients),
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
    return _TOPK_SOFTMAX.into()(  # type: ignore[no-any-return]
        out, scores, k, softmax_first, renormalize, indices_dtype, backend
    )
