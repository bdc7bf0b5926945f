# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's experts with the 4-bit weights of its checkpoint."""

from __future__ import annotations

import types
from collections.abc import Mapping

from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import tiercel

_PARTS = ("blocks", "scales")


def use_mxfp4_experts(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Makes gpt-oss's experts run on :func:`tiercel.w4_moe`, for inference.

    The model must have been loaded without quantisation, or dequantised. In each module of experts
    the checkpoint's MXFP4 tensors, as buffers on the device of its biases, replace the 16-bit
    weights; its forward is replaced on the instance.

    Args:
        model: A model with transformers' ``GptOssExperts``.
        tensors: The checkpoint's ``*.gate_up_proj_blocks``, ``*.gate_up_proj_scales``,
            ``*.down_proj_blocks`` and ``*.down_proj_scales`` by name; others are ignored.

    Returns:
        The names of the modules.

    Raises:
        KeyError: A tensor is missing; nothing is changed then.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained(
        ...     name, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
        ... )
        >>> use_mxfp4_experts(model, safetensors.torch.load_file("model.safetensors"))
        >>> model.cuda()
    """
    experts = {name: m for name, m in model.named_modules() if isinstance(m, GptOssExperts)}
    for name in experts:
        for half in ("gate_up_proj", "down_proj"):
            for part in _PARTS:
                if f"{name}.{half}_{part}" not in tensors:
                    raise KeyError(f"`tensors` must have {name}.{half}_{part}")
    for name, module in experts.items():
        for half in ("gate_up_proj", "down_proj"):
            delattr(module, half)
            device = getattr(module, f"{half}_bias").device
            for part in _PARTS:
                module.register_buffer(
                    f"{half}_{part}", tensors[f"{name}.{half}_{part}"].to(device).contiguous()
                )
        module.forward = types.MethodType(_forward, module)
    return list(experts)


def _forward(
    self: nn.Module, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor
) -> Tensor:
    packed = tiercel.ref.moe.pack_w4_experts(
        (self.gate_up_proj_blocks, self.gate_up_proj_scales),  # type: ignore[arg-type]
        (self.down_proj_blocks, self.down_proj_scales),  # type: ignore[arg-type]
        layout="gpt_oss",
    )
    return tiercel.w4_moe(
        hidden_states,
        topk_weights=routing_weights.float().contiguous(),
        topk_ids=router_indices.contiguous(),
        up_bias=self.gate_up_proj_bias.to(hidden_states.dtype),  # type: ignore[operator]
        down_bias=self.down_proj_bias.to(hidden_states.dtype),  # type: ignore[operator]
        activation="silu_residual",
        alpha=self.alpha,  # type: ignore[arg-type]
        limit=self.limit,  # type: ignore[arg-type]
        interleaved=True,
        **packed,
    )
