# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention's q, k and v: others' forward once, their backward timed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tiercel.workbench.bench.launch import Launch, Unsupported


def timed(inputs: dict[str, Any], forward: Callable[..., Any]) -> Launch:
    """Through autograd, whose host time long backwards hide."""
    import torch

    tensors = [inputs[name].detach().requires_grad_() for name in "qkv"]
    try:
        out = forward(*tensors)

        def run() -> tuple[Any, ...]:
            return torch.autograd.grad(out, tensors, inputs["grad"], retain_graph=True)

        run()
    except (RuntimeError, torch.cuda.CudaError) as error:
        raise Unsupported(str(error).splitlines()[0]) from error
    return Launch(run, graph=False)


def _sdpa(case: Any, inputs: dict[str, Any], *backends: str) -> Launch:
    from torch.nn import attention, functional

    if case["causal"] and case["Sk"] not in (0, case["Sq"]):
        raise Unsupported("torch aligns a causal mask with the first key")
    if case["deterministic"]:
        raise Unsupported("measured without a fixed order")

    def forward(q: Any, k: Any, v: Any) -> Any:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        options = {"is_causal": case["causal"], "enable_gqa": q.shape[2] != k.shape[2]}
        with attention.sdpa_kernel([getattr(attention.SDPBackend, name) for name in backends]):
            out = functional.scaled_dot_product_attention(*heads_first, **options)
        return out.transpose(1, 2)

    return timed(inputs, forward)


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    """Its flash kernels, and where they refuse, for values of another head dimension, the
    memory-efficient ones."""
    return _sdpa(case, inputs, "FLASH_ATTENTION", "EFFICIENT_ATTENTION")


def _cudnn(case: Any, inputs: dict[str, Any]) -> Launch:
    return _sdpa(case, inputs, "CUDNN_ATTENTION")


def _flash(module: str) -> Callable[[Any, dict[str, Any]], Launch]:
    def prepare(case: Any, inputs: dict[str, Any]) -> Launch:
        function: Any = importlib.import_module(module).flash_attn_func
        options = {"causal": case["causal"], "deterministic": case["deterministic"]}

        def forward(q: Any, k: Any, v: Any) -> Any:
            result = function(q, k, v, **options)
            return result[0] if isinstance(result, tuple) else result

        return timed(inputs, forward)

    return prepare


ADAPTERS = {
    "cudnn": {"attention_backward": _cudnn},
    "fa4": {"attention_backward": _flash("flash_attn.cute")},
    "torch": {"attention_backward": _torch},
}
