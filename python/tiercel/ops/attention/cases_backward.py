# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention's q, k and v."""

from __future__ import annotations

from functools import partial
from typing import Any

from tiercel.ops.attention.cases import BENCHES as FORWARD
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

(_FORWARD,) = [bench for bench in FORWARD if bench.op == "attention"]


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    inputs = _FORWARD.make(case, device, seed)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    q, v = inputs["q"], inputs["v"]
    shape = (*q.shape[:-1], v.shape[-1])
    grad = torch.randn(shape, device=device, generator=generator).to(q.dtype)
    return {**inputs, "grad": grad}


def _ours(case: Any, inputs: Inputs, backend: str) -> Launch:
    """The operator that the gradient calls; a user meets it only in ``backward()``."""
    import torch

    import tiercel

    q, k, v = (inputs[name] for name in "qkv")
    results = tiercel.attention(q, k, v, causal=case["causal"], return_lse=True, backend=backend)
    function = torch.ops.tiercel.attention_backward
    options = (case["causal"], None, None, None, case["deterministic"])
    rest = (None, *options, backend)
    return Launch(
        lambda: function(inputs["grad"], q, k, v, *results, *rest),
        strict=True,
        details={"kernel": "attention_backward"},
    )


def _bytes(case: Any) -> int:
    """Read q, k, v, the result and its gradient; write three gradients."""
    return 2 * _FORWARD.bytes_moved(case)


def flops_of(forward: OpBench, case: Any) -> int:
    """Three products of keys' columns where the forward has one, and two of values'."""
    assert forward.flops is not None
    d = case["D"]
    d_v = case["Dv"] or d
    return forward.flops(case) // (d + d_v) * (3 * d + 2 * d_v)


def truths(case: Any, inputs: Inputs, where: tuple[Any, ...], share: int) -> Any:
    """float64, of the part `where` of the tensors as a batch: of the last head of keys and of the
    heads of queries that read it."""
    from tiercel.ops.attention.reference import attention, attention_backward

    grad, q = (inputs[name][(*where, slice(-share, None))].double() for name in ("grad", "q"))
    k, v = (inputs[name][(*where, slice(-1, None))].double() for name in "kv")
    causal = case["causal"]
    results = attention(q, k, v, causal=causal, return_lse=True)
    return where, share, attention_backward(grad, q, k, v, *results, causal=causal)


def _reference(case: Any, inputs: Inputs) -> Any:
    """The truth for the last batch entry."""
    entry = (slice(-1, None), slice(None))
    return truths(case, inputs, entry, inputs["q"].shape[2] // inputs["k"].shape[2])


def check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """p, ds and each gradient are rounded to the dtype, and so is the result that delta is of."""
    import torch

    where, share, due = expected
    unit = torch.finfo(inputs["q"].dtype).eps / 2
    worst = Error(rms=0.0, maximum=0.0)
    for name, result, truth in zip("qkv", outputs, due, strict=True):
        if result.shape != inputs[name].shape or result.dtype != inputs[name].dtype:
            raise WrongResult(f"d{name}: shape {tuple(result.shape)}, {result.dtype}")
        part = result[(*where, slice(-(share if name == "q" else 1), None))].double()
        error = (part - truth).abs()
        if not bool(error.isfinite().all()):
            raise WrongResult(f"d{name} is not finite")
        rms = float(error.square().mean().sqrt() / truth.square().mean().sqrt())
        if rms > 4 * unit:
            raise WrongResult(f"d{name}: RMS error {rms:.1e}, tolerance {4 * unit:.1e}")
        largest = float(error.max() / truth.abs().max())
        worst = Error(rms=max(worst.rms, rms), maximum=max(worst.maximum, largest))
    return worst


BENCHES = [
    OpBench(
        family="attention",
        op="attention_backward",
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
