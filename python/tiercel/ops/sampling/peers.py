# SPDX-License-Identifier: Apache-2.0
"""sample in PyTorch, as models' own code has it, and in FlashInfer."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.ops.sampling.cases import OPTIONS
from tiercel.workbench.bench.launch import Launch, Unsupported

Inputs = dict[str, Any]


def _torch(case: Any, inputs: Inputs) -> Launch:
    """A sort for the filters, then torch.multinomial."""
    import torch

    logits, options = inputs["logits"], OPTIONS[case["filter"]]

    def run() -> tuple[Any, ...]:
        token = draw()
        if not case["top"]:
            return (token,)
        logprobs = logits.float().log_softmax(-1)
        best = logprobs.topk(case["top"])
        return token, logprobs.gather(1, token.view(-1, 1)), best.indices, best.values

    def draw() -> Any:
        if case["filter"] == "greedy":
            return logits.argmax(-1)
        x = logits.float() / options.get("temperature", 1.0)
        if case["filter"] != "plain":
            x, order = x.sort(-1, descending=True)
            if "top_k" in options:
                x = x.masked_fill(x < x[:, options["top_k"] - 1, None], -torch.inf)
            p = x.softmax(-1)
            if "top_p" in options:
                p = p.masked_fill(p.cumsum(-1) - p >= options["top_p"], 0.0)
            return order.gather(1, torch.multinomial(p, 1))
        return torch.multinomial(x.softmax(-1), 1)

    return Launch(run, slack=0.05)


def _flashinfer(case: Any, inputs: Inputs) -> Launch:
    if case["top"]:
        raise Unsupported("its samplers return tokens alone")
    sampling: Any = importlib.import_module("flashinfer.sampling")
    logits, options = inputs["logits"], OPTIONS[case["filter"]]
    # A seed of its own: the generator's cannot be read while a graph is captured.
    seed = {"seed": 1, "offset": 0}
    temperature, top_p = options.get("temperature", 1.0), options.get("top_p", 1.0)

    def run() -> tuple[Any]:
        if case["filter"] == "greedy":
            return (logits.argmax(-1),)
        if case["filter"] == "plain":
            return (sampling.sampling_from_logits(logits.float() / temperature, **seed),)
        if "top_k" in options:
            # The k largest, and top-p of these.
            sample = sampling.top_k_top_p_sampling_from_logits
            return (sample(logits, options["top_k"], top_p, **seed),)
        probs = sampling.softmax(logits, temperature)
        return (sampling.top_p_sampling_from_probs(probs, top_p, **seed),)

    return Launch(run, slack=0.05)


ADAPTERS = {"flashinfer": {"sample": _flashinfer}, "torch": {"sample": _torch}}
