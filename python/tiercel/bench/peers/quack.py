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
from tiercel.bench.peers import Missing, Peer


def _find() -> str:
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


PEER = Peer("quack", _find, {"topk_softmax": _topk_softmax})
