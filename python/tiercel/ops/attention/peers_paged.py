# SPDX-License-Identifier: Apache-2.0
"""Attention of any number of queries a sequence over a paged cache."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from tiercel.ops.attention.cases_paged import lengths
from tiercel.ops.attention.peers_decode import flashinfer_decode, flashinfer_xqa
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers import fa3, flashinfer, vllm_triton


def _plain(case: Any) -> None:
    if case["tree"] or case["cache"] != "same":
        raise Unsupported("trees and caches of another dtype")


def _plain_and_narrow(case: Any) -> None:
    _plain(case)
    if case["D"] > 256:
        raise Unsupported("heads of more than 256")


def _fa3(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    _plain_and_narrow(case)
    out = torch.empty_like(inputs["q"])
    given = {
        "q": inputs["q"],
        "k": inputs["k_cache"],
        "v": inputs["v_cache"],
        "out": out,
        "cu_seqlens_q": inputs["cu_seqlens_q"],
        "seqused_k": inputs["seqused_k"],
        "max_seqlen_q": max(new for new, _ in lengths(case)),
        "max_seqlen_k": max(keys for _, keys in lengths(case)),
        "page_table": inputs["page_table"],
        "softmax_scale": case["D"] ** -0.5,
        "is_causal": True,
    }
    function, args = fa3.bind(given)

    def run() -> tuple[Any, ...]:
        function(*args)
        return (out,)

    return Launch(run)


def _fa4(case: Any, inputs: dict[str, Any]) -> Launch:
    _plain_and_narrow(case)
    function: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    q, k, v, table, used, starts = inputs.values()
    longest = max(new for new, _ in lengths(case))
    options = {"cu_seqlens_q": starts, "max_seqlen_q": longest, "seqused_k": used}

    def run() -> tuple[Any, ...]:
        result = function(q, k, v, page_table=table, causal=True, **options)
        return (result[0] if isinstance(result, tuple) else result,)

    try:
        run()
    except Exception as error:  # its compiler raises what it likes
        raise Unsupported(str(error).splitlines()[0] if str(error) else repr(error)) from error
    return Launch(run)


def _flashinfer(case: Any, inputs: dict[str, Any], backend: str = "auto") -> Launch:
    """Its one call for any number of queries; its own choice of it, or the one that is given."""
    import torch

    if case["tree"] or case["D"] > 256:
        raise Unsupported("trees and heads of more than 256")
    q, k, v, table, _, starts = inputs.values()
    of_each = lengths(case)
    if backend == "auto" and all(new == 1 for new, _ in of_each):
        keys = [n for _, n in of_each]
        return _rows(flashinfer_decode(q[:, None], (k, v), table, keys, tensor_cores=True))
    out, page = torch.empty_like(q), case["page"]
    wrapper_of = flashinfer.module().BatchPrefillWithPagedKVCacheWrapper

    def prepare() -> Any:
        wrapper = wrapper_of(flashinfer.workspace(q.device), "NHD", backend=backend)
        wrapper.plan(
            starts.cpu(),
            *flashinfer.pages(table, [keys for _, keys in of_each], page),
            *(q.shape[1], k.shape[2], q.shape[2], page),
            causal=True,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )

        def run() -> tuple[Any, ...]:
            wrapper.run(q, (k, v), out=out)
            return (out,)

        return run

    return flashinfer.launch(prepare)


def _flashinfer_batch(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    _plain_and_narrow(case)
    q, k, v, table, used, starts = inputs.values()
    firsts, indices, _ = flashinfer.pages(table, [keys for _, keys in lengths(case)], case["page"])
    out, d = torch.empty_like(q), q.shape[2]
    sums = q.new_empty(q.shape[:2], dtype=torch.float32)

    def prepare() -> Any:
        wrapper = flashinfer.module().BatchAttention("NHD")
        wrapper.float_workspace_buffer = flashinfer.workspace(q.device)
        wrapper.plan(
            *(starts, firsts.to(q.device), indices, used),
            *(q.shape[1], k.shape[2], d, d, case["page"]),
            causal=True,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )

        def run() -> tuple[Any, ...]:
            wrapper.run(q, (k, v), out, sums)
            return (out,)

        return run

    return flashinfer.launch(prepare)


def _flashinfer_xqa(case: Any, inputs: dict[str, Any]) -> Launch:
    _plain(case)
    counts = set(lengths(case))
    if len(counts) > 1:
        raise Unsupported("sequences of different numbers of new tokens")
    (new, keys) = counts.pop()
    q, k, v, table, used, _ = inputs.values()
    return _rows(flashinfer_xqa(q.unflatten(0, (-1, new)), (k, v), table, used, keys))


def _rows(launch: Launch) -> Launch:
    """A call for `[B, Sq, H, D]` as one for rows."""
    return replace(launch, run=lambda: (launch.run()[0].flatten(0, 1),))


def _vllm_triton(case: Any, inputs: dict[str, Any]) -> Launch:
    """With the scratch that vLLM's backend gives it, for up to 16 segments of a sequence."""
    import torch

    _plain(case)
    function = vllm_triton.unified_attention()
    q, k, v, table, used, starts = inputs.values()
    new, keys = (max(n) for n in zip(*lengths(case), strict=True))
    out, most, segments = torch.empty_like(q), 128 // k.shape[2], 16
    scratch = {"dtype": torch.float32, "device": q.device}
    sums = [torch.empty(most, q.shape[1], segments, **scratch) for _ in range(2)]
    columns = 1 << (q.shape[2] - 1).bit_length()
    options = {
        "softmax_scale": q.shape[2] ** -0.5,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
        **dict.fromkeys(("q_descale", "k_descale", "v_descale")),
        "seq_threshold_3D": most,
        "num_par_softmax_segments": segments,
        "softmax_segm_output": torch.empty(most, q.shape[1], segments, columns, **scratch),
        "softmax_segm_max": sums[0],
        "softmax_segm_expsum": sums[1],
    }

    def run() -> tuple[Any, ...]:
        function(
            *(q, k, v, out, starts, new, used, keys),
            block_table=table,
            **options,
        )
        return (out,)

    return Launch(run)


def _separate(case: Any, inputs: dict[str, Any]) -> Launch:
    """decode_attention of the decoding sequences, and attention of the others, whose keys lie
    contiguous."""
    import tiercel

    _plain_and_narrow(case)
    q, k, v, table, used, _ = inputs.values()
    out, of_each, decoding = q.new_empty(q.shape), lengths(case), int(case["decoding"])
    one, many = slice(0, decoding), slice(decoding, None)
    new, keys = of_each[-1]

    def rows(x: Any) -> Any:
        return x[many].unflatten(0, (int(case["B"]), new))

    gathered = [cache[table[many].long()].flatten(1, 2)[:, :keys].contiguous() for cache in (k, v)]

    def run() -> tuple[Any, ...]:
        if decoding:
            given = (q[one, None], k, v, table[one], used[one])
            tiercel.decode_attention(*given, out=out[one, None])
        if decoding < len(of_each):
            tiercel.attention(rows(q), *gathered, causal=True, out=rows(out))
        return (out,)

    return Launch(run)


ADAPTERS = {
    "fa3": {"paged_attention": _fa3},
    "fa4": {"paged_attention": _fa4},
    "flashinfer": {"paged_attention": _flashinfer},
    "flashinfer.batch": {"paged_attention": _flashinfer_batch},
    "flashinfer.fa2": {"paged_attention": lambda *given: _flashinfer(*given, backend="fa2")},
    "flashinfer.xqa": {"paged_attention": _flashinfer_xqa},
    "separate": {"paged_attention": _separate},
    "vllm.triton": {"paged_attention": _vllm_triton},
}
