# SPDX-License-Identifier: Apache-2.0
"""Attention of a few queries a sequence over a paged cache."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.ops.attention.cases_decode import lengths
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers import fa3, flashinfer

_FLOAT8 = "float8_e4m3fn"
_XQA_PAGES = (16, 32, 64, 128)


def flashinfer_decode(
    q: Any, caches: tuple[Any, Any], table: Any, used: list[int], tensor_cores: bool
) -> Launch:
    """Queries `[B, Sq, H, D]` of the last keys of each sequence."""
    import torch

    wrapper_of = flashinfer.module().BatchDecodeWithPagedKVCacheWrapper
    _, queries, heads, d = q.shape
    _, page, kv_heads, _ = caches[0].shape
    if queries > 1 and not tensor_cores:
        raise Unsupported("without tensor cores it takes one query a sequence")
    rows, out = q.flatten(0, 1), torch.empty_like(q)

    def prepare() -> Any:
        wrapper = wrapper_of(flashinfer.workspace(q.device), "NHD", use_tensor_cores=tensor_cores)
        options = {"q_len_per_req": queries} if queries > 1 else {}
        wrapper.plan(
            *flashinfer.pages(table, used, page),
            *(heads, kv_heads, d, page),
            q_data_type=q.dtype,
            kv_data_type=caches[0].dtype,
            **options,
        )

        def run() -> tuple[Any, ...]:
            wrapper.run(rows, caches, out=out.flatten(0, 1))
            return (out,)

        return run

    return flashinfer.launch(prepare)


def flashinfer_xqa(q: Any, caches: tuple[Any, Any], table: Any, used: Any, longest: int) -> Launch:
    """Queries `[B, Sq, H, D]`; with a float8 cache queries and probabilities are float8 too."""
    import torch

    decode: Any = flashinfer.module("flashinfer.decode").xqa_batch_decode_with_kv_cache
    batch, queries, _, d = q.shape
    if caches[0].shape[1] not in _XQA_PAGES:
        raise Unsupported(f"it takes pages of {', '.join(map(str, _XQA_PAGES))} keys")
    if queries > 32:
        raise Unsupported("masks of more than 32 new tokens")
    out, rows = torch.empty_like(q), q.flatten(0, 1)
    result, options = (out.flatten(0, 1), {}) if queries == 1 else (out, {"q_len_per_req": queries})
    if queries > 1:  # a word for each new token: itself and those before it
        words = torch.tensor([(1 << i + 1) - 1 for i in range(queries)], device=q.device).int()
        options["mask"] = words[:, None].expand(batch, -1, -1).contiguous().view(torch.uint16)

    def prepare() -> Any:
        scratch = flashinfer.workspace(q.device, "xqa")  # it leaves its semaphores at 0
        lengths_of = used.view(torch.uint32)

        def run() -> tuple[Any, ...]:
            decode(
                *(rows, caches, scratch, table, lengths_of, longest),
                bmm1_scale=d**-0.5,
                out=result,
                **options,
            )
            return (out,)

        return run

    return flashinfer.launch(prepare, exact=caches[0].element_size() == 2)


def _flashinfer(case: Any, inputs: dict[str, Any], tensor_cores: bool) -> Launch:
    q, k, v, table, _ = inputs.values()
    return flashinfer_decode(q, (k, v), table, lengths(case), tensor_cores)


def _xqa(case: Any, inputs: dict[str, Any]) -> Launch:
    q, k, v, table, used = inputs.values()
    return flashinfer_xqa(q, (k, v), table, used, case["L"])


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
    "flashinfer.xqa": {"decode_attention": _xqa},
}
