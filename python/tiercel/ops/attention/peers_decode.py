# SPDX-License-Identifier: Apache-2.0
"""Attention of a few queries a sequence over a paged cache."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.ops.attention.cases_decode import lengths
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers import fa3

_FLOAT8 = "float8_e4m3fn"
_WORKSPACE = 256 << 20  # bytes, what FlashInfer's documentation asks for


def _flashinfer(case: Any, inputs: dict[str, Any], tensor_cores: bool) -> Launch:
    import torch

    if case["Sq"] != 1:
        raise Unsupported("its decode wrapper takes one query a sequence")
    flashinfer: Any = importlib.import_module("flashinfer")
    q, k, v = (inputs[name] for name in ("q", "k_cache", "v_cache"))
    page, used = case["page"], lengths(case)
    counts = [-(-length // page) for length in used]
    table = inputs["page_table"].cpu()
    indices = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=tensor_cores
    )
    wrapper.plan(
        torch.tensor([0, *counts]).cumsum(0).int(),
        indices.int().to(q.device),
        torch.tensor([(length - 1) % page + 1 for length in used]).int(),
        case["H"],
        case["Hk"],
        case["D"],
        page,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    queries, out = q.squeeze(1), torch.empty_like(q)

    def run() -> tuple[Any, ...]:
        wrapper.run(queries, (k, v), out=out.squeeze(1))
        return (out,)

    try:
        run()
    except (RuntimeError, ValueError) as error:
        raise Unsupported(str(error).splitlines()[0]) from error
    return Launch(run)


def _fa3_metadata(given: dict[str, Any], page: int) -> Any:
    """Its split, planned on the GPU once, as engines do for all layers of a model."""
    import torch

    function = torch.ops._vllm_fa3_C.get_scheduler_metadata.default
    (_, heads, d), (_, _, kv_heads, _) = given["q"].shape, given["k"].shape
    known = {
        **fa3.DEFAULTS,
        **given,
        "batch_size": given["seqused_k"].numel(),
        "num_heads": heads,
        "num_heads_k": kv_heads,
        "headdim": d,
        "headdim_v": d,
        "qkv_dtype": given["q"].dtype,
        "page_size": page,
        "max_seqlen_k_new": 0,
        "has_softcap": False,
    }
    return function(*(known.get(argument.name) for argument in function._schema.arguments))


def _fa3(case: Any, inputs: dict[str, Any]) -> Launch:
    """With a float8 cache its queries are float8 too."""
    import torch

    q, out = inputs["q"], torch.empty_like(inputs["q"])
    batch, queries, heads, d = q.shape
    exact = case["cache"] == "same"
    given = {
        "q": (q if exact else q.to(getattr(torch, _FLOAT8))).view(-1, heads, d),
        "k": inputs["k_cache"],
        "v": inputs["v_cache"],
        "out": out.view(-1, heads, d),
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries,
        "seqused_k": inputs["seqused_k"],
        "max_seqlen_q": queries,
        "max_seqlen_k": case["L"],
        "page_table": inputs["page_table"],
        "softmax_scale": d**-0.5,
        "is_causal": True,
    }
    if not exact:
        one = torch.ones(batch, case["Hk"], device=q.device)
        given |= {"q_descale": one, "k_descale": one, "v_descale": one}
    given["scheduler_metadata"] = _fa3_metadata(given, case["page"])
    function, args = fa3.bind(given)

    def run() -> tuple[Any, ...]:
        function(*args)
        return (out,)

    return Launch(run, exact=exact)


def _fa4(case: Any, inputs: dict[str, Any]) -> Launch:
    if case["cache"] != "same":
        raise Unsupported("it takes no float8 cache")
    function: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    q, k, v, table, used = inputs.values()

    def run() -> tuple[Any, ...]:
        result = function(q, k, v, page_table=table, seqused_k=used, causal=True)
        return (result[0] if isinstance(result, tuple) else result,)

    try:
        run()
    except Exception as error:  # its compiler raises what it likes
        raise Unsupported(str(error).splitlines()[0] if str(error) else repr(error)) from error
    return Launch(run)


ADAPTERS = {
    "fa3": {"decode_attention": _fa3},
    "fa4": {"decode_attention": _fa4},
    "flashinfer": {
        "decode_attention": lambda case, inputs: _flashinfer(case, inputs, tensor_cores=True)
    },
    "flashinfer.cuda_cores": {
        "decode_attention": lambda case, inputs: _flashinfer(case, inputs, tensor_cores=False)
    },
}
