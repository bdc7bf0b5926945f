# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences of several lengths behind each other."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.ops.attention.cases_varlen import FLOAT8, lengths
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers import fa3


def _fa3(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    dtype = torch.bfloat16 if case.dtype == FLOAT8 else inputs["q"].dtype
    q, v, longest = inputs["q"], inputs["v"], max(lengths(case))
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    given = {
        **inputs,
        "out": out,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "is_causal": case["causal"],
        "num_splits": 1,
        "softmax_scale": case["D"] ** -0.5,
    }
    function, args = fa3.bind(given)

    def run() -> tuple[Any, ...]:
        function(*args)
        return (out,)

    return Launch(run)


def _fa4(case: Any, inputs: dict[str, Any]) -> Launch:
    if case.dtype == FLOAT8:
        raise Unsupported("it takes no float8 inputs")
    function: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    longest = max(lengths(case))
    limits = {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def run() -> tuple[Any, ...]:
        result = function(**inputs, **limits, causal=case["causal"])
        return (result[0] if isinstance(result, tuple) else result,)

    try:
        run()
    except Exception as error:  # its compiler raises what it likes
        raise Unsupported(str(error).splitlines()[0] if str(error) else repr(error)) from error
    return Launch(run)


ADAPTERS = {
    "fa3": {"attention_varlen": _fa3},
    "fa4": {"attention_varlen": _fa4},
}
