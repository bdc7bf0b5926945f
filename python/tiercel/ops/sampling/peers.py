# SPDX-License-Identifier: Apache-2.0
"""sample in PyTorch, as models' own code has it, in FlashInfer and in vLLM."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.ops.sampling.cases import OPTIONS
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers import flashinfer, vllm_sampler

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
    sampling: Any = flashinfer.module("flashinfer.sampling")
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


def _from_probs(case: Any, inputs: Inputs) -> Launch:
    if case["top"]:
        raise Unsupported("its samplers return tokens alone")
    if case["filter"] == "both":
        raise Unsupported("top-p of what top-k leaves: its order is another")
    sampling: Any = flashinfer.module("flashinfer.sampling")
    logits, options = inputs["logits"], OPTIONS[case["filter"]]
    seed = {"seed": 1, "offset": 0, "deterministic": True}
    temperature = options.get("temperature", 1.0)

    def run() -> tuple[Any]:
        if case["filter"] == "greedy":
            return (logits.argmax(-1),)
        probs = (logits.float() / temperature).softmax(-1)
        if "top_k" in options:
            return (sampling.top_k_sampling_from_probs(probs, options["top_k"], **seed),)
        if "top_p" in options:
            return (sampling.top_p_sampling_from_probs(probs, options["top_p"], **seed),)
        return (sampling.sampling_from_probs(probs, **seed),)

    return Launch(run, slack=0.05)


def _vllm(case: Any, inputs: Inputs) -> Launch:
    """Its steps, each only where a row of the batch needs it."""
    import torch

    if case["top"]:
        raise Unsupported("its sampler returns tokens alone")
    gumbel: Any = importlib.import_module(f"vllm.v1.{vllm_sampler.GUMBEL}")
    filters: Any = importlib.import_module(f"vllm.v1.{vllm_sampler.FILTERS}")
    logits, options, rows = inputs["logits"], OPTIONS[case["filter"]], case["T"]

    def of_each(value: float, dtype: Any) -> Any:
        return torch.full((rows,), value, dtype=dtype, device=logits.device)

    top_k = of_each(options["top_k"], torch.int32) if "top_k" in options else None
    top_p = of_each(options["top_p"], torch.float32) if "top_p" in options else None
    temperature = options.get("temperature", 1.0)
    temperatures, seeds = of_each(temperature, torch.float32), of_each(1, torch.int64)
    index = torch.arange(rows, dtype=torch.int32, device=logits.device)

    def run() -> tuple[Any]:
        x = logits
        if temperature not in (0.0, 1.0) or top_k is not None or top_p is not None:
            x = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        if temperature not in (0.0, 1.0):
            gumbel.apply_temperature(x, index, temperatures)
        if top_k is not None or top_p is not None:
            x = filters.apply_top_k_top_p_triton(x, top_k, top_p)
        options = {"apply_temperature": False, "is_drafting": False}
        return (gumbel.gumbel_sample(x, index, temperatures, seeds, index.long(), **options),)

    return Launch(run, slack=0.05)


ADAPTERS = {
    "flashinfer": {"sample": _flashinfer},
    "flashinfer.from_probs": {"sample": _from_probs},
    "torch": {"sample": _torch},
    "vllm.sampler": {"sample": _vllm},
}
