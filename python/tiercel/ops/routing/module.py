# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel.ops.routing.topk_softmax import topk_softmax


class TopkSoftmax(torch.nn.Module):
    """:func:`tiercel.topk_softmax` as a module; it has no parameters. `others` are its other
    options, except ``correction_bias``, which is an argument of the call.

    Shape:
        - Input: ``(*, E)``.
        - Output: weights and indices, both ``(*, k)``.
    """

    def __init__(
        self,
        k: int,
        *,
        softmax_first: bool = True,
        renormalize: bool = False,
        indices_dtype: torch.dtype = torch.int32,
        backend: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.k = k
        self.softmax_first = softmax_first
        self.renormalize = renormalize
        self.indices_dtype = indices_dtype
        self.backend = backend
        self.others = others

    def forward(
        self, scores: Tensor, correction_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        # Not reshape(-1, E), which refuses E = 0; a scalar is the op's to refuse.
        rows = scores.flatten(0, -2) if scores.dim() > 1 else scores
        weights, indices = topk_softmax(
            rows[None] if scores.dim() == 1 else rows,
            self.k,
            softmax_first=self.softmax_first,
            renormalize=self.renormalize,
            indices_dtype=self.indices_dtype,
            backend=self.backend,
            correction_bias=correction_bias,
            **self.others,
        )
        shape = (*scores.shape[:-1], weights.shape[-1])
        return weights.view(shape), indices.view(shape)

    def extra_repr(self) -> str:
        options = (
            f"k={self.k}, softmax_first={self.softmax_first}, renormalize={self.renormalize}, "
            f"indices_dtype={self.indices_dtype}"
        )
        options += "".join(f", {name}={value!r}" for name, value in self.others.items())
        return options if self.backend is None else f"{options}, backend={self.backend!r}"
