# SPDX-License-Identifier: Apache-2.0
"""The tokens that sparse attention looks at."""

from __future__ import annotations

from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index, between
from tiercel.core.op import Native, Op
from tiercel.core.spec import Call
from tiercel.ops.mla import reference as ref
from tiercel.ops.mla import spec

__all__ = ["top_k_indices"]


def _indices(call: Call) -> list[Index]:
    return [between("lengths", call.lengths, 0, call.logits.shape[1])]


_TOP_K = Op(
    spec.TOP_K_INDICES,
    sm90=Native(
        _C.top_k_indices,
        _C.top_k_indices_plan,
        ("logits", "lengths", "indices"),
        "radix select, a row in the shared memory of a cluster, read once",
        load=_C.top_k_indices_load,
    ),
    reference=lambda call: ref.top_k_indices(**spec.TOP_K_INDICES.values(call)),
    method="all of the row sorted",
    indices=_indices,
)


@_TOP_K.export
def top_k_indices(
    logits: Tensor,
    k: int = 2048,
    *,
    lengths: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Finds the ``k`` largest elements of each row, exactly, for sparse attention.

    One launch. Of equal elements those with the lowest indices are selected. NaN is larger than any
    number, as in ``torch.topk``, and -0 equals 0. Minus infinity, an indexer's mask, is never
    selected. A row's indices ascend, then -1 fills up the rest if there are fewer than ``k``
    candidates, as :func:`tiercel.mla_sparse_attention` takes them. The same call gives the same
    bits.

    No gradient flows. Works under torch.compile and in CUDA graphs; it never synchronises.

    Args:
        logits: ``[T, N]`` float32. The precompiled kernels take contiguous rows with any row
            stride, and are fastest where rows start at multiples of 16 bytes.
        k: How many, at least 1; more than N is allowed.
        lengths: ``[T]`` int32, any stride: the number of first elements of each row that are
            candidates, clamped to 0 and N. None: all.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[T, k]`` int32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, device or option does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> indices = tiercel.top_k_indices(logits, 2048, lengths=lengths)
    """
    return _TOP_K.pick()(logits, k, lengths, backend)  # type: ignore[no-any-return]
