# SPDX-License-Identifier: Apache-2.0
"""Attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiercel import _C
from tiercel.ops.attention import reference as ref
from tiercel.ops.attention import spec
from tiercel.ops.attention.backward import BACKWARD, from_torch
from tiercel.ops.attention.forward import Forward, Kernels
from tiercel.ops.attention.options import Window, check_options

__all__ = ["attention"]


def _kernel(function: Any) -> Any:
    return lambda inputs, _, outputs, options: function(*inputs, *outputs, *options)


def _fp8_kernel(function: Any) -> Any:
    return lambda inputs, _, outputs, more, options: function(*inputs, *outputs, *more, *options)


_ATTENTION = Forward(
    (spec.ATTENTION, spec.ATTENTION_LSE),
    Kernels(
        run=_kernel(_C.attention),
        plan=_kernel(_C.attention_plan),
        run_fp8=_fp8_kernel(_C.attention_fp8),
        plan_fp8=_fp8_kernel(_C.attention_fp8_plan),
        description="TMA, wgmma, persistent blocks; softmax overlaps products",
    ),
    ref.attention,
    "all scores in memory, float32",
    BACKWARD,
    from_torch,
)


@_ATTENTION.plain.export
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(q @ k.T * scale, masked) @ v`` for each head, without storing the scores.

    Scores, softmax and sums are float32; probabilities are rounded to the dtype before they
    multiply ``v``, and the result is rounded once.

    Masks are aligned to the last query and the last key, as in FlashAttention: query i is at key
    position i + Sk - Sq. A query that sees no key gets 0, and as ``lse`` minus infinity, or its
    head's sink.

    float8_e4m3fn tensors are scaled by ``q_descale``, ``k_descale`` and ``v_descale``, and the
    result is bfloat16. Probabilities are then rounded to float8_e4m3fn, scaled by 256 (an error of
    2 to 3 % of a typical value, which averages out over keys); sums are float32. There are no
    gradients.

    Differentiable in ``q``, ``k``, ``v`` and ``sinks``. The backward has its own kernels for the
    head dimensions, masks and 16-bit dtypes of the forward kernels, and uses PyTorch elsewhere. The
    kernels sum the gradients of ``k``, ``v`` and ``sinks`` in a fixed order, and that of ``q`` only
    under ``torch.use_deterministic_algorithms(True)``, where blocks wait for each other. Works
    under torch.compile and torch.export, and in CUDA graphs; it never synchronises.

    The method is FlashAttention's (Dao et al. 2022, Shah et al. 2024): an online softmax over
    blocks of keys.

    Args:
        q: ``[B, Sq, H, D]``, bfloat16, float16 or float8_e4m3fn. The precompiled kernels take D
            that is a multiple of 8 up to 256 (float8_e4m3fn: of 16 up to 128) and strides that are
            multiples of 16 bytes, with the last dimension contiguous; ref takes all others.
        k: ``[B, Sk, Hk, D]``, the dtype and device of ``q``. Hk divides H: query head h reads head
            h // (H // Hk).
        v: ``[B, Sk, Hk, Dv]``, the dtype and device of ``k``. The kernels take the same values for
            Dv as for D; for float8_e4m3fn Dv must equal D.
        causal: Whether to mask the keys after a query's own.
        window: ``(left, right)``: how many keys before and after its own a query sees; None or -1
            is no limit.
        scale: Factor of the scores, positive; ``D ** -0.5`` by default.
        softcap: Scores s become ``softcap * tanh(s / softcap)``.
        sinks: ``[H]`` float32: for each head an additional score in the softmax's denominator,
            without a value, neither scaled nor capped; minus infinity means no sink. The kernels
            take sinks with 16-bit dtypes, ref also with float8_e4m3fn.
        return_lse: Whether to return each row's log-sum-exp (natural logarithm) too; it includes
            the sinks.
        q_descale: For float8_e4m3fn only: factor of ``q``, float32, positive; one element, or one
            per key head, ``[Hk]`` or ``[B, Hk]``, for the query heads that read it. None is 1.
        k_descale: The same for ``k``.
        v_descale: The same for ``v``.
        out: ``[B, Sq, H, Dv]`` to write to, of the result's dtype and on the device of ``q``. Then
            no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[B, Sq, H, Dv]``, the dtype of ``q``, or bfloat16 for float8_e4m3fn; with ``return_lse`` a
        pair of it and of ``[B, H, Sq]``, float32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, device or option does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> out = tiercel.attention(q, k, v, causal=True)
    """
    limits = check_options("attention", causal, window, scale, softcap)
    given = (
        *(q, k, v, causal, limits, scale, softcap),
        *(q_descale, k_descale, v_descale, sinks, backend),
    )
    return _ATTENTION(given, return_lse, out)  # type: ignore[no-any-return]
