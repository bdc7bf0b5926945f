# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing: sorting tokens by expert, and adding up experts' outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel.ops.routing.cases_moe import empty
from tiercel.ops.routing.peers import topk_quack, topk_torch, topk_vllm
from tiercel.workbench.bench.launch import Launch, Unsupported


def _extra(function: Any, given: int) -> list[Any]:
    """None for what newer versions of an operator take besides."""
    return [None] * (len(function.default._schema.arguments) - given)


def _vllm_align(case: Any, ids: Any) -> Callable[[], tuple[Any, Any, Any]]:
    import torch

    outputs = empty(case, ids.device)
    function = torch.ops._moe_C.moe_align_block_size
    extra = _extra(function, 6)

    def run() -> tuple[Any, Any, Any]:
        function(ids, case["E"], case["bs"], *outputs, *extra)
        return outputs

    return run


def _align_vllm(case: Any, inputs: dict[str, Any]) -> Launch:
    return Launch(_vllm_align(case, inputs["topk_ids"]))


def _align_torch(case: Any, inputs: dict[str, Any]) -> Launch:
    from tiercel import ref

    ids, block_size, experts = inputs["topk_ids"], case["bs"], case["E"]
    return Launch(lambda: ref.moe_align_block_size(ids, block_size, experts))


def _both(topk: Launch, case: Any) -> Launch:
    """A peer's choice of experts, then vLLM's sorting of what it chose."""
    align = _vllm_align(case, topk.run()[1])
    return Launch(lambda: (*topk.run(), *align()), exact=topk.exact, slack=topk.slack)


def _fused_vllm(case: Any, inputs: dict[str, Any]) -> Launch:
    return _both(topk_vllm(case, inputs), case)


def _fused_quack(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    if not hasattr(torch.ops._moe_C, "moe_align_block_size"):
        raise Unsupported("it has no sorting by expert, and vLLM's is not here")
    return _both(topk_quack(case, inputs), case)


def _fused_torch(case: Any, inputs: dict[str, Any]) -> Launch:
    """The models' own code for the choice, then the reference's sorting."""
    from tiercel import ref

    topk = topk_torch(case, inputs)

    def run() -> tuple[Any, ...]:
        weights, indices = topk.run()
        indices = indices.int()
        lists = ref.moe_align_block_size(indices, case["bs"], case["E"])
        return weights, indices, *lists

    return Launch(run, slack=topk.slack)


def _sum_vllm(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    if case["weighted"]:
        raise Unsupported("it takes no weights")
    x = inputs["x"]
    out = x.new_empty((case["T"], case["H"]))
    function = torch.ops._moe_C.moe_sum
    extra = _extra(function, 2)

    def run() -> tuple[Any]:
        function(x, out, *extra)
        return (out,)

    return Launch(run, exact=False)  # torch.sum for some k, in the input's dtype


def _sum_of(x: Any, weights: Any) -> Any:
    import torch

    if weights is None:
        return torch.sum(x, dim=1)
    return torch.einsum("tkh,tk->th", x, weights.to(x.dtype))


def _sum_torch(case: Any, inputs: dict[str, Any]) -> Launch:
    x, weights = inputs["x"], inputs["weights"]
    return Launch(lambda: (_sum_of(x, weights),), exact=weights is None)


def _sum_fused(x: Any, weights: Any) -> Any:
    wide = x.float()
    if weights is not None:
        wide = wide * weights[:, :, None]
    return wide.sum(dim=1).to(x.dtype)


def _sum_compiled(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    torch._dynamo.reset()  # every case is a new shape
    compiled = torch.compile(_sum_fused, dynamic=False, fullgraph=True)
    x, weights = inputs["x"], inputs["weights"]
    return Launch(lambda: (compiled(x, weights),))


ADAPTERS = {
    "quack": {"topk_softmax_align": _fused_quack},
    "torch": {
        "moe_align_block_size": _align_torch,
        "moe_sum": _sum_torch,
        "topk_softmax_align": _fused_torch,
    },
    "torch.compile": {"moe_sum": _sum_compiled},
    "vllm": {
        "moe_align_block_size": _align_vllm,
        "moe_sum": _sum_vllm,
        "topk_softmax_align": _fused_vllm,
    },
}
