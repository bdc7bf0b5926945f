# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences of several lengths, behind each other in one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Autograd, Backend, Op
from tiercel.core import platform
from tiercel.core.eager import DISPATCH, route
from tiercel.core.platform import Reason
from tiercel.ops.attention.backward import has_kernels, native_options
from tiercel.ops.attention.checks import FLOAT8, OPTIONS, check_options, check_packed, no_tiles
from tiercel.ops.attention.fp8 import refuse_descales
from tiercel.ops.attention.indices import packed_indices
from tiercel.ops.attention.reference import attention_varlen as reference
from tiercel.ops.attention.varlen_backward import BACKWARD, BACKWARD_LSE
from tiercel.ops.attention.varlen_fp8 import attention_varlen_fp8

__all__ = ["attention_varlen"]

_NAME = "attention_varlen"


def _empty_out(q: Tensor) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _empty_lse(q: Tensor) -> Tensor:
    return torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)


def _native(out: Tensor, lse: Tensor | None, *args: Any) -> tuple[Any, ...]:
    """The binding's arguments, of the operator's without `backend`."""
    return (*args[:5], out, lse, *args[5:7], *native_options(args[0], *args[7:]))


def _launch(out: Tensor, lse: Tensor | None, *args: Any) -> None:
    if no_tiles(*args):
        check_packed(*args)
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        return
    _C.attention_varlen(*_native(out, lse, *args))


def _sm90(*args: Any) -> Tensor:
    out: Tensor = args[0].new_empty(args[0].shape)
    _launch(out, None, *args[:-1])
    return out


def _sm90_lse(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = args[0].new_empty(args[0].shape), _empty_lse(args[0])
    _launch(out, lse, *args[:-1])
    return out, lse


def _plan(*args: Any) -> dict[str, Any]:
    return dict(_C.attention_varlen_plan(*_native(_empty_out(args[0]), None, *args[:-1])))


def _why_not(*args: Any) -> Reason | None:
    reason = platform.why_not(args[0].device)
    if reason is not None or no_tiles(*args):
        return reason
    try:
        _plan(*args)
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


def _reference(return_lse: bool, *args: Any) -> Any:
    names = ("causal", "window", "scale", "softcap")
    named = dict(zip(names, args[7:11], strict=True))
    return reference(*args[:7], **named, return_lse=return_lse)


def _save(ctx: Any, args: tuple[Any, ...], outputs: Any) -> None:
    ctx.rest, ctx.backend = args[5:11], args[11]
    kept = outputs if isinstance(outputs, tuple) else ()
    ctx.save_for_backward(*args[:5], *kept)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if all(grad is None for grad in grads):
        return None, None, None, None, None
    saved = ctx.saved_tensors  # once: checkpoints hand them out a single time
    inputs, outputs = saved[:5], saved[5:]
    if has_kernels(inputs[0], ctx.backend, _NAME):
        if not outputs:
            outputs = _VARLEN_LSE(*(x.detach() for x in inputs), *ctx.rest, ctx.backend)
        grad, grad_lse = grads if len(grads) == 2 else (grads[0], None)
        if grad is None:
            grad = torch.zeros_like(outputs[0])
        deterministic = torch.are_deterministic_algorithms_enabled()
        rest = (*ctx.rest[2:], deterministic, ctx.backend)
        if grad_lse is None:
            found = BACKWARD(grad, *inputs, *outputs, *rest)
        else:
            found = BACKWARD_LSE(grad, *inputs, *outputs, grad_lse, *rest)
    else:
        found = _from_scores(inputs, grads, ctx.rest)
    wants = ctx.needs_input_grad[1:4]  # after the flag that says how to run
    grads_of = tuple(g if want else None for g, want in zip(found, wants, strict=True))
    return (*grads_of, None, None)


def _traced(
    inputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], rest: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """By operators: a graph cannot hold a loop over sequences, whose starts it does not know."""
    out, lse = _VARLEN_LSE(*(x.detach() for x in inputs), *rest, "ref")
    grad = torch.zeros_like(out) if grads[0] is None else grads[0]
    options = (*rest[2:], False, "ref")
    found: tuple[Tensor, ...]
    if len(grads) == 1 or grads[1] is None:
        found = BACKWARD(grad, *inputs, out, lse, *options)
    else:
        found = BACKWARD_LSE(grad, *inputs, out, lse, grads[1], *options)
    return found


def _from_scores(
    inputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], rest: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """From all scores of a sequence at a time."""
    if route(*inputs) == DISPATCH:
        return _traced(inputs, grads, rest)
    wanted = [(grad, i) for i, grad in enumerate(grads) if grad is not None]
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    with torch.enable_grad():
        results = _reference(True, *leaves, *inputs[3:], *rest)
        outputs = [results[i] for _, i in wanted]
        if not outputs[0].requires_grad:  # no sequence has a row
            return tuple(torch.zeros_like(x) for x in inputs[:3])
        return torch.autograd.grad(outputs, leaves, [g for g, _ in wanted], materialize_grads=True)


_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {OPTIONS}) -> "
)
_CUTE = ("as attention's; tensor maps that end where a sequence does", "cute")
_TORCH = ("one sequence after the other, all scores of it in memory, float32", "torch")


def _operator(lse: bool) -> Op:
    return Op(
        f"{_NAME}_lse" if lse else _NAME,
        _SCHEMA + ("(Tensor, Tensor)" if lse else "Tensor"),
        check=check_packed,
        fake=(lambda q, *_: (_empty_out(q), _empty_lse(q))) if lse else lambda q, *_: _empty_out(q),
        sm90=Backend("sm90", _sm90_lse if lse else _sm90, *_CUTE, why_not=_why_not),
        ref=Backend("ref", lambda *args: _reference(lse, *args), *_TORCH),
        autograd=Autograd(_save, _backward),
        family=_NAME,
        describe=_plan,
        load=None if lse else _C.attention_load,
        indices=packed_indices,
    )


_VARLEN = _operator(False)
_VARLEN_LSE = _operator(True)


@_VARLEN.export
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
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`tiercel.attention` of sequences of several lengths, without padding between them.

    Sequence i has the queries ``q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]``, and keys and values
    likewise; masks are aligned with its last query and its last key. Rows of ``q`` in no sequence,
    before the first one or after the last, are like queries that see no key: their results and
    gradients are 0, and minus infinity as logarithms.

    No contents of ``cu_seqlens_q`` and ``cu_seqlens_k`` make a kernel read or write outside of the
    tensors: starts below 0 count as 0 and those beyond the last row as its end, and a sequence that
    ends before it starts is empty. Where starts decrease, which results the rows of several
    sequences get is not specified, nor what those between hold.

    float8_e4m3fn tensors are as for :func:`tiercel.attention`, with bfloat16 results and without
    gradients.

    Differentiable in ``q``, ``k`` and ``v``: the backward launches :func:`tiercel.attention`'s
    kernels for one sequence after the other, for which it waits for the GPU, and above D = 128 has
    all scores of a sequence in memory. The forward never synchronises.

    Args:
        q: ``[Tq, H, D]``, bfloat16, float16 or float8_e4m3fn. The precompiled kernels take D up to
            128 that is a multiple of 8 (float8_e4m3fn: of 16), and no softcap; ref takes others.
        k: ``[Tk, Hk, D]``, the dtype and device of ``q``; Hk divides H.
        v: The shape, dtype and device of ``k``.
        cu_seqlens_q: ``[B + 1]`` int32, any stride: where sequences start, and at last where the
            last one ends. It stays on the GPU and must not decrease.
        cu_seqlens_k: ``[B + 1]`` int32, the same for keys.
        max_seqlen_q: The largest number of queries of a sequence, or more. The queries that a
            longer sequence has beyond it may be left out, like rows in no sequence.
        max_seqlen_k: The largest number of keys of a sequence, or more; 0 means that there are
            none.
        causal: As for :func:`tiercel.attention`, and the following too.
        window: ``(left, right)``.
        scale: What scores are multiplied by.
        softcap: Scores s become ``softcap * tanh(s / softcap)``.
        return_lse: Whether to return the logarithms of the rows' sums too.
        q_descale: For float8_e4m3fn only: float32, what ``q`` is multiplied by, one element or one
            a head of keys, ``[Hk]`` or ``[B, Hk]``; None is 1.
        k_descale: The same for ``k``.
        v_descale: The same for ``v``.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[Tq, H, D]``, the dtype of ``q``, or bfloat16 for float8_e4m3fn; with ``return_lse`` a
        pair of it and of ``[H, Tq]``, float32.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, device or option does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.
    """
    limits = check_options(causal, window, scale, softcap, op=_NAME)
    starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    descales = (q_descale, k_descale, v_descale)
    if getattr(q, "dtype", None) == FLOAT8:
        options = (causal, limits, scale, softcap, backend)
        found: Tensor = attention_varlen_fp8((q, k, v, *starts), descales, options, return_lse)
        return found
    refuse_descales(q, descales, _NAME)
    given = (q, k, v, *starts, causal, limits, scale, softcap, backend)
    # The backward needs the logarithms: kept from the forward, they cost nothing.
    kept = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v))
    if return_lse or kept:
        out, lse = _VARLEN_LSE(*given)
        return (out, lse) if return_lse else out
    result: Tensor = _VARLEN(*given)
    return result
