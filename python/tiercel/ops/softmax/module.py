# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.softmax.op import softmax_online


class SoftmaxOnline(torch.nn.Module):
    """:func:`tiercel.softmax_online` as a module; it has no parameters.

    Shape:
        - Input: ``(*)``, and perhaps a mask that broadcasts to it.
        - Output: that of the input.
    """

    def __init__(
        self, dim: int = -1, *, scale: float | None = None, backend: str | None = None
    ) -> None:
        super().__init__()
        self.dim = dim
        self.scale = scale
        self.backend = backend

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return softmax_online(x, self.dim, scale=self.scale, mask=mask, backend=self.backend)

    def extra_repr(self) -> str:
        options = f"dim={self.dim}, scale={self.scale}"
        return options if self.backend is None else f"{options}, backend={self.backend!r}"
