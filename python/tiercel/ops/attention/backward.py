# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core import platform, selection
from tiercel.core.op import Native, Op
from tiercel.core.spec import Call, Spec
from tiercel.ops.attention import reference as ref
from tiercel.ops.attention import spec
from tiercel.ops.attention.options import native_options

_HEAD_DIMENSIONS = range(8, 257, 8)  # of q and of v


def _readable(tensor: Tensor) -> Tensor:
    """Makes strides that the copy engine takes: a gradient may be one expanded number."""
    *strides, last = tensor.stride()
    fits = last == 1 and all(step > 0 and step % 8 == 0 for step in strides)
    return tensor if fits and tensor.data_ptr() % 16 == 0 else tensor.contiguous()


@dataclass(frozen=True)
class Launch:
    """The kernels of attention's or attention_varlen's gradients.

    The operator's arguments and results, `values` below, are (grad, q, k, v), `starts` tensors,
    (out, lse, grad_lse), four options, whether dq is summed in a fixed order, and (dq, dk, dv).
    """

    function: Callable[..., Any]
    plan_of: Callable[..., Any]
    starts: int = 0

    def _native(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The native arguments before and after the workspace."""
        n = self.starts
        grad, q, k, v, *starts = values[: 4 + n]
        out, *sums = values[4 + n : 7 + n]
        sums = [None if x is None else x.contiguous() for x in sums]
        tensors = (_readable(grad), q, k, v, *starts, out, *sums, *values[12 + n :])
        return tensors, (*native_options(q, *values[7 + n : 11 + n]), values[11 + n])

    def plan(self, *values: Any) -> dict[str, Any]:
        if 0 in values[1].shape or 0 in values[2].shape:
            return {}
        tensors, options = self._native(values)
        return dict(self.plan_of(*tensors, None, *options))

    def __call__(self, *values: Any) -> None:
        q, k = values[1:3]
        if 0 in q.shape or 0 in k.shape:
            for gradient in values[-3:]:
                gradient.zero_()
            return
        tensors, options = self._native(values)
        size = self.plan_of(*tensors, None, *options)["workspace"]
        workspace = torch.empty(size, dtype=torch.float32, device=q.device)
        self.function(*tensors, workspace, *options)


def by_reference(declared: Spec, reference: Callable[..., Any]) -> Callable[[Call], Any]:
    """The reference sums in a fixed order anyway."""
    names = [name for name in declared.names if name != "deterministic"]
    return lambda call: reference(**{name: getattr(call, name) for name in names})


_LAUNCH = Launch(_C.attention_backward, _C.attention_backward_plan)

BACKWARD = Op(
    spec.ATTENTION_BACKWARD,
    sm90=Native(
        _LAUNCH,
        _LAUNCH.plan,
        (*spec.ATTENTION_BACKWARD.names, *spec.ATTENTION_BACKWARD.result_names),
        "TMA, wgmma, persistent blocks; dq added up by the copy engine",
        language="cute",
        load=_C.attention_backward_load,
    ),
    reference=by_reference(spec.ATTENTION_BACKWARD, ref.attention_backward),
    method="all scores in memory, float32",
    out=False,
)


def has_kernels(op: str, q: Tensor, v: Tensor, backend: str | None) -> bool:
    """Returns True if the precompiled kernels compute this, strides permitting."""
    asked = backend or selection.requested(op)
    if asked not in (None, "auto", "sm90"):
        return False
    fits = all(x.shape[-1] in _HEAD_DIMENSIONS for x in (q, v))
    return fits and platform.why_not(q.device) is None


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=causal, scale=scale, enable_gqa=bool(q.shape[2] != k.shape[2])
    )
    return out.transpose(1, 2)


def from_torch(
    inputs: tuple[Tensor, ...],
    sinks: Tensor | None,
    grads: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
) -> tuple[Tensor | None, ...]:
    """torch's: its flash kernels where they know the mask, else from all scores."""
    causal, window, scale, softcap = options
    q, k, _ = inputs
    wanted = [(grad, i) for i, grad in enumerate(grads) if grad is not None]
    known = window is softcap is sinks is None and (not causal or q.shape[1] == k.shape[1])
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (*inputs, sinks) if x is not None]
        if known and grads[1:] in ((), (None,)) and 0 not in q.shape and 0 not in k.shape:
            results: Any = (_flash(*leaves, causal, scale),)
        else:
            named = dict(zip(spec.OPTIONS, options, strict=True))
            if sinks is not None:
                named["sinks"] = leaves[3]
            results = ref.attention(*leaves[:3], **named, return_lse=True)
        outputs = [results[i] for _, i in wanted]
        return torch.autograd.grad(outputs, leaves, [g for g, _ in wanted], allow_unused=True)
