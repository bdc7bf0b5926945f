# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention: operators behind its autograd formula."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C, backends
from tiercel._op import Backend, Op
from tiercel.core import platform
from tiercel.core.checks import (
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
)
from tiercel.core.platform import Reason
from tiercel.ops.attention.reference import attention as forward_reference
from tiercel.ops.attention.reference import attention_backward as reference

_NAME = "attention_backward"
_LARGEST_D = 128

# Below, `options` is (causal, window, scale, softcap), as attention's operators have them, and
# whether dq is summed in a fixed order.


def native_options(q: Tensor, *options: Any) -> tuple[int, int, float, float]:
    """(left, right, scale, softcap) as in kernels/attention/common/options.h."""
    causal, window, scale, softcap = options
    left, right = (-1, -1) if window is None else window
    if scale is None:
        scale = float(max(q.shape[-1], 1)) ** -0.5
    return left, 0 if causal else right, scale, softcap or 0.0


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _readable(tensor: Tensor) -> Tensor:
    """As the copy engine takes it: a gradient may be one number for all places."""
    *strides, last = tensor.stride()
    fits = last == 1 and all(step > 0 and step % 8 == 0 for step in strides)
    return tensor if fits and tensor.data_ptr() % 16 == 0 else tensor.contiguous()


def _split(has_lse_gradient: bool) -> Any:
    """(grad, q, k, v, out, lse, grad_lse or None), options, deterministic."""

    def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
        grad_lse = args[6] if has_lse_gradient else None
        rest = args[6 + has_lse_gradient : -1]
        return (*args[:6], grad_lse), rest[:4], rest[4]

    return split


def _check(tensors: tuple[Any, ...]) -> None:
    grad, q, k, v, out, lse, grad_lse = tensors
    for name, tensor, like in (("grad", grad, q), ("out", out, q), ("v", v, k)):
        check_dtype(_NAME, name, tensor.dtype, (q.dtype,))
        check_shape(_NAME, name, tensor, tuple(like.shape), "[B, S, H, D]")
        check_same_device(_NAME, name, tensor, "q", q)
    sums = (q.shape[0], q.shape[2], q.shape[1])
    for name, tensor in (("lse", lse), ("grad_lse", grad_lse)):
        if tensor is not None:
            check_dtype(_NAME, name, tensor.dtype, (torch.float32,))
            check_shape(_NAME, name, tensor, sums, "[B, H, Sq]")
            check_same_device(_NAME, name, tensor, "q", q)
    check_contiguous(_NAME, "lse", lse)


def _arguments(tensors: tuple[Any, ...], gradients: list[Tensor], workspace: Any) -> list[Any]:
    grad, *rest, grad_lse = tensors
    return [grad, *rest, grad_lse, *gradients, workspace]


def plan_of(tensors: tuple[Any, ...], options: tuple[Any, ...], deterministic: bool) -> Any:
    gradients = [_like(x) for x in tensors[1:4]]
    given = _arguments(tensors, gradients, None)
    return _C.attention_backward_plan(*given, *native_options(tensors[1], *options), deterministic)


def _sm90(
    tensors: tuple[Any, ...], options: tuple[Any, ...], deterministic: bool
) -> tuple[Tensor, ...]:
    _, q, k, v, *_ = tensors
    if 0 in q.shape or 0 in k.shape:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    gradients = [_like(x) for x in (q, k, v)]
    launch(tensors, gradients, options, deterministic)
    return tuple(gradients)


def launch(
    tensors: tuple[Any, ...],
    gradients: list[Tensor],
    options: tuple[Any, ...],
    deterministic: bool,
) -> None:
    """Fills the gradients of q, k and v, of which none is empty."""
    grad, q, k, v, out, lse, grad_lse = tensors
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    tensors = (_readable(grad), q, k, v, out, lse, grad_lse)
    native = native_options(q, *options)
    plan = _C.attention_backward_plan(*_arguments(tensors, gradients, None), *native, deterministic)
    workspace = torch.empty(plan["workspace"], dtype=torch.float32, device=q.device)
    _C.attention_backward(*_arguments(tensors, gradients, workspace), *native, deterministic)


def _why_not(
    tensors: tuple[Any, ...], options: tuple[Any, ...], deterministic: bool
) -> Reason | None:
    grad, q, k, *rest = tensors
    reason = platform.why_not(q.device)
    if reason is not None or 0 in q.shape or 0 in k.shape:
        return reason
    try:
        plan_of((_readable(grad), q, k, *rest), options, deterministic)
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


def _reference(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Tensor, ...]:
    causal, window, scale, softcap = options
    *given, grad_lse = tensors
    return reference(
        *given, causal=causal, window=window, scale=scale, softcap=softcap, grad_lse=grad_lse
    )


def _operator(lse: bool) -> Op:
    split = _split(lse)
    tensors = "Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
    return Op(
        f"{_NAME}_lse" if lse else _NAME,
        f"({tensors}{', Tensor grad_lse' if lse else ''}, bool causal=False, int[]? window=None, "
        "float? scale=None, float? softcap=None, bool deterministic=False, str? backend=None)"
        " -> (Tensor, Tensor, Tensor)",
        check=lambda *args: _check(split(args)[0]),
        fake=lambda grad, q, k, v, *_: (_like(q), _like(k), _like(v)),
        sm90=Backend(
            "sm90",
            lambda *args: _sm90(*split(args)),
            "TMA, wgmma, persistent blocks; dq added up by the copy engine",
            "cute",
            why_not=lambda *args: _why_not(*split(args)),
        ),
        ref=Backend(
            "ref",
            lambda *args: _reference(*split(args)[:2]),
            "all scores in memory, float32",
            "torch",
        ),
        family=_NAME,
        describe=lambda *args: dict(plan_of(*split(args))),
        load=None if lse else _C.attention_backward_load,
    )


_BACKWARD = _operator(False)
_BACKWARD_LSE = _operator(True)


def has_kernels(q: Tensor, backend: str | None, family: str = "attention") -> bool:
    """Whether the precompiled kernels are what computes this, where strides allow."""
    asked = backend or backends.requested(family)
    if asked not in (None, "auto", "sm90") or not 8 <= q.shape[-1] <= _LARGEST_D:
        return False
    return q.shape[-1] % 8 == 0 and platform.why_not(q.device) is None


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=causal, scale=scale, enable_gqa=bool(q.shape[2] != k.shape[2])
    )
    return out.transpose(1, 2)


def _from_torch(
    inputs: list[Tensor], grads: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """torch's: its flash kernels where they know the mask, else from all scores."""
    causal, window, scale, softcap = options
    q, k, _ = inputs
    wanted = [(grad, i) for i, grad in enumerate(grads) if grad is not None]
    known = window is None and softcap is None and (not causal or q.shape[1] == k.shape[1])
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        if known and grads[1:] in ((), (None,)) and 0 not in q.shape and 0 not in k.shape:
            results: Any = (_flash(*inputs, causal, scale),)
        else:
            named = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
            results = forward_reference(*inputs, **named, return_lse=True)
        outputs = [results[i] for _, i in wanted]
        return torch.autograd.grad(outputs, inputs, [g for g, _ in wanted], allow_unused=True)


def gradients(
    inputs: list[Tensor],
    outputs: tuple[Tensor, Tensor],
    grads: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    backend: str | None,
) -> tuple[Tensor | None, ...]:
    """Of q, k and v, from those of attention's result and, if it was returned, `lse`."""
    if not has_kernels(inputs[0], backend):
        return _from_torch(inputs, grads, options)
    grad, grad_lse = grads if len(grads) == 2 else (grads[0], None)
    if grad is None:
        grad = torch.zeros_like(outputs[0])
    rest = (*options, torch.are_deterministic_algorithms_enabled(), backend)
    if grad_lse is None:
        return _BACKWARD(grad, *inputs, *outputs, *rest)  # type: ignore[no-any-return]
    return _BACKWARD_LSE(grad, *inputs, *outputs, grad_lse, *rest)  # type: ignore[no-any-return]
