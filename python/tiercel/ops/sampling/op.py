# SPDX-License-Identifier: Apache-2.0
"""Tokens from logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Native, Op
from tiercel.core.spec import Call, Spec
from tiercel.ops._rows import rows
from tiercel.ops.sampling import reference as ref
from tiercel.ops.sampling import spec
from tiercel.ops.sampling.parameters import either as _either
from tiercel.ops.sampling.verify import verify_draft

__all__ = ["sample", "verify_draft"]

_NAMES = spec.SAMPLE.names[:-1]  # indices_dtype is the tokens' own
_TENSORS = len(spec.SAMPLE.tensors)
_RESULTS = spec.WITH_TOP_LOGPROBS.result_names
_TAKES = (*_NAMES[:_TENSORS], *_RESULTS, *_NAMES[_TENSORS:])


def _launch(native: Callable[..., Any], call: Call) -> Any:
    given = {name: getattr(call, name, None) for name in _TAKES}
    given["logits"] = rows(call.logits)
    return native(*given.values())


def _op(declared: Spec, return_logprobs: bool) -> Op:
    return Op(
        declared,
        sm90=Native(
            _C.sample,
            _C.sample_plan,
            _TAKES,
            "a row in the shared memory of a cluster, read once; no sort",
            load=_C.sample_load,
            contiguous=("logits",),
            launch=_launch,
        ),
        reference=lambda call: ref.sample(**declared.values(call), return_logprobs=return_logprobs),
        method="torch.sort and torch.cumsum in float64",
        out=not return_logprobs,
    )


_SAMPLE = _op(spec.SAMPLE, return_logprobs=False)
_WITH_LOGPROBS = _op(spec.WITH_LOGPROBS, return_logprobs=True)
_WITH_TOP_LOGPROBS = _op(spec.WITH_TOP_LOGPROBS, return_logprobs=True)


@_SAMPLE.export
def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    repetition_penalty: float | Tensor = 1.0,
    presence_penalty: float | Tensor = 0.0,
    frequency_penalty: float | Tensor = 0.0,
    temperatures: Tensor | None = None,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
    repetition_penalties: Tensor | None = None,
    presence_penalties: Tensor | None = None,
    frequency_penalties: Tensor | None = None,
    counts: Tensor | None = None,
    prompt: Tensor | None = None,
    allowed: Tensor | None = None,
    indices_dtype: torch.dtype = torch.int32,
    return_logprobs: bool = False,
    top_logprobs: int = 0,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Draws a token from each row of logits, in one launch that reads them once, without a sort.

    Applies penalties and mask, computes ``softmax(logits / temperature)``, and filters it by min-p,
    top-k and top-p, in this order. The result is a function of the row, its parameters, seed and
    offset: with ``seeds`` it depends neither on the other rows nor on the row's index. Works under
    torch.compile and torch.export, and in CUDA graphs; it never synchronises. No gradient flows.

    Each parameter is a number for all rows or a tensor ``[T]``: float32, int32 for ``top_k``, int64
    for ``seed`` and ``offset``. A tensor may also be given under the plural name, which has
    precedence over the number.

    Args:
        logits: ``[T, V]``; float32, bfloat16 or float16, any strides. The kernels take V up to
            409600 in float32 and with penalties, and 800000 in 16 bits.
        temperature: 0 (or NaN) is greedy: the first largest logit.
        top_k: Keeps the tokens whose logit is at least the k-th largest, ties included; 0, or V and
            more: all.
        top_p: Keeps the fewest most probable tokens that together have ``top_p`` of the probability
            left by min-p and top-k, and ties of the last. 1: all.
        min_p: Keeps tokens with at least ``min_p`` of the probability of the most probable.
        seed: A tensor has one seed per row. A number is the seed of all rows; results then also
            depend on the row's index.
        offset: The position in the seed's random sequence; use a new one at each step.
        repetition_penalty: Divides positive logits and multiplies others, for tokens in ``prompt``
            or ``counts``.
        presence_penalty: Subtracted from the logits of tokens in ``counts``.
        frequency_penalty: Subtracted once per occurrence in ``counts``.
        counts: ``[T, V]`` int32: how often each token occurs in the output, or None.
        prompt: ``[T, ceil(V / 32)]`` int32: bit ``v % 32`` of word ``v // 32`` is set for the
            tokens of the prompt; or None.
        allowed: Likewise; all other tokens have probability 0. None: all are allowed.
        indices_dtype: Of the tokens: ``torch.int32`` or ``torch.int64``.
        return_logprobs: Also return the tokens' log-probabilities: of the softmax of the logits
            after penalties and mask, at temperature 1 and before the filters.
        top_logprobs: Also return this many tokens of each row with the largest logits after
            penalties and mask, and their log-probabilities by the same softmax: descending, ties by
            lowest index. The kernels take up to 32, in a second launch that reads the logits again.
            0: none.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The tokens ``[T]``, and with ``return_logprobs`` their log-probabilities, float32. A row
        that holds NaN, or nothing but -inf, has token -1 and log-probability NaN. With
        ``top_logprobs=k`` also the best tokens ``[T, k]`` and their log-probabilities ``[T, k]``,
        padded with -1 and -inf if fewer than k logits are above -inf.

    Raises:
        TypeError: A dtype or type is not one of the above.
        ValueError: A shape, stride, device or value does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take such rows.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> tokens = tiercel.sample(logits, temperature=0.7, top_p=0.9, seed=seeds, offset=steps)
    """
    if not isinstance(return_logprobs, bool):
        raise TypeError(
            f"sample: `return_logprobs` must be a bool, got {type(return_logprobs).__name__}"
        )
    temperatures, temperature = _either(temperatures, temperature, 1.0)
    top_ks, top_k = _either(top_ks, top_k, 0)
    top_ps, top_p = _either(top_ps, top_p, 1.0)
    min_ps, min_p = _either(min_ps, min_p, 0.0)
    seeds, seed = _either(seeds, seed, 0)
    offsets, offset = _either(offsets, offset, 0)
    repetition_penalties, repetition_penalty = _either(
        repetition_penalties, repetition_penalty, 1.0
    )
    presence_penalties, presence_penalty = _either(presence_penalties, presence_penalty, 0.0)
    frequency_penalties, frequency_penalty = _either(frequency_penalties, frequency_penalty, 0.0)
    if not isinstance(top_logprobs, int) or isinstance(top_logprobs, bool):
        raise TypeError(f"sample: `top_logprobs` must be an int, got {type(top_logprobs).__name__}")
    op = _WITH_LOGPROBS if return_logprobs else _SAMPLE
    more: tuple[Any, ...] = (indices_dtype, backend)
    if top_logprobs != 0:
        op, more = _WITH_TOP_LOGPROBS, (indices_dtype, top_logprobs, backend)
    return op(  # type: ignore[no-any-return]
        logits,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        seeds,
        offsets,
        repetition_penalties,
        presence_penalties,
        frequency_penalties,
        counts,
        prompt,
        allowed,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        offset,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        *more,
    )
