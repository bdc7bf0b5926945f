# SPDX-License-Identifier: Apache-2.0
"""Attention."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.bench.launch import Launch, Unsupported


def _sdpa(case: Any, inputs: dict[str, Any], backend: str) -> Launch:
    import torch
    from torch.nn import attention, functional

    if case["causal"] and case["Sk"] not in (0, case["Sq"]):
        raise Unsupported("torch aligns a causal mask with the first key")
    q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
    options = {"is_causal": case["causal"], "enable_gqa": q.shape[1] != k.shape[1]}
    kind = getattr(attention.SDPBackend, backend)

    def run() -> tuple[Any, ...]:
        with attention.sdpa_kernel(kind):
            out = functional.scaled_dot_product_attention(q, k, v, **options)
        return (out.transpose(1, 2),)

    try:
        run()
    except (RuntimeError, torch.cuda.CudaError) as error:
        raise Unsupported(str(error).splitlines()[0]) from error
    return Launch(run)


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    return _sdpa(case, inputs, "FLASH_ATTENTION")


def _cudnn(case: Any, inputs: dict[str, Any]) -> Launch:
    return _sdpa(case, inputs, "CUDNN_ATTENTION")


def _fa4(case: Any, inputs: dict[str, Any]) -> Launch:
    function: Any = importlib.import_module("flash_attn.cute").flash_attn_func
    q, k, v = (inputs[name] for name in "qkv")

    def run() -> tuple[Any, ...]:
        result = function(q, k, v, causal=case["causal"])
        return (result[0] if isinstance(result, tuple) else result,)

    return Launch(run)


ADAPTERS = {
    "cudnn": {"attention": _cudnn},
    "fa4": {"attention": _fa4},
    "torch": {"attention": _torch},
}
