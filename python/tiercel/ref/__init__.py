# SPDX-License-Identifier: Apache-2.0
"""The obvious PyTorch version of every operator: right, differentiable, on any device."""

from tiercel import _needs_torch as _needs_torch
from tiercel.ref.gemv import nvfp4_gemv, nvfp4_linear
from tiercel.ref.linear import linear_act
from tiercel.ref.quant import fp8_quantize, nvfp4_dequantize, nvfp4_quantize
from tiercel.ref.routing import topk_softmax

__all__ = [
    "fp8_quantize",
    "linear_act",
    "nvfp4_dequantize",
    "nvfp4_gemv",
    "nvfp4_linear",
    "nvfp4_quantize",
    "topk_softmax",
]
