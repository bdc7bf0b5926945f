# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention's and attention_varlen's sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Native, Op
from tiercel.core.spec import Call
from tiercel.ops.attention import reference as ref
from tiercel.ops.attention import spec
from tiercel.ops.attention.backward import _readable


def _native(values: tuple[Any, ...]) -> tuple[Any, ...]:
    grad, out, lse, grad_lse, sinks, dsinks = values
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    return _readable(grad), _readable(out), lse.contiguous(), grad_lse, sinks, dsinks


def _plan(*values: Any) -> dict[str, Any]:
    if 0 in values[0].shape:
        return {}
    return dict(_C.attention_sinks_backward_plan(*_native(values), None))


def _launch(*values: Any) -> None:
    if 0 in values[0].shape:
        values[5].zero_()
        return
    tensors = _native(values)
    size = _C.attention_sinks_backward_plan(*tensors, None)["workspace"]
    workspace = torch.empty(size, dtype=torch.float32, device=tensors[0].device)
    _C.attention_sinks_backward(*tensors, workspace)


def _reference(call: Call) -> Tensor:
    delta = (call.grad.float() * call.out.float()).sum(-1).transpose(1, 2)
    if call.grad_lse is not None:
        delta = delta - call.grad_lse
    return ref.sinks_backward(delta, call.lse, call.sinks)


SINKS_BACKWARD = Op(
    spec.ATTENTION_SINKS_BACKWARD,
    sm90=Native(
        _launch,
        _plan,
        (*spec.ATTENTION_SINKS_BACKWARD.names, "dsinks"),
        "results and their gradients read once, sums in a fixed order",
        load=_C.attention_sinks_load,
    ),
    reference=_reference,
    method="torch, step by step in float32",
    out=False,
)


def gradient(
    grads: tuple[Tensor | None, ...],
    results: tuple[Tensor, Tensor],
    sinks: Tensor,
    backend: str | None,
) -> Tensor:
    """By the operator, of both ops: packed sequences are a batch of one, whose rows in no sequence
    have no logarithm."""
    out, lse = results
    grad, grad_lse = grads if len(grads) == 2 else (grads[0], None)
    given = (torch.zeros_like(out) if grad is None else grad, out, lse, grad_lse)
    if out.dim() == 3:
        given = tuple(x if x is None else x[None] for x in given)  # type: ignore[assignment]
    found: Tensor = SINKS_BACKWARD(*given, sinks, backend)
    return found
