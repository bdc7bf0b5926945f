# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences of several lengths, behind each other in one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.eager import DISPATCH, route
from tiercel.ops.attention import reference as ref
from tiercel.ops.attention import spec
from tiercel.ops.attention.forward import Forward, Kernels
from tiercel.ops.attention.indices import packed_indices
from tiercel.ops.attention.options import Window, check_options
from tiercel.ops.attention.varlen_backward import BACKWARD

__all__ = ["attention_varlen"]


def _from_scores(
    inputs: tuple[Tensor, ...],
    sinks: Tensor | None,
    grads: tuple[Tensor | None, ...],
    rest: tuple[Any, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients from all scores of a sequence at a time."""
    if route(*inputs) == DISPATCH:
        # A graph cannot hold a loop over sequences, whose starts it does not know: by operators.
        results = _VARLEN.with_lse(inputs, *rest, "ref", sinks)
        return _VARLEN.differentiate(inputs, results, grads, rest[2:], False, "ref", sinks)
    wanted = [(grad, i) for i, grad in enumerate(grads) if grad is not None]
    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], sinks) if x is not None]
    with torch.enable_grad():
        options = dict(zip(spec.OPTIONS, rest[2:], strict=True)) | {"return_lse": True}
        if sinks is not None:
            options["sinks"] = leaves[3]
        results = ref.attention_varlen(*leaves[:3], *inputs[3:], *rest[:2], **options)
        outputs = [results[i] for _, i in wanted]
        if not outputs[0].requires_grad:  # no sequence has a row
            return tuple(torch.zeros_like(x) for x in leaves)
        return torch.autograd.grad(outputs, leaves, [g for g, _ in wanted], materialize_grads=True)


def _kernel(function: Any) -> Any:
    return lambda inputs, starts, outputs, options: function(
        *inputs, *starts[:2], *outputs, *starts[2:], *options
    )


def _fp8_kernel(function: Any) -> Any:
    return lambda inputs, starts, outputs, more, options: function(
        *inputs, *outputs, *more, *options, *starts
    )


_VARLEN = Forward(
    (spec.ATTENTION_VARLEN, spec.ATTENTION_VARLEN_LSE),
    Kernels(
        run=_kernel(_C.attention_varlen),
        plan=_kernel(_C.attention_varlen_plan),
        run_fp8=_fp8_kernel(_C.attention_varlen_fp8),
        plan_fp8=_fp8_kernel(_C.attention_varlen_fp8_plan),
        description="as attention's; tensor maps that end where a sequence does",
    ),
    ref.attention_varlen,
    "one sequence after the other, all scores of it in memory, float32",
    BACKWARD,
    _from_scores,
    indices=packed_indices,
    out=False,
)


@_VARLEN.plain.export
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`tiercel.attention` of packed sequences of different lengths, without padding.

    Sequence i has the queries ``q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]``, and keys and values
    likewise; masks are aligned to its last query and its last key. Rows of ``q`` before the first
    sequence or after the last one get results and gradients of 0, and minus infinity as ``lse``,
    with sinks too.

    No contents of ``cu_seqlens_q`` and ``cu_seqlens_k`` make a kernel read or write outside of the
    tensors: starts are clamped to the tensor's rows, and a sequence that ends before it starts is
    empty. Where starts decrease, the results of rows in several sequences, and of rows between
    them, are unspecified.

    float8_e4m3fn works as for :func:`tiercel.attention`, with bfloat16 results and without
    gradients.

    Differentiable in ``q``, ``k``, ``v`` and ``sinks``: for D and Dv that are multiples of 8 up to
    256 the backward has its own kernels, with the order of sums that :func:`tiercel.attention`
    describes; otherwise it stores all scores of a sequence, and waits for the GPU to learn its
    length. The kernels never wait: a CUDA graph may hold forward and backward, and replays for
    other sequences in the same tensors.

    Args:
        q: ``[Tq, H, D]``, bfloat16, float16 or float8_e4m3fn. The precompiled kernels take D up to
            256 that is a multiple of 8 (float8_e4m3fn: a multiple of 16 up to 128, no sinks and no
            softcap); ref takes others.
        k: ``[Tk, Hk, D]``, the dtype and device of ``q``; Hk divides H.
        v: ``[Tk, Hk, Dv]``, the dtype and device of ``k``. The kernels take the same values for Dv
            as for D; for float8_e4m3fn Dv must equal D.
        cu_seqlens_q: ``[B + 1]`` int32, any stride: where each sequence starts, then where the last
            one ends. It stays on the GPU and must not decrease.
        cu_seqlens_k: ``[B + 1]`` int32, the same for keys.
        max_seqlen_q: An upper bound of the number of queries of a sequence. Queries of a longer
            sequence beyond it may be treated as padding.
        max_seqlen_k: An upper bound of the number of keys of a sequence; 0 means that no sequence
            has any.
        causal: As for :func:`tiercel.attention`, and the following too.
        window: ``(left, right)``.
        scale: Factor of the scores.
        softcap: Scores s become ``softcap * tanh(s / softcap)``.
        sinks: ``[H]`` float32: an additional score of each head in the softmax's denominator.
        return_lse: Whether to return the logarithms of the rows' sums too.
        q_descale: For float8_e4m3fn only: float32, what ``q`` is multiplied by, one element or one
            a head of keys, ``[Hk]`` or ``[B, Hk]``; None is 1.
        k_descale: The same for ``k``.
        v_descale: The same for ``v``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[Tq, H, Dv]``, the dtype of ``q``, or bfloat16 for float8_e4m3fn; with ``return_lse`` a
        pair of it and of ``[H, Tq]``, float32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, device or option does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.
    """
    limits = check_options("attention_varlen", causal, window, scale, softcap)
    given = (
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(causal, limits, scale, softcap, q_descale, k_descale, v_descale, sinks, backend),
    )
    return _VARLEN(given, return_lse)  # type: ignore[no-any-return]
