# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture of experts."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index, between
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
    ctx.looked_up = getattr(call, "expert_table", None) is not None
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
    real = indices >= 0 if ctx.looked_up else None
    if real is not None:
        grad, indices = torch.where(real, grad, 0.0), indices.clamp(min=0)
    if ctx.scoring != "softmax":
        return {"scores": _scattered(ctx, grad, scores, indices, real)}
    # d softmax: p * (g - sum(g * p)); scores that were not selected have g = 0.
    inner = (grad * weights).sum(dim=-1, keepdim=True)
    if ctx.full_softmax:
        probabilities = torch.softmax(scores.float(), dim=-1)
        result = (-inner * probabilities).scatter_add(-1, indices, grad * weights)
    else:
        if ctx.scaling != 1.0:
            inner = inner / ctx.scaling
        empty = grad.new_zeros(grad.shape[0], ctx.experts)
        # A table may have an expert twice.
        add = empty.scatter if real is None else empty.scatter_add
        result = add(-1, indices, (grad - inner) * weights)
    return {"scores": result.to(ctx.scores_dtype)}


def _scattered(
    ctx: Any, grad: Tensor, scores: Tensor, indices: Tensor, real: Tensor | None
) -> Tensor:
    """The gradient of scores that are functions of one logit each."""
    x = scores.float().gather(-1, indices)
    slope = torch.sigmoid(x)
    if ctx.scoring == "sigmoid":
        value, slope = slope, slope * (1.0 - slope)
    else:
        value = torch.logaddexp(x, torch.zeros_like(x)).sqrt()
        slope = slope / (2.0 * value)
    if real is not None:
        value, slope = torch.where(real, value, 0.0), torch.where(real, slope, 0.0)
    grad = grad * ctx.scaling
    if ctx.renormalize:
        total = value.sum(dim=-1, keepdim=True) + 1e-20
        grad = (grad - (grad * value).sum(dim=-1, keepdim=True) / total) / total
    empty = grad.new_zeros(grad.shape[0], ctx.experts)
    add = empty.scatter if real is None else empty.scatter_add
    return add(-1, indices, grad * slope).to(ctx.scores_dtype)


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


def no_rows(call: Call) -> dict[str, Any]:
    """No limit depends on the number of rows."""
    return {"scores": call.scores[:0], "token_ids": call.token_ids[:0]}


def table_indices(call: Call) -> list[Index]:
    tokens, experts = call.expert_table.shape[0], call.scores.shape[1]
    return [
        between("token_ids", call.token_ids, 0, tokens - 1),
        between("expert_table", call.expert_table, 0, experts - 1),
    ]


def check_hash(
    op: str,
    token_ids: Tensor | None,
    expert_table: Tensor | None,
    bias: Tensor | None,
    groups: tuple[int, int],
) -> None:
    """A table comes with tokens, and without what is for a selection."""
    if token_ids is None or expert_table is None:
        absent, given = "token_ids", "expert_table"
        if token_ids is not None:
            absent, given = given, absent
        raise ValueError(f"{op}: `{absent}` must be given where `{given}` is, got None")
    if bias is not None:
        raise ValueError(f"{op}: `correction_bias` must be None with `expert_table`")
    if groups != (1, 1):
        raise ValueError(f"{op}: `n_group` and `topk_group` must be 1 with `expert_table`")


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
            None,
            None,
        ),
        "a warp a row, selection in registers",
        load=_C.topk_route_load,
        sample=lambda call: {"scores": call.scores[:0]},
    ),
    reference=lambda call: plain_route.topk_route(**spec.TOPK_ROUTE.values(call)),
    method="torch.sort on scores, and on groups of them",
    gradient=Gradient(save, gradients),
)

_HASH_ROUTE = Op(
    spec.HASH_ROUTE,
    sm90=Native(
        _C.topk_route,
        _C.topk_route_plan,
        (
            "scores",
            None,
            "weights",
            "indices",
            "softmax_first",
            "renormalize",
            Lookup("scoring", SCORING),
            1,
            1,
            "scaling_factor",
            "n_shared",
            "token_ids",
            "expert_table",
        ),
        "a warp a row, a lane an expert",
        load=_C.topk_route_load,
        sample=no_rows,
    ),
    reference=lambda call: plain_route.topk_route(**spec.HASH_ROUTE.values(call)),
    method="torch.gather",
    gradient=Gradient(save, gradients),
    indices=table_indices,
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
    token_ids: Tensor | None = None,
    expert_table: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Selects the k largest scores of each row and computes their softmax weights.

    This is the router of a mixture of experts (Shazeer et al., 2017, arXiv:1701.06538): with
    ``softmax_first`` as in Switch Transformer and DeepSeek-MoE, without it as in Mixtral.

    The selection is exact, on the scores themselves: descending, ties by lowest index, -0.0 equal
    to +0.0, NaN above everything. Arithmetic is float32. A row that holds NaN or +inf, or nothing
    but -inf, gets NaN weights, as from :func:`torch.softmax`; its indices are still those of the
    selection.

    With ``scoring``, ``correction_bias`` and groups it is the router of DeepSeek-V2, V3 and V4, GLM
    and Kimi. With a bias, the selection is by ``score + correction_bias`` in float32, which all
    backends round alike, so they select the same experts.

    With ``expert_table`` there is no selection: the experts of row t are
    ``expert_table[token_ids[t]]``, in that order, and the weights are computed from their scores as
    above. This is the hash routing of DeepSeek-V4's first layers: ``Gate`` in the models'
    ``inference/model.py`` (``tid2eid``), ``DeepseekV4HashRouter`` in transformers.

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
        correction_bias: ``[E]`` float32 or None: added to the scores for the selection, not for the
            weights. No gradient flows to it.
        n_group: The number of equal groups of consecutive experts, up to 32.
        topk_group: The number of groups to select experts from: those with the largest sum of their
            two best ``score + correction_bias`` or, without a bias, with the largest score.
        scaling_factor: Factor of the weights.
        n_shared: The number of shared experts, E to E + n_shared - 1, appended to each row's
            selection with weight 1 whatever ``scaling_factor`` is.
        token_ids: ``[T]`` int32 or int64: each row's token, with ``expert_table``.
        expert_table: ``[tokens, k]`` int32: each token's experts; not with ``correction_bias`` or
            groups. An invalid expert gives index -1 and weight 0 and is left out of sums; an
            invalid token gives a row of these. ``TIERCEL_CHECK=1`` makes both an error.
        out: ``(weights, indices)`` to write to: contiguous, of the shapes and dtypes below, on the
            device of ``scores``. Then ``indices_dtype`` is ignored and no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``weights`` ``[T, k + n_shared]`` float32, and ``indices`` likewise.

    Raises:
        TypeError: A dtype is not one of the above, or ``scores`` is not a tensor.
        ValueError: A shape, stride or device does not fit, k is not from 1 to E, or there is no
            such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and E or k is too large for it.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights, experts = tiercel.topk_softmax(router_logits, 8, renormalize=True)
    """
    options = (scoring, n_group, topk_group, scaling_factor, n_shared)
    if token_ids is not None or expert_table is not None:
        groups = (n_group, topk_group)
        check_hash("topk_softmax", token_ids, expert_table, correction_bias, groups)
        columns = columns_of("topk_softmax", k, n_shared)
        softmax = (softmax_first, renormalize, indices_dtype)
        tail = (columns, *softmax, scoring, scaling_factor, n_shared, backend)
        if out is not None:
            return _HASH_ROUTE.into()(out, scores, token_ids, expert_table, *tail)  # type: ignore[no-any-return]
        return _HASH_ROUTE.pick()(scores, token_ids, expert_table, *tail)  # type: ignore[no-any-return]
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
