# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.linear.fp8_training import fp8_linear_training
from tiercel.ops.linear.op import linear_act
from tiercel.ops.linear.spec import LINEAR_ACT


class LinearAct(torch.nn.Linear):
    """:class:`torch.nn.Linear` with an activation, by :func:`tiercel.linear_act`.

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


class Float8Linear(torch.nn.Linear):
    """:class:`torch.nn.Linear` with float8 products in forward and backward, as
    :func:`tiercel.fp8_linear_training` computes them.

    Its parameters have torch.nn.Linear's names, so that checkpoints fit; the weight is bfloat16 or
    float32. The precompiled kernels take sizes that are multiples of 16.

    Args:
        in_features, out_features, bias, device, dtype: As for torch.nn.Linear.
        add_to_grad: Whether the backward adds to ``weight.grad`` directly if that is a float32
            tensor. It must not be replaced between a forward and its backward.
        backend: ``"sm90"``, ``"ref"`` or None for what applies.

    Shape:
        - Input: ``(*, in_features)``, bfloat16 (under torch.autocast also others).
        - Output: ``(*, out_features)``, bfloat16.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        add_to_grad: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.add_to_grad = add_to_grad
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        grad = self.weight.grad if self.add_to_grad else None
        if grad is not None and grad.dtype != torch.float32:
            grad = None
        bias = self.bias if self.bias is None else self.bias.to(torch.bfloat16)
        return fp8_linear_training(x, self.weight, bias, weight_grad=grad, backend=self.backend)

    def extra_repr(self) -> str:
        options = f"{super().extra_repr()}, add_to_grad={self.add_to_grad}"
        return options if self.backend is None else f"{options}, backend={self.backend!r}"
