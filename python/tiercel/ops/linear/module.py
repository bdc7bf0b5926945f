# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.linear.op import linear_act
from tiercel.ops.linear.spec import LINEAR_ACT


class LinearAct(torch.nn.Linear):
    """:class:`torch.nn.Linear` and an activation, as :func:`tiercel.linear_act` computes them.

    Its parameters have torch.nn.Linear's names, so that checkpoints fit.

    Shape:
        - Input: ``(*, in_features)``.
        - Output: ``(*, out_features)``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "gelu",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        LINEAR_ACT.check_value("activation", activation)
        self.activation = activation
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        return linear_act(
            x, self.weight, self.bias, activation=self.activation, backend=self.backend
        )

    def extra_repr(self) -> str:
        options = f"{super().extra_repr()}, activation={self.activation!r}"
        return options if self.backend is None else f"{options}, backend={self.backend!r}"
