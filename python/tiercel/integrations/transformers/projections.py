# SPDX-License-Identifier: Apache-2.0
"""Linear layers of the same input in training, such as q, k and v of attention: the products add up
its gradient.

PyTorch adds three tensors of the input's size in two more passes. Here each layer passes the input
on to the next layer that is called with it, and so receives that layer's gradient, to which its
product adds its own.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

# With fewer rows a pass takes less time than the host does for this.
_LEAST_ROWS = 4096
_DTYPES = (torch.bfloat16, torch.float16)
# Beside the tensors, not as their attributes, which torch.save would write.
# An input has a weak reference to what the next layer takes instead, and its own version.
_next: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# A result keeps that alive as long as it lives itself.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def trained_linear(weight: Any, bias: Any, x: Tensor) -> Tensor | None:
    """`nn.functional.linear` by `_Linear`, or None where that does not pay or does not apply."""
    if torch.compiler.is_compiling():
        return None
    if type(x) is not Tensor or x.dtype not in _DTYPES or x.grad_fn is None:
        return None
    if math.prod(x.shape[:-1]) < _LEAST_ROWS:
        return None
    for tensor in (weight, bias):
        if tensor is not None and (type(tensor) is not nn.Parameter or tensor.dtype != x.dtype):
            return None
    if torch.is_autocast_enabled(x.device.type) or torch._C._are_functorch_transforms_active():
        return None
    if forward_ad._current_level >= 0:  # inside a dual level
        return None
    handed = _handed(x)
    if handed is None and not weight.requires_grad:
        return None  # PyTorch does not keep the input for it
    result, rest = _Linear.apply(x if handed is None else handed, weight, bias)
    # No entry holds what it is an entry of, so that no graph holds itself.
    _next[x] = weakref.ref(rest), x._version
    _kept[result] = rest
    return result  # type: ignore[no-any-return]


def _handed(x: Tensor) -> Tensor | None:
    """The tensor that the last layer with this input passed on; None if x was modified since."""
    found = _next.get(x)
    if found is None or found[1] != x._version:
        return None
    return found[0]()  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """x, weight and bias or None: the layer's result, and x for the next layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return nn.functional.linear(x, weight, bias), x.view_as(x)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, of_others: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if grad is None:
            return of_others, None, None
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        shape = (*grad.shape[:-1], weight.shape[1])
        grad = grad.reshape(-1, grad.shape[-1])
        of_x = of_weight = None
        if wants_x and of_others is None:
            of_x = (grad @ weight).view(shape)
        elif wants_x:
            rows = of_others.reshape(-1, shape[-1])  # type: ignore[union-attr]
            # Nobody else has it: it is from the next layer's backward alone.
            add = rows.addmm if torch.is_grad_enabled() else rows.addmm_
            of_x = add(grad, weight).view(shape)
        if wants_weight:
            of_weight = grad.t() @ x.reshape(-1, x.shape[-1])
        return of_x, of_weight, grad.sum(0) if wants_bias else None
