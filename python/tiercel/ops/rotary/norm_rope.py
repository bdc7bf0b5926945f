# SPDX-License-Identifier: Apache-2.0
"""Norms and rotary embedding of queries and keys in one launch, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index, between
from tiercel.core.op import Gradient, Native, Op, Python
from tiercel.core.spec import Call
from tiercel.ops.rotary import reference as ref
from tiercel.ops.rotary import spec

__all__ = ["qk_norm_rope"]

_METHOD = "torch, one step after the other"
_OPTIONS = ("positions", "cos_sin_cache", "q_weight", "k_weight", "eps", "interleaved")


def _indices(call: Call) -> list[Index]:
    return [between("positions", call.positions, 0, call.cos_sin_cache.shape[0] - 1)]


def _save(ctx: Any, call: Call, results: Any) -> None:
    ctx.eps, ctx.interleaved, ctx.backend = call.eps, call.interleaved, call.backend
    ctx.save_for_backward(
        *(call.q, call.k, call.positions, call.cos_sin_cache, call.q_weight, call.k_weight)
    )


def _gradients(ctx: Any, *grads: Tensor | None) -> dict[str, Tensor | None]:
    """A result without a gradient has no heads here: nothing is read or added for it."""
    *inputs, positions, angles, q_weight, k_weight = ctx.saved_tensors
    if grads[0] is None and grads[1] is None:
        return {}
    x = [
        each if grad is not None else each[:, :0] for each, grad in zip(inputs, grads, strict=True)
    ]
    given = [each if grad is None else grad for each, grad in zip(x, grads, strict=True)]
    wanted = {
        name: weight is not None and ctx.wants[name]
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight))
    }
    arguments = (*x, *given, positions, angles, q_weight, k_weight)
    if torch.is_grad_enabled():  # it will be differentiated itself
        options = {f"for_{name}": want for name, want in wanted.items()}
        found = ref.qk_norm_rope_backward(
            *arguments, eps=ctx.eps, interleaved=ctx.interleaved, **options
        )
    else:
        backend = ctx.backend if ctx.backend in ("sm90", "ref") else None
        found = _BACKWARD(*arguments, ctx.eps, ctx.interleaved, *wanted.values(), backend)
    heads = {n: None if g is None else t for n, g, t in zip("qk", grads, found[:2], strict=True)}
    weights = {n: t if wanted[n] else None for n, t in zip(wanted, found[2:], strict=True)}
    return {**heads, **weights}


def _readable(grad: Tensor) -> Tensor:
    """Heads as the kernels take them: a gradient may be one expanded number."""
    fits = grad.stride(2) == 1 and grad.data_ptr() % 16 == 0
    return grad if fits and all(n % 8 == 0 for n in grad.stride()[:2]) else grad.contiguous()


def _launch_arguments(call: Call, grads: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    return call.q, call.k, *grads, *(getattr(call, name) for name in _OPTIONS)


def _plan_backward(call: Call) -> dict[str, Any]:
    """Gradients of other layouts are copied: the inputs stand in for them."""
    given = _launch_arguments(call, (call.q, call.k))
    return dict(_C.qk_norm_rope_backward_plan(*given, call.q, call.k, None, None, None))


def _run_backward(call: Call) -> tuple[Tensor, ...]:
    given = _launch_arguments(call, (_readable(call.grad_q_out), _readable(call.grad_k_out)))
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k)]
    weights = _empty_weights(call)
    wanted = [t if want else None for t, want in zip(weights, _wanted(call), strict=True)]
    workspace = None
    if any(_wanted(call)):
        plan = _C.qk_norm_rope_backward_plan(*given, *grads, None, None, None)
        workspace = call.q.new_empty((plan["parts"], call.q.shape[2]), dtype=torch.float32)
    _C.qk_norm_rope_backward(*given, *grads, *wanted, workspace)
    return *grads, *weights


def _wanted(call: Call) -> tuple[bool, bool]:
    return (
        call.for_q_weight and call.q_weight is not None,
        call.for_k_weight and call.k_weight is not None,
    )


def _empty_weights(call: Call) -> list[Tensor]:
    weights = (call.q_weight, call.k_weight)
    return [
        (call.q if weight is None else weight).new_empty(call.q.shape[2] if want else 0)
        for weight, want in zip(weights, _wanted(call), strict=True)
    ]


_BACKWARD = Op(
    spec.QK_NORM_ROPE_BACKWARD,
    sm90=Python(
        _run_backward,
        _plan_backward,
        "a head in a few lanes' registers, sums of the weights in a fixed order",
        load=_C.qk_norm_rope_backward_load,
    ),
    reference=lambda call: ref.qk_norm_rope_backward(**call.__dict__),
    method=_METHOD,
    indices=_indices,
    out=False,
    fake=lambda call: (
        call.q.new_empty(call.q.shape),
        call.k.new_empty(call.k.shape),
        *_empty_weights(call),
    ),
)
_QK_NORM_ROPE = Op(
    spec.QK_NORM_ROPE,
    sm90=Native(
        _C.qk_norm_rope,
        _C.qk_norm_rope_plan,
        ("q", "k", *_OPTIONS, "q_out", "k_out"),
        "norms and rotation in one launch, a head in a few lanes' registers",
        load=_C.qk_norm_rope_cache_load,
    ),
    reference=lambda call: ref.qk_norm_rope(**spec.QK_NORM_ROPE.values(call)),
    method=_METHOD,
    gradient=Gradient(_save, _gradients),
    indices=_indices,
)


@_QK_NORM_ROPE.export
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Norms and rotates the heads of queries and keys, in one launch.

    Each head is divided by its root mean square and multiplied by a weight where there is one, as
    by :func:`tiercel.rms_norm`, and rotated as by :func:`tiercel.rotary_embedding`. Arithmetic is
    float32 from the first step to the last, and results are rounded once.

    Differentiable in ``q``, ``k`` and both weights, except with ``out``; the backward is one launch
    and, for the weights, a second one. Their gradients are added up in an order that depends on the
    shapes alone: equal calls give equal bits. Works under torch.compile and torch.export, and in
    CUDA graphs; it never synchronises.

    Args:
        q: ``[T, H, D]`` bfloat16 or float16. The precompiled kernels take D that is a multiple of 8
            up to 512, and any strides that are multiples of 16 bytes with a contiguous last
            dimension, such as slices of one projection.
        k: ``[T, Hk, D]``, the same; Hk may be 0.
        positions: ``[T]`` int32 or int64, contiguous: rows of ``cos_sin_cache``, clamped to its
            first and last row.
        cos_sin_cache: ``[P, R]``, contiguous: R/2 cosines, then R/2 sines. float32 or the dtype of
            ``q``; R is even and at most D, and P is 1 or more. The precompiled kernels take R that
            is a multiple of 16.
        q_weight: ``[D]``, contiguous, of the dtype of ``q`` or float32; None for no norm.
        k_weight: The same, for keys.
        eps: Added to the mean of the squares; not negative.
        interleaved: Whether pairs are elements 2i and 2i + 1 instead of i and i + R/2.
        out: ``(q_out, k_out)`` to write to, of the shapes, dtypes and device of ``q`` and ``k``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``(q, k)`` normed and rotated.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, ``eps`` is negative, or there is no such
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> q, k, v = qkv.view(tokens, 48, 128).split([32, 8, 8], dim=1)
        >>> q, k = tiercel.qk_norm_rope(
        ...     q, k, positions, cos_sin_cache, q_norm.weight, k_norm.weight
        ... )
    """
    arguments = (q, k, positions, cos_sin_cache, q_weight, k_weight, eps, interleaved, backend)
    if out is None:
        result: tuple[Tensor, Tensor] = _QK_NORM_ROPE.pick()(*arguments)
        return result
    return _QK_NORM_ROPE.into()(out, *arguments)  # type: ignore[no-any-return]
