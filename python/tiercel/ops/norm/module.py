# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel.ops.norm import spec
from tiercel.ops.norm.op import layer_norm, rms_norm


def _columns(name: str, shape: int | list[int] | tuple[int, ...] | torch.Size) -> int:
    if isinstance(shape, int):
        return shape
    if len(shape) != 1:
        raise ValueError(f"{name}: `normalized_shape` must be one size, got {list(shape)}")
    return shape[0]


class RMSNorm(torch.nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` over the last dimension, by :func:`tiercel.rms_norm`.

    Its parameter has torch.nn.RMSNorm's name, so that checkpoints fit.

    Shape:
        - Input: ``(*, normalized_shape)``, and ``residual`` the same.
        - Output: the same; with ``residual`` a pair, see :func:`tiercel.rms_norm`.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        spec.RMS_NORM.check_value("eps", eps, "RMSNorm")
        columns = _columns("RMSNorm", normalized_shape)
        super().__init__(columns, eps, elementwise_affine, device=device, dtype=dtype)
        self.backend = backend

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        assert self.eps is not None
        return rms_norm(x, self.weight, eps=self.eps, residual=residual, backend=self.backend)


class LayerNorm(torch.nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` over the last dimension, by :func:`tiercel.layer_norm`.

    Its parameters have torch.nn.LayerNorm's names, so that checkpoints fit.

    Shape:
        - Input: ``(*, normalized_shape)``, and ``residual`` the same.
        - Output: the same; with ``residual`` a pair, see :func:`tiercel.rms_norm`.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        spec.LAYER_NORM.check_value("eps", eps, "LayerNorm")
        columns = _columns("LayerNorm", normalized_shape)
        super().__init__(columns, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self.backend = backend

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return layer_norm(
            x, self.weight, self.bias, eps=self.eps, residual=residual, backend=self.backend
        )
