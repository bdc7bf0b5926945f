# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
# `weights` of a case: all = softmax over all scores; renorm = that, divided by the selected sum;
# after = softmax of the selected scores (equal to renorm, by another option).
_TOKENS = 129280  # DeepSeek-V4's vocabulary
OPTIONS = {
    "all": {"softmax_first": True, "renormalize": False},
    "renorm": {"softmax_first": True, "renormalize": True},
    "after": {"softmax_first": False, "renormalize": False},
}


def _invalid(params: Mapping[str, Any]) -> str | None:
    if params["weights"] not in OPTIONS:
        return f"`weights` must be one of {', '.join(OPTIONS)}"
    if params.get("sigmoid") and params.get("sqrtsoftplus"):
        return "scores are of one kind"
    if params.get("hashed") and not params.get("sqrtsoftplus"):
        return "experts by token come with the scores of DeepSeek-V4, sqrtsoftplus"
    if params.get("grouped") and not (params.get("sigmoid") or params.get("sqrtsoftplus")):
        return "groups are for the other kinds of scores"
    sizes = [params[name] for name in "TEk"]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return "T, E and k must be positive whole numbers"
    return "k must not exceed E" if params["k"] > params["E"] else None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    scores = torch.randn(case["T"], case["E"], device=device, generator=generator)
    inputs = {"scores": scores.to(getattr(torch, case.dtype))}
    if case.params.get("hashed"):
        shape = (_TOKENS, case["E"])
        order = torch.rand(shape, device=device, generator=generator).argsort(-1)
        inputs["expert_table"] = order[:, : case["k"]].int()
        count = (case["T"],)
        inputs["token_ids"] = torch.randint(_TOKENS, count, device=device, generator=generator)
    elif scoring_of(case) != "softmax":
        bias = torch.randn(case["E"], device=device, generator=generator)
        inputs["correction_bias"] = 0.1 * bias
    return inputs


def scoring_of(case: Any) -> str:
    for name in ("sigmoid", "sqrtsoftplus"):
        if case.params.get(name):
            return name
    return "softmax"


def options_of(case: Any, inputs: Inputs) -> dict[str, Any]:
    """Other scores than softmax come with a bias, as in DeepSeek's models, or with a table."""
    if case.params.get("hashed"):
        table = {name: inputs[name] for name in ("token_ids", "expert_table")}
        return {"renormalize": True, "scoring": scoring_of(case), "scaling_factor": 1.5} | table
    if scoring_of(case) == "softmax":
        return dict(OPTIONS[case["weights"]])
    return {
        "renormalize": True,
        "scoring": scoring_of(case),
        "correction_bias": inputs["correction_bias"],
        "n_group": 8 if case.params.get("grouped") else 1,
        "topk_group": 4 if case.params.get("grouped") else 1,
        "scaling_factor": 2.5,
    }


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (inputs["scores"], case["k"]), options_of(case, inputs)


def _out(case: Any, inputs: Inputs) -> tuple[Any, Any]:
    import torch

    shape, device = (case["T"], case["k"]), inputs["scores"].device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    return weights, torch.empty(shape, dtype=torch.int32, device=device)


def _bytes(case: Any) -> int:
    scores = case["T"] * case["E"] * _ELEMENT[case.dtype]
    if case.params.get("hashed"):  # of the chosen, beside the token and its experts
        scores = case["T"] * (8 + case["k"] * (4 + _ELEMENT[case.dtype]))
    return int(scores + case["T"] * case["k"] * (4 + 4))


def _reference(case: Any, inputs: Inputs) -> dict[str, Any]:
    import torch

    scores = inputs["scores"].double()
    if scoring_of(case) != "softmax":
        return _route_reference(case, inputs)
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    values, indices = values[:, : case["k"]], indices[:, : case["k"]]
    if case["weights"] == "all":
        weights = torch.softmax(scores, dim=-1).gather(-1, indices)
    else:
        weights = torch.softmax(values, dim=-1)
    return {"by": scores, "values": values, "indices": indices, "weights": weights}


def _route_reference(case: Any, inputs: Inputs) -> dict[str, Any]:
    """The choice by float32 scores, as it is defined, and weights in float64."""
    import torch

    from tiercel.ops.routing.plain_route import activated
    from tiercel.ops.routing.reference import topk_softmax

    options = options_of(case, inputs)
    _, indices = topk_softmax(inputs["scores"], case["k"], indices_dtype=torch.int64, **options)
    by = activated(inputs["scores"].float(), options["scoring"]) + inputs.get("correction_bias", 0)
    due = activated(inputs["scores"].double().gather(-1, indices), options["scoring"])
    weights = options["scaling_factor"] * due / due.sum(-1, keepdim=True)
    by = by.double()
    return {"by": by, "values": by.gather(-1, indices), "indices": indices, "weights": weights}


def _check(inputs: Inputs, expected: dict[str, Any], outputs: Any, launch: Launch) -> Error:
    """Among equal scores others may choose any; what they chose must be the largest all the same.

    `slack` says how far apart two scores may be and still count as equal.
    """
    import torch

    weights, indices = outputs
    shape = expected["weights"].shape
    if weights.shape != shape or indices.shape != shape:
        raise WrongResult(f"shapes {tuple(weights.shape)}, {tuple(indices.shape)}")
    indices = indices.long()
    experts = inputs["scores"].shape[1]
    if bool((indices < 0).any()) or bool((indices >= experts).any()):
        raise WrongResult("an index is out of range")
    ordered = indices.sort(dim=-1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise WrongResult("an expert was selected twice")
    off = (indices != expected["indices"]).any(dim=-1)
    if launch.strict and bool(off.any()):
        raise WrongResult(f"{int(off.sum())} of {shape[0]} rows have other indices")
    scores = expected["by"]
    largest = float(scores.abs().max())
    gaps = (expected["values"] - scores.gather(-1, indices)).abs()
    if float(gaps.max()) > launch.slack * largest:
        raise WrongResult(f"a selected score is {float(gaps.max()):.1e} off the one due")

    errors = (weights.double() - expected["weights"]).abs()
    if not bool(torch.isfinite(errors).all()):
        raise WrongResult("a weight is not finite")
    tolerance = 4 * torch.finfo(weights.dtype).eps + 2 * launch.slack * largest
    if float(errors.max()) > tolerance:
        raise WrongResult(f"a weight is {float(errors.max()):.1e} off, tolerance {tolerance:.1e}")
    reference = expected["weights"]
    return Error(
        rms=float(errors.square().mean().sqrt() / reference.square().mean().sqrt()),
        maximum=float(errors.max() / reference.max()),
        differing=int((gaps > 0).any(dim=-1).sum()),
    )


def _torch_topk(case: Any, inputs: Inputs) -> Callable[[], Any]:
    import torch

    scores, k = inputs["scores"], case["k"]
    return lambda: torch.topk(scores, k)


BENCHES = [
    OpBench(
        family="routing",
        op="topk_softmax",
        params={
            "T": None,
            "E": None,
            "k": None,
            "weights": "renorm",
            "sigmoid": False,
            "sqrtsoftplus": False,
            "grouped": False,
            "hashed": False,
        },
        invalid=_invalid,
        make=_make,
        call=_call,
        out=_out,
        bytes_moved=_bytes,
        reference=_reference,
        check=_check,
        hot=True,  # a router's scores come from the matrix product just before
        host_baselines={"torch.topk": _torch_topk},
    )
]
