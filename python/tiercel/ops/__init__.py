# SPDX-License-Identifier: Apache-2.0
"""The operators; importing this registers ``torch.ops.tiercel.*``."""

from tiercel import _needs_torch as _needs_torch
from tiercel import backends
from tiercel._op import registry
from tiercel.ops.gemv import nvfp4_gemv, nvfp4_linear
from tiercel.ops.linear import linear_act
from tiercel.ops.quant import fp8_quantize, nvfp4_dequantize, nvfp4_quantize
from tiercel.ops.routing import topk_softmax

backends.warn_of_unknown_names(registry)

__all__ = [
    "fp8_quantize",
    "linear_act",
    "nvfp4_dequantize",
    "nvfp4_gemv",
    "nvfp4_linear",
    "nvfp4_quantize",
    "topk_softmax",
]
