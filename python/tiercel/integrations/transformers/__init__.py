# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: importing this makes ``attn_implementation="tiercel"`` and
``experts_implementation="tiercel"`` known to it; `apply` replaces more of a loaded model."""

from tiercel.integrations.transformers import _needs_transformers as _needs_transformers

# isort: split

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

from tiercel.integrations.transformers.attention import attention_forward
from tiercel.integrations.transformers.experts import experts_forward
from tiercel.integrations.transformers.masks import make_mask
from tiercel.integrations.transformers.mxfp4 import use_mxfp4_experts as use_mxfp4_experts
from tiercel.integrations.transformers.replace import Report as Report
from tiercel.integrations.transformers.replace import apply as apply

__all__ = ["Report", "apply", "use_mxfp4_experts"]

AttentionInterface.register("tiercel", attention_forward)
AttentionMaskInterface.register("tiercel", make_mask)
ExpertsInterface.register("tiercel", experts_forward)
