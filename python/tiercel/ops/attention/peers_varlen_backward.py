# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention of packed sequences: others' forward once, their backward timed."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.ops.attention.cases_varlen import lengths
from tiercel.ops.attention.peers_backward import timed
from tiercel.workbench.bench.launch import Launch, Unsupported


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    if case["deterministic"]:
        raise Unsupported("measured without a fixed order")
    try:
        function: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError as error:
        raise Unsupported("this version has no torch.nn.attention.varlen") from error
    starts, longest = (inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]), max(lengths(case))
    grouped = inputs["q"].shape[1] != inputs["k"].shape[1]
    options = {"window_size": (-1, 0) if case["causal"] else (-1, -1)}
    if grouped:
        options["enable_gqa"] = True

    def forward(q: Any, k: Any, v: Any) -> Any:
        try:
            return function(q, k, v, *starts, longest, longest, **options)
        except TypeError as error:  # options of newer versions
            raise Unsupported(str(error)) from error

    return timed(inputs, forward)


def _fa4(case: Any, inputs: dict[str, Any]) -> Launch:
    function: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    longest = max(lengths(case))
    options = {
        "cu_seqlens_q": inputs["cu_seqlens_q"],
        "cu_seqlens_k": inputs["cu_seqlens_k"],
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": case["causal"],
        "deterministic": case["deterministic"],
    }

    def forward(q: Any, k: Any, v: Any) -> Any:
        try:
            result = function(q, k, v, **options)
        except Exception as error:  # its compiler raises what it likes
            text = str(error).splitlines()[0] if str(error) else repr(error)
            raise Unsupported(text) from error
        return result[0] if isinstance(result, tuple) else result

    return timed(inputs, forward)


ADAPTERS = {
    "fa4": {"attention_varlen_backward": _fa4},
    "torch": {"attention_varlen_backward": _torch},
}
