# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch import Tensor

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
        given = {
            "ignore_index": (self.ignore_index, -100),
            "reduction": (self.reduction, "mean"),
            "label_smoothing": (self.label_smoothing, 0.0),
            "z_loss": (self.z_loss, 0.0),
            "softcap": (self.softcap, None),
            "inplace": (self.inplace, False),
            "backend": (self.backend, None),
        }
        return ", ".join(
            f"{name}={value!r}" for name, (value, usual) in given.items() if value != usual
        )
