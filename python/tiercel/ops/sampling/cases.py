# SPDX-License-Identifier: Apache-2.0
"""sample: a token of each row, greedy or with filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
OPTIONS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "both": {"top_k": 50, "top_p": 0.9},
}


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not all(isinstance(params[name], int) and params[name] > 0 for name in "TV"):
        return "T and V must be positive whole numbers"
    if params["filter"] not in OPTIONS:
        return f"`filter` must be one of {', '.join(OPTIONS)}"
    if not (isinstance(params["top"], int) and 0 <= params["top"] <= 32):
        return "`top` must be a whole number up to 32"
    return None if params["spread"] > 0 else "`spread` must be a positive number"


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    logits = torch.randn(case["T"], case["V"], device=device, generator=generator)
    return {"logits": (case["spread"] * logits).to(getattr(torch, case.dtype)), "case": case}


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = dict(OPTIONS[case["filter"]])
    if case["top"]:
        options["top_logprobs"] = case["top"]
    return (inputs["logits"],), options


def _bytes(case: Any) -> int:
    """The logits and results; those of the best tokens need no second read."""
    return int(case["T"] * (case["V"] * _ELEMENT[case.dtype] + 4 + 8 * case["top"]))


def _reference(case: Any, inputs: Inputs) -> Any:
    """The tokens that may be drawn; greedy: the largest."""
    import torch

    from tiercel.ops.sampling.reference import kept_weights

    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    options |= OPTIONS[case["filter"]]
    allowed = []
    for part in inputs["logits"].float().split(64):
        if case["filter"] == "greedy":
            allowed.append(part == part.amax(-1, keepdim=True))
            continue
        each = {n: part.new_full((len(part),), value) for n, value in options.items()}
        allowed.append(kept_weights(part, **each) > 0)
    return torch.cat(allowed)


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """The token is one that may be drawn. `slack` is the share of rows that may err: methods that
    compare rounded probabilities keep a token more or less."""
    import torch

    tokens = outputs[0].view(-1).long()
    if tokens.shape != expected.shape[:1]:
        raise WrongResult(f"shape {tuple(tokens.shape)}")
    if not bool(((tokens >= 0) & (tokens < expected.shape[1])).all()):
        raise WrongResult("that is no token")
    if len(outputs) == 4:
        best = outputs[2].long()
        due = inputs["logits"].float().topk(best.shape[1]).values
        if not torch.equal(inputs["logits"].float().gather(1, best), due):
            raise WrongResult("the best tokens are others")
    differing = int((~expected.gather(1, tokens[:, None])).sum())
    if differing > launch.slack * len(tokens):
        raise WrongResult(f"{differing} tokens cannot be drawn")
    return Error(rms=0.0, maximum=0.0, differing=differing)


BENCHES = [
    OpBench(
        family="sampling",
        op="sample",
        params={"T": None, "V": None, "filter": "both", "spread": 3, "top": 0},
        invalid=_invalid,
        make=_make,
        call=_call,
        out=lambda case, inputs: None,
        bytes_moved=_bytes,
        reference=_reference,
        check=_check,
    )
]
