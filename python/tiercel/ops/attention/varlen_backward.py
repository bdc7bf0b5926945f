# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention_varlen: one sequence after the other, by attention's kernels."""

from __future__ import annotations

from typing import Any

from tiercel.core.op import Native, Op
from tiercel.ops.attention import reference as ref
from tiercel.ops.attention import spec
from tiercel.ops.attention.backward import by_reference, launch, plan
from tiercel.ops.attention.indices import packed_indices

# The operator's arguments and results, `values` below, are (grad, q, k, v), both cu_seqlens,
# (out, lse, grad_lse), four options, whether dq is summed in a fixed order, and (dq, dk, dv).


def _of_one(values: tuple[Any, ...], queries: slice, keys: slice) -> tuple[Any, ...]:
    """The arguments of attention_backward for one sequence."""
    grad, q, k, v, _, _, out, lse, grad_lse = values[:9]
    rows = ((grad, queries), (q, queries), (k, keys), (v, keys), (out, queries))
    gradients = zip(values[14:], (queries, keys, keys), strict=True)
    sums = (None if x is None else x[None, :, queries].contiguous() for x in (lse, grad_lse))
    return (
        *(tensor[None, part] for tensor, part in rows),
        *sums,
        *values[9:14],
        *(tensor[None, part] for tensor, part in gradients),
    )


def _launch(*values: Any) -> None:
    q, k = values[1:3]
    for gradient in values[14:]:
        gradient.zero_()
    for queries, keys in ref.sequences(*values[4:6], len(q), len(k)):
        if queries.start < queries.stop and keys.start < keys.stop and 0 not in q.shape:
            launch(*_of_one(values, queries, keys))


def _plan(*values: Any) -> dict[str, Any]:
    if any(0 in tensor.shape for tensor in values[:4]):
        return {}
    try:
        return plan(*_of_one(values, slice(0, 1), slice(0, 1)))  # one row shows the strides
    except NotImplementedError as error:
        raise NotImplementedError(str(error).removeprefix("attention_backward: ")) from None


BACKWARD = Op(
    spec.ATTENTION_VARLEN_BACKWARD,
    sm90=Native(
        _launch,
        _plan,
        (*spec.ATTENTION_VARLEN_BACKWARD.names, *spec.ATTENTION_VARLEN_BACKWARD.result_names),
        "attention_backward's kernels, one sequence after the other",
        language="cute",
    ),
    reference=by_reference(spec.ATTENTION_VARLEN_BACKWARD, ref.attention_varlen_backward),
    method="all scores in memory, float32",
    indices=packed_indices,
    out=False,
)
