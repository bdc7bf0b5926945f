# SPDX-License-Identifier: Apache-2.0
"""4-bit weights of checkpoints' experts in the layout of w4_moe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel.ops.gemv.packing import pack_w4


def pack_w4_experts(
    up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    *,
    layout: str,
    up_zero_point: Tensor | None = None,
    down_zero_point: Tensor | None = None,
    up_global_scale: Tensor | None = None,
    down_global_scale: Tensor | None = None,
) -> dict[str, Any]:
    """Converts a checkpoint's experts, on their device, to the arguments of :func:`tiercel.w4_moe`
    by name, without biases.

    ``up`` and ``down`` are a weight and its scale, in a layout of :func:`tiercel.ref.gemv.pack_w4`
    with experts as the first dimension. For gpt_oss, ``up`` is the checkpoint's
    ``gate_up_proj_blocks`` ``[E, 2 * I, H / 32, 16]`` and ``gate_up_proj_scales``
    ``[E, 2 * I, H / 32]``. gpt_oss and modelopt are views, not copies. A global scale is one number
    per expert.
    """
    found: dict[str, Any] = {}
    for half, (weight, scale), zeros, factors in (
        ("up", up, up_zero_point, up_global_scale),
        ("down", down, down_zero_point, down_global_scale),
    ):
        if layout in ("gpt_oss", "modelopt"):
            packed = pack_w4(weight, scale, layout=layout)
            weights, scales, points = packed.weight, packed.scale, None
        else:
            of_experts = [
                pack_w4(
                    weight[i],
                    scale[i],
                    layout=layout,
                    zero_point=None if zeros is None else zeros[i],
                )
                for i in range(weight.shape[0])
            ]
            packed = of_experts[0]
            weights = torch.stack([one.weight for one in of_experts])
            scales = torch.stack([one.scale for one in of_experts])
            points = None
            if zeros is not None:
                points = torch.stack([z for one in of_experts if (z := one.zero_point) is not None])
        found[f"w_{half}"], found[f"w_{half}_scale"] = weights, scales
        found[f"{half}_zero_point"] = points
        found[f"{half}_global_scale"] = None if factors is None else factors.float().flatten()
        found["format"] = packed.format
    return found
