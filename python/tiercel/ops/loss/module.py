# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel.ops.loss.linear import linear_cross_entropy
from tiercel.ops.loss.op import cross_entropy


class CrossEntropyLoss(torch.nn.Module):
    """:func:`tiercel.cross_entropy` as a module, with the arguments of
    :class:`torch.nn.CrossEntropyLoss`. ``weight`` is a buffer, as there.

    Shape:
        - Input: ``(T, V)``, and the targets ``(T)``.
        - Output: a scalar, or ``(T)`` with ``reduction="none"``.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        inplace: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.inplace = inplace
        self.backend = backend

    def forward(self, logits: Tensor, target: Tensor, scale: Tensor | None = None) -> Tensor:
        return cross_entropy(
            logits,
            target,
            self.weight,
            scale=scale,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            inplace=self.inplace,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return _options(self, **_USUAL, inplace=False, backend=None)


class LinearCrossEntropy(torch.nn.Module):
    """:func:`tiercel.linear_cross_entropy` as a module. The layer's weight is an argument of each
    call, because it belongs to the language model; ``class_weight`` is a buffer. ``group`` is a
    process group whose ranks each hold a part of the classes, or None. With ``return_entropy`` the
    result is ``(loss, entropy)``.

    Shape:
        - Input: ``(T, H)``, the layer's weight ``(V, H)``, the targets ``(T)``.
        - Output: a scalar, or ``(T)`` with ``reduction="none"``.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        class_weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        accum_dtype: torch.dtype | None = None,
        return_entropy: bool = False,
        group: Any = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("class_weight", class_weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.accum_dtype = accum_dtype
        self.return_entropy = return_entropy
        self.group = group
        self.backend = backend

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Any:
        return linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            class_weight=self.class_weight,
            scale=scale,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            accum_dtype=self.accum_dtype,
            return_entropy=self.return_entropy,
            group=self.group,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return _options(
            self, **_USUAL, accum_dtype=None, return_entropy=False, group=None, backend=None
        )


_USUAL = {
    "ignore_index": -100,
    "reduction": "mean",
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "softcap": None,
}


def _options(module: torch.nn.Module, **usual: Any) -> str:
    """The options that are not as usual."""
    given = {name: getattr(module, name) for name in usual}
    return ", ".join(f"{name}={value!r}" for name, value in given.items() if value != usual[name])
