# SPDX-License-Identifier: Apache-2.0
"""softmax and its logarithm, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
MASKS = ("none", "keep", "add")


def _invalid(params: Mapping[str, Any]) -> str | None:
    if params.get("mask", "none") not in MASKS:
        return f"`mask` must be one of {', '.join(MASKS)}"
    if not all(isinstance(params[name], int) and params[name] > 0 for name in "MN"):
        return "M and N must be positive whole numbers"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    shape = case["M"], case["N"]
    dtype = getattr(torch, case.dtype)

    def random() -> Any:
        return torch.randn(shape, device=device, generator=generator)

    inputs = {"x": random().to(dtype), "mask": None, "grad": random().to(dtype)}
    kind = case.params.get("mask", "none")
    if kind == "keep":
        inputs["mask"] = random() < 0.5
    elif kind == "add":
        inputs["mask"] = random()
    return inputs


def scale_of(case: Any) -> float | None:
    """A masked case is one of attention: with a scale."""
    return 0.125 if case.params.get("mask", "none") != "none" else None


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if inputs["mask"] is None:
        return (inputs["x"],), {}
    return (inputs["x"],), {"scale": scale_of(case), "mask": inputs["mask"]}


def empty_output(case: Any, inputs: Inputs) -> Any:
    import torch

    return torch.empty_like(inputs["x"])


def _bytes(backward: bool, case: Any) -> int:
    element = _ELEMENT[case.dtype]
    mask = {"none": 0, "keep": 1, "add": 4}[case.params.get("mask", "none")]
    return int(case["M"] * case["N"] * ((3 if backward else 2) * element + mask))


def result_of(op: str, inputs: Inputs) -> Any:
    """The input of the backward: the result, rounded to the dtype."""
    import torch

    function = torch.softmax if op == "softmax_online" else torch.log_softmax
    return function(inputs["x"].float(), -1).to(inputs["x"].dtype)


def _reference(op: str, case: Any, inputs: Inputs) -> Any:
    from tiercel import ref

    return getattr(ref, op)(inputs["x"].double(), scale=scale_of(case), mask=inputs["mask"])


def _backward_reference(op: str, case: Any, inputs: Inputs) -> Any:
    y, grad = result_of(op, inputs).double(), inputs["grad"].double()
    if op == "log_softmax":
        return grad - y.exp() * grad.sum(-1, keepdim=True)
    return y * (grad - (grad * y).sum(-1, keepdim=True))


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Relative to each row's largest: others may round exponentials and sums in between."""
    import torch

    (result,) = outputs
    if result.shape != expected.shape or result.dtype != inputs["x"].dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    unit = torch.finfo(result.dtype).eps / 2
    both = torch.isfinite(expected)
    if bool((torch.isfinite(result) != both).any()):
        raise WrongResult("other results are finite than are due")
    due = torch.where(both, expected, 0.0)
    errors = (torch.where(both, result.double(), 0.0) - due).abs_()
    size = due.abs().amax(-1, keepdim=True)
    worst = float((errors / (due.abs() * 4 * unit + size * (4 * unit + 4e-6) + 1e-30)).max())
    if not worst <= 1:
        raise WrongResult(f"a result is off by {worst:.1f} times its tolerance")
    rms = float(errors.square().mean().sqrt() / due.square().mean().sqrt())
    return Error(rms=rms, maximum=float(errors.max() / due.abs().max()))


def _ours_backward(op: str, case: Any, inputs: Inputs, backend: str) -> Launch:
    """The operator that the gradient calls; a user meets it only in ``backward()``."""
    import torch

    function = getattr(torch.ops.tiercel, f"{op}_backward")
    y, grad = result_of(op, inputs), inputs["grad"]
    run = partial(function, grad, y, -1, None, None, backend)
    return Launch(lambda: (run(),), strict=True, details={"kernel": f"{op}_backward"})


def _bench(op: str, backward: bool) -> OpBench:
    reference = _backward_reference if backward else _reference
    return OpBench(
        family="softmax",
        op=f"{op}_backward" if backward else op,
        params={"M": None, "N": None} | ({} if backward else {"mask": "none"}),
        invalid=_invalid,
        make=_make,
        call=_call,
        out=empty_output,
        bytes_moved=partial(_bytes, backward),
        reference=partial(reference, op),
        check=_check,
        ours=partial(_ours_backward, op) if backward else None,
    )


OPS = ("softmax_online", "log_softmax")
BENCHES = [_bench(op, backward) for backward in (False, True) for op in OPS]
