# SPDX-License-Identifier: Apache-2.0
"""quack (CuTe DSL kernels; compiles at its first call for a shape)."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import os
from typing import Any

from tiercel.bench.launch import Launch, Unsupported
from tiercel.bench.ops.linear import empty_output
from tiercel.bench.peers import Missing, Peer

_ACTIVATIONS = {"none": None, "gelu": "gelu_erf", "gelu_tanh": "gelu_tanh_approx"}


def find() -> str:
    if importlib.util.find_spec("quack") is None:
        raise Missing("the package quack-kernels is not installed")
    # Without it the DSL may build for another target.
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    importlib.import_module("quack.topk")

    try:
        return importlib.metadata.version("quack-kernels")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _topk_softmax(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    topk: Any = importlib.import_module("quack.topk")
    experts, k = case["E"], case["k"]
    if case["weights"] == "all":
        raise Unsupported("its softmax is over the selected scores only")
    if experts & (experts - 1) or k & (k - 1):
        raise Unsupported("E and k must be powers of 2")
    scores = inputs["scores"]
    shape = (case["T"], k)
    values = torch.empty(shape, dtype=scores.dtype, device=scores.device)
    indices = torch.empty(shape, dtype=torch.int32, device=scores.device)

    def run() -> tuple[Any, Any]:
        topk._topk_fwd(scores, k, True, values, indices)
        return values, indices

    # The index replaces the low log2(E) bits of the score as float32: bits that 16-bit scores do
    # not have, but float32 ones do.
    exact = scores.dtype != torch.float32
    slack = 0.0 if exact else 2.0 ** (math.log2(experts) - 23)
    return Launch(run, host=lambda: topk.topk_fwd(scores, k, True), exact=exact, slack=slack)


def linear_act(case: Any, inputs: dict[str, Any], tuned: bool) -> Launch:
    """`tuned` searches its configurations; otherwise it has one for all sizes."""
    gemm_act: Any = importlib.import_module("quack.gemm_interface").gemm_act
    x, weight, out = inputs["x"], inputs["weight"], empty_output(case, inputs)
    options: dict[str, Any] = {"bias": inputs["bias"], "store_preact": False, "tuned": tuned}
    options["activation"] = _ACTIVATIONS.get(case["act"], case["act"])

    def run() -> tuple[Any, ...]:
        gemm_act(x, weight.t(), postact_out=out, **options)
        return (out,)

    return Launch(run, host=lambda: gemm_act(x, weight.t(), **options))


def _linear_act(case: Any, inputs: dict[str, Any]) -> Launch:
    return linear_act(case, inputs, tuned=False)


PEER = Peer("quack", find, {"topk_softmax": _topk_softmax, "linear_act": _linear_act})
