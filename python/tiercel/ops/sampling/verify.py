# SPDX-License-Identifier: Apache-2.0
"""Draft tokens against the target model's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index
from tiercel.core.op import Native, Op
from tiercel.core.spec import Call
from tiercel.ops._rows import rows
from tiercel.ops.sampling import reference as ref
from tiercel.ops.sampling import spec
from tiercel.ops.sampling.parameters import either

__all__ = ["verify_draft"]

_NAMES = spec.VERIFY_DRAFT.names
_TENSORS = len(spec.VERIFY_DRAFT.tensors)
# None: the workspace, which a launch allocates
_TAKES = (*_NAMES[:_TENSORS], *spec.VERIFY_DRAFT.result_names, None, *_NAMES[_TENSORS:])


def _launch(native: Callable[..., Any], call: Call) -> Any:
    op = _VERIFY_TREE if "parents" in call else _VERIFY_DRAFT
    return op.launch(native, Call(**{**call.__dict__, "logits": rows(call.logits)}))


_VERIFY_DRAFT = Op(
    spec.VERIFY_DRAFT,
    sm90=Native(
        _C.verify_draft,
        _C.verify_draft_plan,
        (*_TAKES, None, None),
        "sample for all positions, then a block a sequence",
        load=_C.verify_draft_load,
        contiguous=("logits",),
        launch=_launch,
    ),
    reference=lambda call: ref.verify_draft(**spec.VERIFY_DRAFT.values(call)),
    method="torch.sort and torch.cumsum in float64",
)


def _parents(call: Call) -> list[Index]:
    count = call.parents.shape[1]

    def wrong(parents: Tensor) -> Tensor:
        nodes = torch.arange(count, device=parents.device)
        return (parents < -1) | (parents >= nodes)

    return [Index("parents", call.parents, wrong, "hold -1 or the number of an earlier node")]


_VERIFY_TREE = Op(
    spec.VERIFY_TREE,
    sm90=Native(
        _C.verify_draft,
        _C.verify_draft_plan,
        (*_TAKES, "parents", "path"),
        "sample for all nodes, then a block a sequence",
        load=_C.verify_draft_load,
        contiguous=("logits",),
        launch=_launch,
    ),
    reference=lambda call: ref.verify_tree(**spec.VERIFY_TREE.values(call)),
    method="torch.sort and torch.cumsum in float64",
    indices=_parents,
)


@_VERIFY_DRAFT.export
def verify_draft(
    draft_tokens: Tensor,
    logits: Tensor,
    draft_probs: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    temperatures: Tensor | None = None,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
    parents: Tensor | None = None,
    out: tuple[Tensor, ...] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Speculative decoding: accepts or replaces a chain or tree of draft tokens, without changing
    the distribution of the target model.

    Rejection sampling (Leviathan et al., 2023, arXiv:2211.17192): draft token ``i`` is accepted
    with probability ``min(1, p / q)``, where ``p`` is its probability for the target, with
    temperature and filters as in :func:`tiercel.sample`, and ``q`` that of the draft. The first
    rejected one is replaced by a token drawn from ``max(p - q, 0)``. If all are accepted, one more
    token is drawn from ``p``.

    Without ``draft_probs`` the draft is deterministic (``q`` is 1), as from a greedy draft model or
    n-grams. Then a token is drawn for each position with the seed and ``offset + i``, and draft
    tokens are accepted as long as they equal the drawn ones: the result has the tokens that
    :func:`tiercel.sample` would draw one by one, with the same seed and offsets.

    With ``parents`` the draft is a tree, as in SpecInfer (Miao et al., 2024, arXiv:2305.09781).
    From the root on, a node's children are tried in order, the first against ``p``; where one is
    rejected, the next is tried against ``max(p - q, 0)``, renormalised, and so on. The first
    accepted child is the next node; if none is, the new token is drawn from the remaining
    distribution.

    Works under torch.compile and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        draft_tokens: ``[B, S]``, int32 or int64.
        logits: ``[B, S + 1, V]``: the target's, at each draft token and after the last one;
            float32, bfloat16 or float16, any strides; V as for :func:`tiercel.sample`.
        draft_probs: ``[B, S, V]`` float32: the probabilities from which the draft was drawn, 0 for
            tokens without one; or None.
        temperature: A number or a tensor ``[B]``, which may also be given under the plural name, as
            for :func:`tiercel.sample`; so are the next five. 0 is greedy: a draft token is accepted
            if it is the target's first largest.
        top_k: The same.
        top_p: The same.
        min_p: The same.
        seed: The same; with a number, results also depend on the sequence's index.
        offset: The same, for the first position; position ``i`` uses ``offset + i``.
        parents: ``[B, S]`` int32: each node's parent: an earlier node, or -1 for the root, the
            token before the draft. None for a chain. With a tree ``logits[:, 0]`` are the root's
            and ``logits[:, i + 1]`` node i's, with ``offset + i + 1``; ``draft_probs[:, i]`` is the
            distribution that node i was drawn from, given the siblings before it. A node with an
            invalid parent is never reached, and ``TIERCEL_CHECK=1`` makes it an error. The kernels
            take up to 64 nodes.
        out: ``(tokens, accepted)``, with ``parents`` ``(tokens, accepted, path)``, to write to.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``tokens`` ``[B, S + 1]`` with the dtype of ``draft_tokens``: the accepted tokens, then the
        new one, then -1; and ``accepted`` ``[B]`` int32, the number of accepted draft tokens. The
        new token is -1 where the position's logits hold NaN, or nothing but -inf. With ``parents``
        also ``path`` ``[B, S]`` int32: the accepted nodes, then -1.

    Raises:
        TypeError: A dtype or type is not one of the above.
        ValueError: A shape, stride, device or value does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take such rows.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> tokens, accepted = tiercel.verify_draft(draft, logits, seed=seeds, offset=steps)
    """
    temperatures, temperature = either(temperatures, temperature, 1.0)
    top_ks, top_k = either(top_ks, top_k, 0)
    top_ps, top_p = either(top_ps, top_p, 1.0)
    min_ps, min_p = either(min_ps, min_p, 0.0)
    seeds, seed = either(seeds, seed, 0)
    offsets, offset = either(offsets, offset, 0)
    tensors = (draft_tokens, logits, draft_probs)
    of_rows = (temperatures, top_ks, top_ps, min_ps, seeds, offsets)
    numbers = (temperature, top_k, top_p, min_p, seed, offset)
    if parents is not None:
        nodes = (draft_tokens, logits, parents, draft_probs, *of_rows, *numbers, backend)
        if out is None:
            return _VERIFY_TREE(*nodes)  # type: ignore[no-any-return]
        return _VERIFY_TREE.into()(out, *nodes)  # type: ignore[no-any-return]
    arguments = (*tensors, *of_rows, *numbers, backend)
    if out is None:
        return _VERIFY_DRAFT(*arguments)  # type: ignore[no-any-return]
    return _VERIFY_DRAFT.into()(out, *arguments)  # type: ignore[no-any-return]
