# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.activation.op import gelu_and_mul, relu_and_mul, silu_and_mul


class _GatedActivation(torch.nn.Module):
    """Packed input ``(*, 2N)``, or gate and factor apart, both ``(*, N)``; output ``(*, N)``."""

    def __init__(self, *, backend: str | None = None) -> None:
        super().__init__()
        self.backend = backend

    def extra_repr(self) -> str:
        return "" if self.backend is None else f"backend={self.backend!r}"


class SiluAndMul(_GatedActivation):
    """:func:`tiercel.silu_and_mul` as a module; it has no parameters.

    Shape:
        - Input: ``(*, 2N)``, or two of ``(*, N)``.
        - Output: ``(*, N)``.
    """

    def forward(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        return silu_and_mul(x, up, backend=self.backend)


class GeluAndMul(_GatedActivation):
    """:func:`tiercel.gelu_and_mul` as a module; it has no parameters.

    Shape:
        - Input: ``(*, 2N)``, or two of ``(*, N)``.
        - Output: ``(*, N)``.
    """

    def __init__(self, *, approximate: str = "none", backend: str | None = None) -> None:
        super().__init__(backend=backend)
        self.approximate = approximate

    def forward(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        return gelu_and_mul(x, up, approximate=self.approximate, backend=self.backend)

    def extra_repr(self) -> str:
        rest = super().extra_repr()
        return f"approximate={self.approximate!r}" + (f", {rest}" if rest else "")


class ReluAndMul(_GatedActivation):
    """:func:`tiercel.relu_and_mul` as a module; it has no parameters.

    Shape:
        - Input: ``(*, 2N)``, or two of ``(*, N)``.
        - Output: ``(*, N)``.
    """

    def forward(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        return relu_and_mul(x, up, backend=self.backend)
