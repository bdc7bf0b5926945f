# SPDX-License-Identifier: Apache-2.0
"""Attention over two sets of keys, from the attention over each."""

from __future__ import annotations

from torch import Tensor

from tiercel import _C
from tiercel.core.op import Native, Op
from tiercel.ops.attention import reference as ref
from tiercel.ops.attention import spec

__all__ = ["merge_attention_states"]

_MERGE = Op(
    spec.MERGE_ATTENTION_STATES,
    sm90=Native(
        _C.merge_attention_states,
        _C.merge_attention_states_plan,
        (*spec.MERGE_ATTENTION_STATES.names, "out", "lse"),
        "both results read once, in one launch",
        load=_C.merge_attention_states_load,
    ),
    reference=lambda call: ref.merge_attention_states(**spec.MERGE_ATTENTION_STATES.values(call)),
    method="torch, step by step in float32",
)


@_MERGE.export
def merge_attention_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges the results of attention over two disjoint sets of keys into that over their union.

    For a prefix that sequences share, chunks of a long prompt, or keys on several GPUs: ``out =
    (out_a exp(lse_a) + out_b exp(lse_b)) / (exp(lse_a) + exp(lse_b))`` and ``lse``, the logarithm
    of the denominator, in float32. Where one of ``lse_a`` and ``lse_b`` is minus infinity (no
    keys), the other result is taken and this one's contents are ignored; where both are, the result
    is 0 and minus infinity.

    No gradient flows. Works under torch.compile and in CUDA graphs; it never synchronises.

    Args:
        out_a: ``[B, S, H, D]``, float32, bfloat16 or float16, as :func:`tiercel.attention` and
            :func:`tiercel.decode_attention` return it. The precompiled kernels take rows and
            strides that are multiples of 16 bytes.
        lse_a: ``[B, H, S]`` float32, contiguous: natural logarithms.
        out_b: As ``out_a``.
        lse_b: As ``lse_a``.
        out: ``(out, lse)`` to write to. ``out`` may be ``out_a`` or ``out_b``; ``lse`` must not
            overlap the inputs.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``(out, lse)``, as ``out_a`` and ``lse_a``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> out, lse = tiercel.merge_attention_states(shared, shared_lse, own, own_lse)
    """
    if out is None:
        result: tuple[Tensor, Tensor] = _MERGE.pick()(out_a, lse_a, out_b, lse_b, backend)
        return result
    return _MERGE.into()(out, out_a, lse_a, out_b, lse_b, backend)  # type: ignore[no-any-return]
