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
    """``softmax(q @ k.T * scale, masked) @ v`` for each head, without scores in memory.

    Scores, softmax and sums are float32; probabilities are rounded to the dtype before they
    multiply ``v``, and the result is rounded once.

    Masks are aligned with the last query and the last key, as in FlashAttention: query i stands at
    key i + Sk - Sq. A query that sees no key gets 0, and minus infinity as its ``lse``, or its
    sink.

    float8_e4m3fn tensors are multiplied by ``q_descale``, ``k_descale`` and ``v_descale``, and the
    result is bfloat16. Their probabilities are rounded to float8_e4m3fn, at 256 times their size
    (an error of 2 to 3 % of a typical value, which averages out over keys); sums are float32. There
    are no gradients then.

    Differentiable in ``q``, ``k``, ``v`` and ``sinks``. The backward has kernels of its own for
    the head dimensions, masks and 16-bit dtypes that the forward's kernels take, and is torch's
    otherwise. Those kernels sum the gradients of ``k``,
    ``v`` and ``sinks`` in a fixed order; that of ``q`` only under
    ``torch.use_deterministic_algorithms(True)``, which makes blocks wait for each other. Works
    under torch.compile and torch.export, and in CUDA graphs; it never synchronises.

    The method is FlashAttention's (Dao et al. 2022, Shah et al. 2024): an online softmax over
    blocks of keys.

    Args:
        q: ``[B, Sq, H, D]``, bfloat16, float16 or float8_e4m3fn. The precompiled kernels take D
            that is a multiple of 8 up to 256 (float8_e4m3fn: of 16 up to 128), and any strides that
            are multiples of 16 bytes with the last dimension contiguous; ref takes others.
        k: ``[B, Sk, Hk, D]``, the dtype and device of ``q``. Hk divides H: query head h reads head
            h // (H // Hk).
        v: ``[B, Sk, Hk, Dv]``, the dtype and device of ``k``. The kernels take Dv like D; of
            float8_e4m3fn it must be D.
        causal: Whether a query sees no key after its own.
        window: ``(left, right)``: how many keys before and after its own a query sees; None or -1
            is no limit.
        scale: What scores are multiplied by, positive; ``D ** -0.5`` by default.
        softcap: Scores s become ``softcap * tanh(s / softcap)``.
        sinks: ``[H]`` float32: for each head one more score in the softmax's sum, which no value
            belongs to, neither scaled nor capped; minus infinity is none. For 16 bits; ref takes
            them with float8_e4m3fn too.
        return_lse: Whether to return the natural logarithms of the rows' sums of exponentials too,
            those of the sinks included.
        q_descale: For float8_e4m3fn only: float32, what ``q`` is multiplied by, one element or one
            a head of keys, ``[Hk]`` or ``[B, Hk]``, which its heads of queries share. Positive;
            None is 1.
        k_descale: The same for ``k``.
        v_descale: The same for ``v``.
        out: ``[B, Sq, H, Dv]`` to write to, of the result's dtype and on the device of ``q``. Then
            no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[B, Sq, H, Dv]``, the dtype of ``q``, or bfloat16 for float8_e4m3fn; with ``return_lse`` a
        pair of it and of ``[B, H, Sq]``, float32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
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
