# SPDX-License-Identifier: Apache-2.0
"""Precompiled Hopper (SM90a) kernels for PyTorch.

Importing this costs next to nothing and needs neither PyTorch nor a GPU; what is missing is said
when it is needed. The operators are also ``torch.ops.tiercel.*``: registered at once if torch is
imported already, else on first use or by ``import tiercel.ops``.
"""

import sys

from tiercel._version import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tiercel import backends as backends
    from tiercel import jit as jit
    from tiercel import nn as nn
    from tiercel import ops as ops
    from tiercel import ref as ref
    from tiercel._explain import explain as explain
    from tiercel._load import load as load
    from tiercel.backends import FallbackWarning as FallbackWarning
    from tiercel.backends import set_backend as set_backend
    from tiercel.backends import use_backend as use_backend
    from tiercel.ops.activation import gelu as gelu
    from tiercel.ops.activation import gelu_and_mul as gelu_and_mul
    from tiercel.ops.activation import relu as relu
    from tiercel.ops.activation import relu_and_mul as relu_and_mul
    from tiercel.ops.activation import silu as silu
    from tiercel.ops.activation import silu_and_mul as silu_and_mul
    from tiercel.ops.attention import attention as attention
    from tiercel.ops.attention_decode import decode_attention as decode_attention
    from tiercel.ops.attention_merge import merge_attention_states as merge_attention_states
    from tiercel.ops.attention_varlen import attention_varlen as attention_varlen
    from tiercel.ops.gemv import nvfp4_gemv as nvfp4_gemv
    from tiercel.ops.gemv import nvfp4_linear as nvfp4_linear
    from tiercel.ops.linear import fused_mlp as fused_mlp
    from tiercel.ops.linear import gated_linear as gated_linear
    from tiercel.ops.linear import linear_act as linear_act
    from tiercel.ops.linear_fp8 import fp8_linear as fp8_linear
    from tiercel.ops.moe import fused_moe as fused_moe
    from tiercel.ops.moe_grouped import grouped_gemm as grouped_gemm
    from tiercel.ops.moe_halves import moe_down as moe_down
    from tiercel.ops.moe_halves import moe_up as moe_up
    from tiercel.ops.norm import layer_norm as layer_norm
    from tiercel.ops.norm import rms_norm as rms_norm
    from tiercel.ops.quant import fp8_quantize as fp8_quantize
    from tiercel.ops.quant import nvfp4_dequantize as nvfp4_dequantize
    from tiercel.ops.quant import nvfp4_quantize as nvfp4_quantize
    from tiercel.ops.reduce import reduce as reduce
    from tiercel.ops.reduce import reduce_sum as reduce_sum
    from tiercel.ops.rotary import kv_cache_write as kv_cache_write
    from tiercel.ops.rotary import rotary_embedding as rotary_embedding
    from tiercel.ops.routing import topk_softmax as topk_softmax
    from tiercel.ops.routing_align import moe_align_block_size as moe_align_block_size
    from tiercel.ops.routing_fused import topk_softmax_align as topk_softmax_align
    from tiercel.ops.routing_sum import moe_sum as moe_sum
    from tiercel.ops.softmax import log_softmax as log_softmax
    from tiercel.ops.softmax import softmax_online as softmax_online
    from tiercel.ops.transpose import copy_transpose as copy_transpose

# Public name -> the module that defines it, imported when the name is first used.
_LAZY = {
    "FallbackWarning": "tiercel.backends",
    "attention": "tiercel.ops.attention",
    "attention_varlen": "tiercel.ops.attention_varlen",
    "copy_transpose": "tiercel.ops.transpose",
    "decode_attention": "tiercel.ops.attention_decode",
    "explain": "tiercel._explain",
    "fp8_linear": "tiercel.ops.linear_fp8",
    "fp8_quantize": "tiercel.ops.quant",
    "fused_mlp": "tiercel.ops.linear",
    "fused_moe": "tiercel.ops.moe",
    "gated_linear": "tiercel.ops.linear",
    "gelu": "tiercel.ops.activation",
    "gelu_and_mul": "tiercel.ops.activation",
    "grouped_gemm": "tiercel.ops.moe_grouped",
    "kv_cache_write": "tiercel.ops.rotary",
    "layer_norm": "tiercel.ops.norm",
    "linear_act": "tiercel.ops.linear",
    "load": "tiercel._load",
    "log_softmax": "tiercel.ops.softmax",
    "merge_attention_states": "tiercel.ops.attention_merge",
    "moe_align_block_size": "tiercel.ops.routing_align",
    "moe_down": "tiercel.ops.moe_halves",
    "moe_sum": "tiercel.ops.routing_sum",
    "moe_up": "tiercel.ops.moe_halves",
    "nvfp4_dequantize": "tiercel.ops.quant",
    "nvfp4_gemv": "tiercel.ops.gemv",
    "nvfp4_linear": "tiercel.ops.gemv",
    "nvfp4_quantize": "tiercel.ops.quant",
    "reduce": "tiercel.ops.reduce",
    "reduce_sum": "tiercel.ops.reduce",
    "relu": "tiercel.ops.activation",
    "relu_and_mul": "tiercel.ops.activation",
    "rms_norm": "tiercel.ops.norm",
    "rotary_embedding": "tiercel.ops.rotary",
    "set_backend": "tiercel.backends",
    "silu": "tiercel.ops.activation",
    "silu_and_mul": "tiercel.ops.activation",
    "softmax_online": "tiercel.ops.softmax",
    "topk_softmax": "tiercel.ops.routing",
    "topk_softmax_align": "tiercel.ops.routing_fused",
    "use_backend": "tiercel.backends",
}
_SUBMODULES = ("backends", "jit", "nn", "ops", "ref")

__all__ = [
    "FallbackWarning",
    "__version__",
    "attention",
    "attention_varlen",
    "backends",
    "copy_transpose",
    "decode_attention",
    "explain",
    "fp8_linear",
    "fp8_quantize",
    "fused_mlp",
    "fused_moe",
    "gated_linear",
    "gelu",
    "gelu_and_mul",
    "grouped_gemm",
    "jit",
    "kv_cache_write",
    "layer_norm",
    "linear_act",
    "load",
    "log_softmax",
    "merge_attention_states",
    "moe_align_block_size",
    "moe_down",
    "moe_sum",
    "moe_up",
    "nn",
    "nvfp4_dequantize",
    "nvfp4_gemv",
    "nvfp4_linear",
    "nvfp4_quantize",
    "ops",
    "reduce",
    "reduce_sum",
    "ref",
    "relu",
    "relu_and_mul",
    "rms_norm",
    "rotary_embedding",
    "set_backend",
    "silu",
    "silu_and_mul",
    "softmax_online",
    "topk_softmax",
    "topk_softmax_align",
    "use_backend",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _SUBMODULES:
        return import_module(f"tiercel.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'tiercel' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


def _register_if_torch_is_there() -> None:
    torch = sys.modules.get("torch")
    # Not while torch itself is still importing (it may import us as a plug-in).
    if torch is None or getattr(getattr(torch, "__spec__", None), "_initializing", False):
        return
    from tiercel._torch import missing_torch

    if missing_torch() is None:
        import tiercel.ops  # noqa: F401


_register_if_torch_is_there()
