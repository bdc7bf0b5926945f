# SPDX-License-Identifier: Apache-2.0
"""Draft tokens against the target model's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tiercel import _C
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
    given = Call(**{**call.__dict__, "logits": rows(call.logits)})
    return _VERIFY_DRAFT.launch(native, given)


_VERIFY_DRAFT = Op(
    spec.VERIFY_DRAFT,
    sm90=Native(
        _C.verify_draft,
        _C.verify_draft_plan,
        _TAKES,
        "sample for all positions, then a block a sequence",
        load=_C.verify_draft_load,
        contiguous=("logits",),
        launch=_launch,
    ),
    reference=lambda call: ref.verify_draft(**spec.VERIFY_DRAFT.values(call)),
    method="torch.sort and torch.cumsum in float64",
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
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Speculative decoding: accepts or replaces a chain of draft tokens, without changing the
    distribution of the target model.

    Rejection sampling (Leviathan et al., 2023, arXiv:2211.17192): draft token ``i`` is accepted
    with probability ``min(1, p / q)``, where ``p`` is its probability for the target, with
    temperature and filters as in :func:`tiercel.sample`, and ``q`` that of the draft. The first
    that is not is replaced by a token drawn from ``max(p - q, 0)``. Behind the last one, if all are
    accepted, comes one drawn from ``p``.

    Without ``draft_probs`` the draft is taken as certain (``q`` is 1), as from a greedy draft model
    or from n-grams. Then a token is drawn for each position with the seed and ``offset + i``, and
    drafts are accepted as long as they are the tokens drawn: the result has the tokens that
    :func:`tiercel.sample` would give one by one, with the same seed and offsets.

    Works under torch.compile and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        draft_tokens: ``[B, S]``, int32 or int64.
        logits: ``[B, S + 1, V]``: the target's, for each draft token and behind the last one;
            float32, bfloat16 or float16, any strides; V as for :func:`tiercel.sample`.
        draft_probs: ``[B, S, V]`` float32: the probabilities from which the draft was drawn, of
            tokens that had none 0; or None.
        temperature: A number, or a tensor ``[B]``, which may also be given under the plural name,
            as for :func:`tiercel.sample`, like the next five. 0 is greedy: a draft token is
            accepted if it is the target's first largest.
        top_k: The same.
        top_p: The same.
        min_p: The same.
        seed: The same; a number is one for all sequences, which then also differ by their place.
        offset: The same, of the first position; position ``i`` takes ``offset + i``.
        out: ``(tokens, accepted)`` to write to.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``tokens`` ``[B, S + 1]`` with the dtype of ``draft_tokens``: the accepted ones, then one
        that is new, then -1; and ``accepted`` ``[B]`` int32, how many of the draft are. The new
        token is -1 where the position's logits hold NaN, or nothing but -inf.

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
    arguments = (*tensors, *of_rows, *numbers, backend)
    if out is None:
        return _VERIFY_DRAFT(*arguments)  # type: ignore[no-any-return]
    return _VERIFY_DRAFT.into()(out, *arguments)  # type: ignore[no-any-return]
