# SPDX-License-Identifier: Apache-2.0
"""Attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Autograd, Backend, Op
from tiercel.core import platform
from tiercel.core.platform import Reason
from tiercel.ops.attention.backward import gradients, native_options
from tiercel.ops.attention.checks import (
    DTYPES,
    FLOAT8,
    OPTIONS,
    Window,
    check_options,
    check_out,
    check_tensors,
    empty_lse,
    empty_out,
)
from tiercel.ops.attention.fp8 import attention_fp8, refuse_descales
from tiercel.ops.attention.reference import attention as reference

__all__ = ["attention"]

_NAME = "attention"

# Below, `options` is (causal, window, scale, softcap) as in the operators' schemas: a window is
# None or two numbers, of which a negative one is no limit.


def _launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *options: Any
) -> None:
    if k.shape[1] == 0:
        check_out(DTYPES, q, k, v, out, lse)
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        return
    _C.attention(q, k, v, out, lse, *native_options(q, *options))


def _sm90(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    out = q.new_empty(q.shape)
    _launch(q, k, v, out, None, *rest[:-1])
    return out


def _sm90_lse(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse = q.new_empty(q.shape), empty_lse(q)
    _launch(q, k, v, out, lse, *rest[:-1])
    return out, lse


def _reference(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, *options: Any) -> Any:
    names = ("causal", "window", "scale", "softcap")
    named = dict(zip(names, options, strict=True))
    return reference(q, k, v, **named, return_lse=return_lse)


def _plan(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> dict[str, Any]:
    return dict(_C.attention_plan(q, k, v, empty_out(q), None, *native_options(q, *options)))


def _why_not(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Reason | None:
    reason = platform.why_not(q.device)
    if reason is not None or k.shape[1] == 0:
        return reason
    try:
        # One query shows the strides.
        _plan(q[:, :1], k, v, *options)
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


def _save(ctx: Any, args: tuple[Any, ...], outputs: Any) -> None:
    ctx.options, ctx.backend = args[3:7], args[7]
    kept = outputs if isinstance(outputs, tuple) else ()
    ctx.save_for_backward(*args[:3], *kept)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if all(grad is None for grad in grads):
        return None, None, None
    saved = ctx.saved_tensors  # once: checkpoints hand them out a single time
    inputs, outputs = list(saved[:3]), saved[3:]
    if not outputs:
        outputs = _ATTENTION_LSE(*(x.detach() for x in inputs), *ctx.options, ctx.backend)
    found = gradients(inputs, outputs, grads, ctx.options, ctx.backend)
    wants = ctx.needs_input_grad[1:]  # after the flag that says how to run
    return tuple(grad if want else None for grad, want in zip(found, wants[:3], strict=True))


_CUTE = ("TMA, wgmma, persistent blocks; softmax overlaps products", "cute")
_TORCH = ("all scores in memory, float32", "torch")


def _operator(lse: bool) -> Op:
    return Op(
        f"{_NAME}_lse" if lse else _NAME,
        f"(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> {'(Tensor, Tensor)' if lse else 'Tensor'}",
        check=lambda *args: check_tensors(DTYPES, *args[:3]),
        fake=(lambda q, *_: (empty_out(q), empty_lse(q))) if lse else lambda q, *_: empty_out(q),
        sm90=Backend(
            "sm90",
            _sm90_lse if lse else _sm90,
            *_CUTE,
            why_not=lambda *args: _why_not(*args[:-1]),
        ),
        ref=Backend(
            "ref", lambda *args: _contiguous(_reference(*args[:3], lse, *args[3:-1])), *_TORCH
        ),
        autograd=Autograd(_save, _backward),
        family=_NAME,
        describe=lambda *args: _plan(*args[:-1]),
        load=None if lse else _C.attention_load,
    )


def _contiguous(results: Any) -> Any:
    if isinstance(results, Tensor):
        return results.contiguous()
    return tuple(result.contiguous() for result in results)


def _out_operator(lse: bool) -> Op:
    def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """(q, k, v), (out, lse), options."""
        options = args[5 if lse else 4 : -1]
        return args[:3], (args[3], args[4] if lse else None), options

    def check(*args: Any) -> None:
        inputs, outputs, _ = split(args)
        check_out(DTYPES, *inputs, *outputs)

    def run(*args: Any) -> None:
        inputs, outputs, options = split(args)
        _launch(*inputs, *outputs, *options)

    def run_reference(*args: Any) -> None:
        inputs, (out, sums), options = split(args)
        results = _reference(*inputs, True, *options)
        out.copy_(results[0])
        if sums is not None:
            sums.copy_(results[1])

    def why_not(*args: Any) -> Reason | None:
        inputs, _, options = split(args)
        return _why_not(*inputs, *options)

    return Op(
        f"{_NAME}_lse_out" if lse else f"{_NAME}_out",
        f"(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {'Tensor(b!) lse, ' if lse else ''}"
        f"{OPTIONS}) -> ()",
        check=check,
        fake=lambda *args: None,
        sm90=Backend("sm90", run, *_CUTE, why_not=why_not),
        ref=Backend("ref", run_reference, *_TORCH),
        family=_NAME,
    )


_ATTENTION = _operator(False)
_ATTENTION_LSE = _operator(True)
_ATTENTION_OUT = _out_operator(False)
_ATTENTION_LSE_OUT = _out_operator(True)


@_ATTENTION.export
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
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
    key i + Sk - Sq. A query that sees no key gets 0, and minus infinity as its ``lse``.

    float8_e4m3fn tensors are multiplied by ``q_descale``, ``k_descale`` and ``v_descale``, and the
    result is bfloat16. Their probabilities are rounded to float8_e4m3fn, at 256 times their size
    (an error of 2 to 3 % of a typical value, which averages out over keys); sums are float32. There
    are no gradients then.

    Differentiable in ``q``, ``k`` and ``v``. The backward has kernels of its own up to D = 128,
    and is torch's above. Those sum the gradients of ``k`` and ``v`` in a fixed order; that of ``q``
    only under ``torch.use_deterministic_algorithms(True)``, which makes blocks wait for each other.
    Works under torch.compile and torch.export, and in CUDA graphs; it never synchronises.

    The method is FlashAttention's (Dao et al. 2022, Shah et al. 2024): an online softmax over
    blocks of keys.

    Args:
        q: ``[B, Sq, H, D]``, bfloat16, float16 or float8_e4m3fn. The precompiled kernels take D
            that is a multiple of 8 up to 256 (float8_e4m3fn: of 16 up to 128), and any strides that
            are multiples of 16 bytes with the last dimension contiguous; ref takes others.
        k: ``[B, Sk, Hk, D]``, the dtype and device of ``q``. Hk divides H: query head h reads head
            h // (H // Hk).
        v: The shape, dtype and device of ``k``.
        causal: Whether a query sees no key after its own.
        window: ``(left, right)``: how many keys before and after its own a query sees; None or -1
            is no limit.
        scale: What scores are multiplied by, positive; ``D ** -0.5`` by default.
        softcap: Scores s become ``softcap * tanh(s / softcap)``.
        return_lse: Whether to return the natural logarithms of the rows' sums of exponentials too.
        q_descale: For float8_e4m3fn only: float32, what ``q`` is multiplied by, one element or one
            a head of keys, ``[Hk]`` or ``[B, Hk]``, which its heads of queries share. Positive;
            None is 1.
        k_descale: The same for ``k``.
        v_descale: The same for ``v``.
        out: ``[B, Sq, H, D]`` to write to, of the result's dtype and on the device of ``q``. Then
            no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[B, Sq, H, D]``, the dtype of ``q``, or bfloat16 for float8_e4m3fn; with ``return_lse`` a
        pair of it and of ``[B, H, Sq]``, float32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, device or option does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> out = tiercel.attention(q, k, v, causal=True)
    """
    limits = check_options(causal, window, scale, softcap)
    options = (causal, limits, scale, softcap, backend)
    descales = (q_descale, k_descale, v_descale)
    if getattr(q, "dtype", None) == FLOAT8:
        return attention_fp8((q, k, v), descales, options, return_lse, out)  # type: ignore[no-any-return]
    refuse_descales(q, descales)
    if out is None:
        # The backward needs the logarithms: kept from the forward, they cost nothing.
        kept = torch.is_grad_enabled() and any(
            getattr(x, "requires_grad", False) for x in (q, k, v)
        )
        if return_lse or kept:
            result, lse = _ATTENTION_LSE(q, k, v, *options)
            return (result, lse) if return_lse else result
        result = _ATTENTION(q, k, v, *options)
        return result  # type: ignore[no-any-return]
    if not return_lse:
        _ATTENTION_OUT(q, k, v, out, *options)
        return out
    lse = empty_lse(q)
    _ATTENTION_LSE_OUT(q, k, v, out, lse, *options)
    return out, lse
