# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing."""

from __future__ import annotations

import importlib
import math
from typing import Any

from tiercel.ops.routing.cases import options_of, scoring_of
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers.vllm import operator


def topk_softmax(scores: Any, k: int, weights: str) -> tuple[Any, Any]:
    """The fewest kernels of PyTorch that give float32 weights for an exact selection."""
    import torch

    if weights == "all":
        indices = torch.topk(scores, k, dim=-1).indices
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)
        return probabilities.gather(-1, indices), indices
    values, indices = torch.topk(scores, k, dim=-1)
    return torch.softmax(values, dim=-1, dtype=torch.float32), indices


def topk_route(scores: Any, k: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """The formula of the models' own code."""
    import torch

    values = scores.float()
    if options["scoring"] == "sigmoid":
        values = values.sigmoid()
    else:
        values = torch.nn.functional.softplus(values).sqrt()
    if "expert_table" in options:
        indices = options["expert_table"].long()[options["token_ids"]]
    else:
        indices = _selected(values + options["correction_bias"], k, options)
    weights = values.gather(1, indices)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * options["scaling_factor"]
    return weights, indices


def _selected(by: Any, k: int, options: dict[str, Any]) -> Any:
    import torch

    if options["n_group"] > 1:
        groups = by.view(len(by), options["n_group"], -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(options["topk_group"], dim=-1).indices
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        by = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    return by.topk(k, dim=-1).indices


def _route_launch(case: Any, inputs: dict[str, Any], compiled: bool) -> Launch:
    import torch

    options = options_of(case, inputs)
    function = topk_route
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(topk_route, dynamic=False, fullgraph=True)
    return Launch(lambda: function(inputs["scores"], case["k"], options), slack=2.0**-20)


def softmax_only(case: Any) -> None:
    if scoring_of(case) != "softmax":
        raise Unsupported("it has the softmax only")


def topk_torch(case: Any, inputs: dict[str, Any]) -> Launch:
    if scoring_of(case) != "softmax":
        return _route_launch(case, inputs, compiled=False)
    scores, k, weights = inputs["scores"], case["k"], case["weights"]
    return Launch(run=lambda: topk_softmax(scores, k, weights))


def _topk_compiled(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    if scoring_of(case) != "softmax":
        return _route_launch(case, inputs, compiled=True)
    torch._dynamo.reset()  # every case is a new shape: without this the compile limit is soon met
    compiled = torch.compile(topk_softmax, dynamic=False, fullgraph=True)
    scores, k, weights = inputs["scores"], case["k"], case["weights"]
    return Launch(run=lambda: compiled(scores, k, weights))


def topk_quack(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    softmax_only(case)
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


def topk_vllm(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    if scoring_of(case) != "softmax":
        return _route_vllm(case, inputs)
    scores, shape = inputs["scores"], (case["T"], case["k"])
    weights = torch.empty(shape, dtype=torch.float32, device=scores.device)
    indices = torch.empty(shape, dtype=torch.int32, device=scores.device)
    sources = torch.empty_like(indices)  # an output for its own use
    renormalize = case["weights"] != "all"
    function = torch.ops._moe_C.topk_softmax
    # Arguments that newer versions added (a bias and the like) are None here.
    extra = [None] * (len(function.default._schema.arguments) - 5)

    def run() -> tuple[Any, Any]:
        function(weights, indices, sources, scores, renormalize, *extra)
        return weights, indices

    # It selects by float32 probabilities: scores that round to the same one tie.
    return Launch(run, slack=2.0**-20)


def _route_vllm(case: Any, inputs: dict[str, Any]) -> Launch:
    """Its operators of the models that bring these scores."""
    import torch

    options = options_of(case, inputs)
    scores, k, factor = inputs["scores"], case["k"], options["scaling_factor"]
    bias = options.get("correction_bias")
    if options.get("n_group", 1) > 1:
        if options["scoring"] != "sigmoid":
            raise Unsupported("it has groups with the sigmoid only")
        grouped = operator("_moe_C", "grouped_topk")
        groups = (options["n_group"], options["topk_group"])
        return Launch(lambda: grouped(scores, *groups, k, True, factor, bias, 1), slack=2.0**-20)
    shape = (case["T"], k)
    weights = torch.empty(shape, dtype=torch.float32, device=scores.device)
    indices = torch.empty(shape, dtype=torch.int32, device=scores.device)
    given = (weights, indices, torch.empty_like(indices), scores, True)
    if options["scoring"] == "sigmoid":
        function, rest = operator("_moe_C", "topk_sigmoid"), (bias, factor, None)
    else:
        function = operator("_moe_C", "topk_softplus_sqrt")
        table = (options.get("token_ids"), options.get("expert_table"))
        if table[0] is not None:  # it asks for one dtype of both
            table = tuple(tensor.int() for tensor in table)
        rest = (factor, bias, *table, None)

    def run() -> tuple[Any, Any]:
        function(*given, *rest)
        return weights, indices

    return Launch(run, slack=2.0**-20)


ADAPTERS = {
    "quack": {"topk_softmax": topk_quack},
    "torch": {"topk_softmax": topk_torch},
    "torch.compile": {"topk_softmax": _topk_compiled},
    "vllm": {"topk_softmax": topk_vllm},
}
