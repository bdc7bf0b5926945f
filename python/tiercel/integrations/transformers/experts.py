# SPDX-License-Identifier: Apache-2.0
"""``experts_implementation="tiercel"``: experts of Hugging Face's mixture-of-experts models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, SiLUActivation
from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

import tiercel
from tiercel.core import selection

_ACTIVATIONS: tuple[tuple[type[nn.Module], str], ...] = (
    (SiLUActivation, "silu"),
    (nn.SiLU, "silu"),
    (GELUActivation, "gelu"),
    (nn.ReLU, "relu"),
)
_DTYPES = (torch.bfloat16, torch.float16)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts interface: ``[T, H]`` to ``[T, H]``, both layers of each token's experts.

    Unsupported calls run on transformers' grouped_mm, with one warning per reason.
    """
    up, down = getattr(self, "gate_up_proj", None), self.down_proj
    why = why_not(self)
    dtypes = {hidden_states.dtype, down.dtype}
    if torch.is_autocast_enabled(hidden_states.device.type):  # fused_moe casts its tensors itself
        dtypes = {torch.get_autocast_dtype(hidden_states.device.type)}
    if why is None and (len(dtypes) > 1 or not dtypes.issubset(_DTYPES)):
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        why = f"it takes bfloat16 and float16, not {names}"
    if why is None:
        return tiercel.fused_moe(  # type: ignore[no-any-return]
            *(hidden_states, up, down, top_k_weights.float(), top_k_index),
            activation=_activation(self),
        )
    _warn(why)
    return grouped_mm_experts_forward(  # type: ignore[no-any-return]
        self, hidden_states, top_k_index, top_k_weights
    )


def is_experts(module: nn.Module) -> bool:
    """True for the modules that transformers hands to an experts implementation."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_concatenated")


def why_not(module: nn.Module) -> str | None:
    """The reason why we cannot compute these experts, or None."""
    if not module.has_gate:
        return "experts without a gate"
    if module.has_bias:
        return "experts with biases"
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.24 and newer
        return "experts with a norm of their results"
    if module.is_transposed or not module.is_concatenated:
        return "experts whose weights are transposed or interleaved"
    if type(module)._apply_gate is not _default_apply_gate:  # type: ignore[attr-defined]
        return "experts with a gate of their own"
    if _activation(module) is None:
        return "experts whose activation is not SiLU, GELU or ReLU"
    return None


def _activation(module: nn.Module) -> str | None:
    found = (name for kind, name in _ACTIVATIONS if type(module.act_fn) is kind)
    return next(found, None)


@torch.compiler.assume_constant_result  # while a graph is made, it warns then
def _warn(why: str) -> bool:
    name = 'experts_implementation="tiercel"'
    selection.fall_back(name, NotImplementedError, why, "grouped_mm")
    return True
