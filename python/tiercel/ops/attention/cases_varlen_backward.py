# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention_varlen's q, k and v."""

from __future__ import annotations

from functools import partial
from typing import Any

from tiercel.ops.attention.cases_backward import check, flops_of, truths
from tiercel.ops.attention.cases_varlen import BENCHES as FORWARD
from tiercel.ops.attention.cases_varlen import lengths
from tiercel.workbench.bench.launch import Launch
from tiercel.workbench.bench.ops import Inputs, OpBench

(_FORWARD,) = FORWARD


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    inputs = _FORWARD.make(case, device, seed)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    q, v = inputs["q"], inputs["v"]
    grad = torch.randn((*q.shape[:-1], v.shape[-1]), device=device, generator=generator)
    return {**inputs, "grad": grad.to(q.dtype)}


def _ours(case: Any, inputs: Inputs, backend: str) -> Launch:
    """The operator that the gradient calls; a user meets it only in ``backward()``."""
    import torch

    import tiercel

    packed = [inputs[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    longest, causal = max(lengths(case)), case["causal"]
    results = tiercel.attention_varlen(
        *packed, longest, longest, causal=causal, return_lse=True, backend=backend
    )
    function = torch.ops.tiercel.attention_varlen_backward
    rest = (None, causal, None, None, None, case["deterministic"], backend)
    return Launch(
        lambda: function(inputs["grad"], *packed, *results, *rest),
        strict=True,
        details={"kernel": "attention_varlen_backward"},
    )


def _bytes(case: Any) -> int:
    """Read q, k, v, the result and its gradient; write three gradients."""
    return 2 * _FORWARD.bytes_moved(case)


def _reference(case: Any, inputs: Inputs) -> Any:
    """float64, of the last sequence's last head of keys and the heads of queries that read it."""
    rows = slice(-lengths(case)[-1], None)
    return truths(case, inputs, (None, rows), inputs["q"].shape[1] // inputs["k"].shape[1])


BENCHES = [
    OpBench(
        family="attention",
        op="attention_varlen_backward",
        params={**_FORWARD.params, "deterministic": False},
        invalid=_FORWARD.invalid,
        make=_make,
        call=_FORWARD.call,
        out=lambda case, inputs: None,
        bytes_moved=_bytes,
        flops=partial(flops_of, _FORWARD),
        reference=_reference,
        check=check,
        ours=_ours,
    )
]
