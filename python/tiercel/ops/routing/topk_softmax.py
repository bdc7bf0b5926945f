# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture of experts."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Gradient, Lookup, Native, Op
from tiercel.core.spec import Call
from tiercel.ops.routing import plain_route, spec
from tiercel.ops.routing import reference as ref

__all__ = ["topk_softmax"]


def save(ctx: Any, call: Call, results: tuple[Tensor, ...]) -> None:
    weights, indices = results[:2]
    ctx.mark_non_differentiable(indices)
    # The softmax over all scores is needed only where its denominator stays in the weights.
    ctx.full_softmax = call.softmax_first and not call.renormalize
    ctx.scoring = getattr(call, "scoring", "softmax")
    ctx.scaling = getattr(call, "scaling_factor", 1.0)
    ctx.n_shared = getattr(call, "n_shared", 0)
    ctx.renormalize = call.renormalize
    ctx.scores_dtype = call.scores.dtype
    ctx.experts = call.scores.shape[1]
    with_scores = ctx.full_softmax or ctx.scoring != "softmax"
    ctx.save_for_backward(call.scores if with_scores else None, weights, indices)


def gradients(ctx: Any, grad: Tensor | None, *_: Any) -> dict[str, Tensor | None]:
    if grad is None:
        return {}
    scores, weights, indices = ctx.saved_tensors
    indices = indices.long()
    if ctx.n_shared:
        selected = weights.shape[1] - ctx.n_shared
        grad, weights, indices = (x[:, :selected] for x in (grad, weights, indices))
    if ctx.scoring != "softmax":
        return {"scores": _scattered(ctx, grad, scores, indices)}
    # d softmax: p * (g - sum(g * p)); scores that were not selected have g = 0.
    inner = (grad * weights).sum(dim=-1, keepdim=True)
    if ctx.full_softmax:
        probabilities = torch.softmax(scores.float(), dim=-1)
        result = (-inner * probabilities).scatter_add(-1, indices, grad * weights)
    else:
        if ctx.scaling != 1.0:
            inner = inner / ctx.scaling
        empty = grad.new_zeros(grad.shape[0], ctx.experts)
        result = empty.scatter(-1, indices, (grad - inner) * weights)
    return {"scores": result.to(ctx.scores_dtype)}


def _scattered(ctx: Any, grad: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    """The gradient of scores that are functions of one logit each."""
    x = scores.float().gather(-1, indices)
    slope = torch.sigmoid(x)
    if ctx.scoring == "sigmoid":
        value, slope = slope, slope * (1.0 - slope)
    else:
        value = torch.logaddexp(x, torch.zeros_like(x)).sqrt()
        slope = slope / (2.0 * value)
    grad = grad * ctx.scaling
    if ctx.renormalize:
        total = value.sum(dim=-1, keepdim=True) + 1e-20
        grad = (grad - (grad * value).sum(dim=-1, keepdim=True) / total) / total
    empty = grad.new_zeros(grad.shape[0], ctx.experts)
    return empty.scatter(-1, indices, grad * slope).to(ctx.scores_dtype)


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

# The defaults of scoring, n_group, topk_group, scaling_factor and n_shared.
DEFAULTS = ("softmax", 1, 1, 1.0, 0)


def columns_of(op: str, k: int, n_shared: int) -> int:
    spec.TOPK_SOFTMAX.check_value("k", k, op)
    spec.TOPK_ROUTE.check_value("n_shared", n_shared, op)
    return k + n_shared


SCORING = {name: place for place, name in enumerate(spec.SCORING)}

_ROUTE = Op(
    spec.TOPK_ROUTE,
    sm90=Native(
        _C.topk_route,
        _C.topk_route_plan,
        (
            "scores",
            "correction_bias",
            "weights",
            "indices",
            "softmax_first",
            "renormalize",
            Lookup("scoring", SCORING),
            "n_group",
            "topk_group",
            "scaling_factor",
            "n_shared",
        ),
        "a warp a row, selection in registers",
        load=_C.topk_route_load,
        sample=lambda call: {"scores": call.scores[:0]},
    ),
    reference=lambda call: plain_route.topk_route(**spec.TOPK_ROUTE.values(call)),
    method="torch.sort on scores, and on groups of them",
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
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax",
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scaling_factor: float = 1.0,
    n_shared: int = 0,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the k largest scores of each row and gives them softmax weights.

    This is the router of a mixture of experts (Shazeer et al., 2017, arXiv:1701.06538): with
    ``softmax_first`` as in Switch Transformer and DeepSeek-MoE, without it as in Mixtral.

    The selection is exact and made on the scores themselves: descending, ties by lowest index,
    -0.0 equal to +0.0, NaN above everything. Arithmetic is float32. A row that holds NaN or +inf,
    or nothing but -inf, gets NaN weights, as from :func:`torch.softmax`; its indices still hold.

    With ``scoring``, ``correction_bias`` and groups it is the router of DeepSeek-V2, V3 and V4, GLM
    and Kimi. Where there is a bias, the selection is by ``score + correction_bias`` in float32,
    rounded in the same way by all backends, so that it is the same everywhere.

    Differentiable in ``scores``. Works under torch.compile and torch.export, and in CUDA graphs;
    it never synchronises.

    Args:
        scores: ``[T, E]``, float32, bfloat16 or float16, any strides; T may be 0. The precompiled
            kernels take E up to 1024 and k (with ``n_shared``) up to 32, larger ones run on ref.
        k: How many to select, from 1 to E.
        softmax_first: Weights are ``softmax(scores)`` at the selected places; otherwise the softmax
            of the selected scores alone.
        renormalize: Divide the selected weights by their sum (without ``softmax_first`` it is 1
            already).
        indices_dtype: ``torch.int32`` or ``torch.int64``.
        scoring: The function of a score: ``"softmax"``; ``"sigmoid"``; ``"sqrtsoftplus"``, the root
            of ``log(1 + exp(x))``. With the latter two the weights are the selected scores, and
            ``renormalize`` divides them by their sum plus 1e-20.
        correction_bias: ``[E]`` float32 or None: is added for the selection, not to the weights. No
            gradient flows to it.
        n_group: Equal groups of neighbouring experts, up to 32.
        topk_group: Experts are selected in that many groups: those with the largest sums of two
            best ``score + correction_bias`` or, without a bias, with the largest scores.
        scaling_factor: Multiplies the weights, last.
        n_shared: Shared experts, E to E + n - 1, which every row gets behind the selected ones,
            with weight 1 whatever ``scaling_factor`` is.
        out: ``(weights, indices)`` to write to: contiguous, of the shapes and dtypes below, on
            the device of ``scores``. Then ``indices_dtype`` does not count and no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``weights`` ``[T, k + n_shared]`` float32, and ``indices`` likewise.

    Raises:
        TypeError: A dtype is not one of the above, or ``scores`` is no tensor.
        ValueError: A shape, stride or device does not fit, k is not from 1 to E, or there is no
            such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and E or k is too large for it.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights, experts = tiercel.topk_softmax(router_logits, 8, renormalize=True)
    """
    options = (scoring, n_group, topk_group, scaling_factor, n_shared)
    if correction_bias is not None or options != DEFAULTS:
        columns = columns_of("topk_softmax", k, n_shared)
        first = (scores, columns, softmax_first, renormalize, indices_dtype)
        arguments = (*first, correction_bias, *options, backend)
        if out is not None:
            return _ROUTE.into()(out, *arguments)  # type: ignore[no-any-return]
        return _ROUTE.pick()(*arguments)  # type: ignore[no-any-return]
    if out is None:
        result: tuple[Tensor, Tensor] = _TOPK_SOFTMAX.pick()(
            scores, k, softmax_first, renormalize, indices_dtype, backend
        )
        return result
    return _TOPK_SOFTMAX.into()(  # type: ignore[no-any-return]
        out, scores, k, softmax_first, renormalize, indices_dtype, backend
    )
