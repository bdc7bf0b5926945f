# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.ops.attention.attention import attention
from tiercel.ops.attention.options import check_options


class Attention(torch.nn.Module):
    """:func:`tiercel.attention` as a module, to put between projections.

    Shape:
        - Inputs: ``q (B, Sq, H, D)``, ``k`` and ``v (B, Sk, Hk, D)``.
        - Output: ``(B, Sq, H, D)``.
    """

    def __init__(
        self,
        *,
        causal: bool = False,
        window: Sequence[int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_options("attention", causal, window, scale, softcap)
        self.causal = causal
        self.window = window
        self.scale = scale
        self.softcap = softcap
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attention(
            q,
            k,
            v,
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            backend=self.backend,
        )
        assert isinstance(result, Tensor)
        return result

    def extra_repr(self) -> str:
        names = ("window", "scale", "softcap", "backend")
        options = [f"{name}={getattr(self, name)!r}" for name in names]
        given = [text for text in options if not text.endswith("=None")]
        return ", ".join([f"causal={self.causal}", *given])
