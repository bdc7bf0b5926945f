# SPDX-License-Identifier: Apache-2.0
"""The obvious PyTorch version of every operator: right, differentiable, on any device."""

from tiercel import _needs_torch as _needs_torch
from tiercel.ref.activation import (
    gelu,
    gelu_and_mul,
    relu,
    relu_and_mul,
    silu,
    silu_and_mul,
)
from tiercel.ref.attention import (
    attention,
    attention_varlen,
    decode_attention,
    merge_attention_states,
)
from tiercel.ref.gemv import nvfp4_gemv, nvfp4_linear
from tiercel.ref.linear import fp8_linear, fused_mlp, gated_linear, linear_act
from tiercel.ref.moe import fused_moe, grouped_gemm, moe_down, moe_up
from tiercel.ref.norm import layer_norm, rms_norm
from tiercel.ref.quant import fp8_quantize, nvfp4_dequantize, nvfp4_quantize
from tiercel.ref.reduce import reduce
from tiercel.ref.rotary import kv_cache_write, rotary_embedding
from tiercel.ref.routing import moe_align_block_size, moe_sum, topk_softmax, topk_softmax_align
from tiercel.ref.softmax import log_softmax, softmax_online
from tiercel.ref.transpose import copy_transpose

__all__ = [
    "attention",
    "attention_varlen",
    "copy_transpose",
    "decode_attention",
    "fp8_linear",
    "fp8_quantize",
    "fused_mlp",
    "fused_moe",
    "gated_linear",
    "gelu",
    "gelu_and_mul",
    "grouped_gemm",
    "kv_cache_write",
    "layer_norm",
    "linear_act",
    "log_softmax",
    "merge_attention_states",
    "moe_align_block_size",
    "moe_down",
    "moe_sum",
    "moe_up",
    "nvfp4_dequantize",
    "nvfp4_gemv",
    "nvfp4_linear",
    "nvfp4_quantize",
    "reduce",
    "relu",
    "relu_and_mul",
    "rms_norm",
    "rotary_embedding",
    "silu",
    "silu_and_mul",
    "softmax_online",
    "topk_softmax",
    "topk_softmax_align",
]
