# SPDX-License-Identifier: Apache-2.0
"""Routers of Hugging Face's mixture-of-experts models: one kernel after the product."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tiercel
from tiercel.integrations.transformers.forwards import is_replaced

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BIAS = "e_score_correction_bias"
Results = tuple[Tensor, Tensor, Tensor]


def router_forward(module: nn.Module) -> Callable[..., Results] | str | None:
    """The forward of a router with `tiercel.topk_softmax`, or why not, or None if it is none.

    A router takes x ``[.., H]`` and returns (logits ``[T, E]``, weights ``[T, k]``, experts
    ``[T, k]`` int64). A token's experts may come in any order.
    """
    if not type(module).__name__.lower().endswith("topkrouter"):
        return None
    if is_replaced(module):
        return "its forward is replaced already"
    weight = dict(module.named_parameters()).get("weight")
    if weight is None or weight.ndim != 2 or not isinstance(getattr(module, "top_k", None), int):
        return "it has no weight or no number of experts"
    try:
        exact, rounded = (_trial(module, dtype) for dtype in (torch.float32, torch.bfloat16))
        wide = rounded[1][0].dtype == torch.float32
        narrow = rounded[1][1].dtype != torch.float32
        for options in _candidates(module):
            forward = _forward(options, wide, narrow)
            try:
                with tiercel.use_backend("ref"):
                    found = [forward(*given) for given, _ in (exact, rounded)]
            except (TypeError, ValueError):  # the module's attributes do not fit these options
                continue
            if all(map(_agree, found, (exact[1], rounded[1]))):
                return forward
    except Exception as error:  # whatever a stranger's module raises
        return f"its forward is not that of a router ({type(error).__name__})"
    return "it chooses or weighs experts in another way"


def _candidates(module: nn.Module) -> list[dict[str, Any]]:
    """Options of topk_softmax that the module's attributes allow."""
    k = module.top_k
    found: list[dict[str, Any]] = [
        {"k": k, "renormalize": False},
        {"k": k, "renormalize": True},
        {"k": k, "softmax_first": False},
    ]
    groups = getattr(module, "num_group", getattr(module, "n_group", 1))
    for renormalize in (False, True):
        options = {"k": k, "renormalize": renormalize, "scoring": "sigmoid", "n_group": groups}
        options["topk_group"] = getattr(module, "topk_group", 1)
        found.append(options | {"scaling_factor": getattr(module, "routed_scaling_factor", 1.0)})
    return found


def _forward(options: dict[str, Any], wide: bool, narrow: bool) -> Callable[..., Results]:
    """`wide`: the product is of float32; `narrow`: weights have the dtype of the logits."""

    def forward(self: nn.Module, x: Tensor, *others: Any, **more: Any) -> Results:
        if others or more:
            return type(self).forward(self, x, *others, **more)  # type: ignore[no-any-return]
        weight, bias = self.weight, getattr(self, "bias", None)
        rows = x.reshape(-1, x.shape[-1])
        if wide:
            rows, weight = rows.float(), weight.float()  # type: ignore[operator]
        logits = nn.functional.linear(rows, weight, bias)  # type: ignore[arg-type]
        if logits.dtype not in _DTYPES:
            return type(self).forward(self, x)  # type: ignore[no-any-return]
        correction = getattr(self, _BIAS, None)
        weights, experts = tiercel.topk_softmax(
            logits,
            **options,
            indices_dtype=torch.int64,
            correction_bias=None if correction is None else correction.float(),
        )
        return logits, weights.to(logits.dtype) if narrow else weights, experts

    return forward


def _trial(module: nn.Module, dtype: torch.dtype) -> tuple[tuple[nn.Module, Tensor], Results]:
    """A copy of the router with 8 columns and 12 random rows for it, and what the module's own
    forward makes of them."""
    generator = torch.Generator().manual_seed(0)
    columns = module.weight.shape[1]  # type: ignore[union-attr, index]
    small = copy.copy(module)
    small._parameters = {
        name: nn.Parameter(
            torch.randn((len(p), *[8] * (p.ndim - 1)), generator=generator).to(dtype)  # type: ignore[arg-type]
        )
        for name, p in module._parameters.items()
        if p is not None
    }
    small._buffers = {
        name: torch.rand(b.shape, generator=generator)  # type: ignore[union-attr]
        for name, b in module._buffers.items()
    }
    for name, value in vars(module).items():
        if name.startswith("hidden") and value == columns:
            setattr(small, name, 8)
    given = small, torch.randn(12, 8, generator=generator).to(dtype)
    with torch.no_grad():
        return given, type(module).forward(*given)


def _agree(found: Results, due: Results) -> bool:
    """True if both give the same logits, and the same weights to the same experts."""

    def dense(results: Results) -> Tensor:
        logits, weights, experts = results
        return torch.zeros_like(logits).scatter(1, experts, weights.to(logits.dtype))

    same = all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(found, due, strict=True))
    if not same or not torch.equal(found[0], due[0]):
        return False
    rtol = 1e-4 if found[1].dtype == torch.float32 else 1e-2
    return torch.allclose(dense(found), dense(due), rtol=rtol, atol=1e-6)
