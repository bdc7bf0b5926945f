# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP4, the format of gpt-oss's checkpoint: random weights, and runs on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import tiercel

_SCALE = 120  # 2**-7: the values' root mean square is 0.02
_GROUP = 32


def draw(model: Any) -> dict[str, Tensor]:
    """Random MXFP4 tensors by their names in a checkpoint. The model's 16-bit experts get the same
    values, which bfloat16 holds exactly."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, GptOssExperts):
            continue
        for half in ("gate_up_proj", "down_proj"):
            weight = getattr(module, half)  # [E, K, N]
            experts, k, n = weight.shape
            where = {"dtype": torch.uint8, "device": weight.device}
            codes = torch.randint(256, (experts, n, k // 2), **where)
            scales = torch.full((experts, n, k // _GROUP), _SCALE, **where)
            for values, own, scale in zip(weight.detach(), codes, scales, strict=True):
                values.copy_(tiercel.ref.gemv.w4_values(own, scale, "mxfp4").mT)
            found[f"{name}.{half}_blocks"] = codes.unflatten(-1, (k // _GROUP, _GROUP // 2))
            found[f"{name}.{half}_scales"] = scales
    return found


@contextlib.contextmanager
def used(model: Any, tensors: dict[str, Tensor]) -> Iterator[None]:
    """`use_mxfp4_experts` for a while."""
    from tiercel.integrations.transformers import use_mxfp4_experts

    before = {name: dict(module._parameters) for name, module in model.named_modules()}
    names = use_mxfp4_experts(model, tensors)
    try:
        yield
    finally:
        for name in names:
            module = model.get_submodule(name)
            vars(module).pop("forward")
            module._buffers.clear()
            module._parameters.clear()
            module._parameters.update(before[name])
