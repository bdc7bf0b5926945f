# SPDX-License-Identifier: Apache-2.0
"""The operators; importing this registers ``torch.ops.tiercel.*``."""

from tiercel import _needs_torch as _needs_torch
from tiercel import backends
from tiercel._op import registry
from tiercel.ops import _optional
from tiercel.ops.activation import (
    gelu,
    gelu_and_mul,
    relu,
    relu_and_mul,
    silu,
    silu_and_mul,
)
from tiercel.ops.attention import attention
from tiercel.ops.attention_decode import decode_attention
from tiercel.ops.attention_merge import merge_attention_states
from tiercel.ops.attention_varlen import attention_varlen
from tiercel.ops.gemv import nvfp4_gemv, nvfp4_linear
from tiercel.ops.linear import fused_mlp, gated_linear, linear_act
from tiercel.ops.linear_fp8 import fp8_linear
from tiercel.ops.moe import fused_moe
from tiercel.ops.moe_grouped import grouped_gemm
from tiercel.ops.moe_halves import moe_down, moe_up
from tiercel.ops.norm import layer_norm, rms_norm
from tiercel.ops.quant import fp8_quantize, nvfp4_dequantize, nvfp4_quantize
from tiercel.ops.reduce import reduce, reduce_sum
from tiercel.ops.rotary import kv_cache_write, rotary_embedding
from tiercel.ops.routing import topk_softmax
from tiercel.ops.routing_align import moe_align_block_size
from tiercel.ops.routing_fused import topk_softmax_align
from tiercel.ops.routing_sum import moe_sum
from tiercel.ops.softmax import log_softmax, softmax_online
from tiercel.ops.transpose import copy_transpose

backends.warn_of_unknown_names(registry)

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
    "reduce_sum",
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

_optional.register({name: globals()[name] for name in __all__})
