# SPDX-License-Identifier: Apache-2.0
"""Latent attention in FlashMLA and FlashInfer."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.ops.mla.cases import SCALE, lengths
from tiercel.ops.mla.spec import LATENT, ROTARY
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers import flashinfer
from tiercel.workbench.bench.peers.vllm import operator

Inputs = dict[str, Any]


def _flash_mla(case: Any, inputs: Inputs) -> Launch:
    """Its first call plans its split on the GPU, as engines do once for all layers of a model."""
    if case["page"] != 64:
        raise Unsupported("it takes pages of 64 keys")
    module: Any = importlib.import_module("flash_mla")
    q, cache, table, used = inputs.values()
    plan, _ = module.get_mla_metadata()
    options = {"softmax_scale": SCALE, "causal": True, "use_legacy": True}

    def run() -> tuple[Any, ...]:
        out, _ = module.flash_mla_with_kvcache(
            q, cache[:, :, None], table, used, LATENT, plan, **options
        )
        return (out,)

    try:
        run()
    except RuntimeError as error:
        raise Unsupported(str(error).splitlines()[0]) from error
    return Launch(run)


def _flash_mla_sparse(case: Any, inputs: Inputs) -> Launch:
    """Its prefill for rows of 16 bits, which does not split lists; its decode for the others."""
    module: Any = importlib.import_module("flash_mla")
    q, cache, indices = inputs.values()

    def prefill() -> tuple[Any, ...]:
        rows = cache.view(-1, 1, cache.shape[2])
        return (module.flash_mla_sparse_fwd(q, rows, indices[:, None], SCALE)[0],)

    if case["cache"] != "uint8":
        return Launch(prefill)
    plan, _ = module.get_mla_metadata()
    stored = cache.view(cache.shape[0], cache.shape[1], 1, cache.shape[2])

    def decode() -> tuple[Any, ...]:
        out, _ = module.flash_mla_with_kvcache(
            q[:, None],
            stored,
            None,
            None,
            LATENT,
            plan,
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            indices=indices[:, None],
        )
        return (out[:, 0],)

    return Launch(decode)


def _deepgemm(case: Any, inputs: Inputs) -> Launch:
    import torch

    from tiercel.workbench.bench.peers import deepgemm

    module: Any = deepgemm.module()
    q, k, k_scale, weights = inputs.values()
    starts = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    ends = torch.full_like(starts, len(k))
    if hasattr(module, "fp8_mqa_logits"):
        return Launch(lambda: (module.fp8_mqa_logits(q, (k, k_scale), weights, starts, ends),))
    function = module.fp8_fp4_mqa_logits  # its name since 2.8
    arguments = ((q, None), (k, k_scale), weights, starts, ends, len(k))
    return Launch(lambda: (function(*arguments),))


def _torch_top_k(case: Any, inputs: Inputs) -> Launch:
    logits = inputs["logits"]
    return Launch(lambda: (logits.topk(case["k"], dim=1, sorted=False).indices,))


def _vllm_top_k(case: Any, inputs: Inputs) -> Launch:
    """Its kernel for prompts; a row begins at 0 and ends at N."""
    import torch

    function = operator("_C", "top_k_per_row_prefill")
    logits, rows = inputs["logits"], case["T"]
    starts = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    ends = torch.full_like(starts, case["N"])
    indices = torch.empty(rows, case["k"], dtype=torch.int32, device=logits.device)

    def run() -> tuple[Any]:
        function(logits, starts, ends, indices, rows, *logits.stride(), case["k"])
        return (indices,)

    return Launch(run)


def _flashinfer(case: Any, inputs: Inputs) -> Launch:
    import torch

    mla: Any = flashinfer.module("flashinfer.mla")
    q, cache, table, _ = inputs.values()
    batch, queries, heads, _ = q.shape
    page, used = case["page"], lengths(case)
    rows = q.view(batch * queries, heads, -1)
    parts = (*rows.split((LATENT, ROTARY), -1), *cache.split((LATENT, ROTARY), -1))
    out = q.new_empty(batch * queries, heads, LATENT)

    def prepare() -> Any:
        wrapper = mla.BatchMLAPagedAttentionWrapper(flashinfer.workspace(q.device))
        firsts, indices, _ = flashinfer.pages(table, used, page)
        wrapper.plan(
            torch.arange(batch + 1, dtype=torch.int32) * queries,
            firsts,
            indices,
            torch.tensor(used, dtype=torch.int32),
            heads,
            LATENT,
            ROTARY,
            page,
            queries > 1,
            SCALE,
            q.dtype,
            cache.dtype,
        )

        def run() -> tuple[Any, ...]:
            wrapper.run(*parts, out=out)
            return (out.view(batch, queries, heads, LATENT),)

        return run

    return flashinfer.launch(prepare)


def _torch_write(case: Any, inputs: Inputs) -> Launch:
    """One launch each for the row, the float8 row and the assignment."""
    import torch

    latent, rotary, cache, slots = inputs.values()
    if case["cache"] == "uint8":
        raise Unsupported("only layouts of one dtype")
    blocks, places = slots // cache.shape[1], slots % cache.shape[1]

    def run() -> tuple[Any, ...]:
        rows = torch.cat([latent, rotary], 1).to(cache.dtype)
        if cache.element_size() == 1:
            cache.view(torch.uint8)[blocks, places] = rows.view(torch.uint8)
        else:
            cache[blocks, places] = rows
        return (cache,)

    return Launch(run)


def _vllm_write(case: Any, inputs: Inputs) -> Launch:
    import torch

    function = operator("_C_cache_ops", "concat_and_cache_mla")
    latent, rotary, cache, slots = inputs.values()
    kind = {"same": "auto", "uint8": "fp8_ds_mla"}.get(case["cache"], "fp8")
    one = torch.ones(1, device=latent.device)
    stored = cache if kind == "auto" else cache.view(torch.uint8)

    def run() -> tuple[Any]:
        function(latent, rotary, stored, slots, kind, one)
        return (cache,)

    return Launch(run)


ADAPTERS: dict[str, dict[str, Any]] = {
    "deepgemm": {"indexer_logits": _deepgemm},
    "flash_mla": {"mla_decode": _flash_mla, "mla_sparse_attention": _flash_mla_sparse},
    "flashinfer": {"mla_decode": _flashinfer},
    "torch": {"mla_cache_write": _torch_write, "top_k_indices": _torch_top_k},
    "vllm": {"mla_cache_write": _vllm_write, "top_k_indices": _vllm_top_k},
}
