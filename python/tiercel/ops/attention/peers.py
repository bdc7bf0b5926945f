# SPDX-License-Identifier: Apache-2.0
"""Attention."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers import fa3

_FLOAT8 = "float8_e4m3fn"


def _sdpa(case: Any, inputs: dict[str, Any], backend: str) -> Launch:
    import torch
    from torch.nn import attention, functional

    if case.dtype == _FLOAT8:
        raise Unsupported("it takes no float8 inputs")
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


def _fa3(case: Any, inputs: dict[str, Any]) -> Launch:
    """Its packed form: the wheel has no other."""
    import torch

    q, k, v = (inputs[name].flatten(0, 1) for name in "qkv")
    batch, queries, _, d = inputs["q"].shape
    keys = inputs["k"].shape[1]
    counts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    float8 = case.dtype == _FLOAT8
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16 if float8 else q.dtype)
    given = {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "cu_seqlens_q": counts * queries,
        "cu_seqlens_k": counts * keys,
        "max_seqlen_q": queries,
        "max_seqlen_k": keys,
        "softmax_scale": d**-0.5,
        "is_causal": case["causal"],
    }
    if float8:
        given |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), inputs["one"])
    function, args = fa3.bind(given)

    def run() -> tuple[Any, ...]:
        function(*args)
        return (out.view(*inputs["q"].shape[:-1], -1),)

    return Launch(run)


def _fa4(case: Any, inputs: dict[str, Any]) -> Launch:
    if case.dtype == _FLOAT8:
        raise Unsupported("it takes no float8 inputs")
    function: Any = importlib.import_module("flash_attn.cute").flash_attn_func
    q, k, v = (inputs[name] for name in "qkv")

    def run() -> tuple[Any, ...]:
        result = function(q, k, v, causal=case["causal"])
        return (result[0] if isinstance(result, tuple) else result,)

    return Launch(run)


ADAPTERS = {
    "cudnn": {"attention": _cudnn},
    "fa3": {"attention": _fa3},
    "fa4": {"attention": _fa4},
    "torch": {"attention": _torch},
}
