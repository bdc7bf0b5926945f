# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing: sorting tokens by expert, and adding up experts' outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.ops.routing import cases as routing
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
_NONE = Error(rms=0.0, maximum=0.0)


def _positive(params: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    if all(isinstance(params[name], int) and params[name] > 0 for name in names):
        return None
    return f"{', '.join(names)} must be positive whole numbers"


def slots_of(case: Any) -> int:
    """The slots that vLLM's wrapper allocates, too."""
    from tiercel.ops.routing.spec import slots_for

    return slots_for(case["T"] * case["k"], case["E"], case["bs"])


def empty(case: Any, device: Any) -> tuple[Any, Any, Any]:
    import torch

    slots = slots_of(case)
    sizes = (slots, -(-slots // case["bs"]), 1)
    return tuple(torch.empty(size, dtype=torch.int32, device=device) for size in sizes)  # type: ignore[return-value]


def _aligned_bytes(case: Any) -> int:
    slots = slots_of(case)
    return 4 * (slots + -(-slots // case["bs"]) + 1)


def check_aligned(ids: Any, block_size: int, experts: int, outputs: Any) -> None:
    """Within an expert others may have any order; ours ascends, which its tests hold it to."""
    import torch

    sorted_ids, expert_ids, number = outputs
    numel, used = ids.numel(), int(number)
    counts = torch.bincount(ids.flatten().long(), minlength=experts)
    blocks = (counts + block_size - 1) // block_size
    if used != int(blocks.sum()) * block_size:
        raise WrongResult(f"{used} slots are used, not {int(blocks.sum()) * block_size}")
    due = torch.repeat_interleave(torch.arange(experts, device=ids.device), blocks)
    if not torch.equal(expert_ids[: len(due)].long(), due):
        raise WrongResult("a block's expert is not the one due")
    inside = sorted_ids[:used].long()
    real = inside < numel
    if bool((inside > numel).any()) or bool((sorted_ids[used:] != numel).any()):
        raise WrongResult("padding is not the number of ids")
    if not torch.equal(inside[real].sort().values, torch.arange(numel, device=ids.device)):
        raise WrongResult("an id is missing or is there twice")
    slot_experts = due.repeat_interleave(block_size)
    if not torch.equal(ids.flatten().long()[inside[real]], slot_experts[real]):
        raise WrongResult("an id is in another expert's block")


# moe_align_block_size


def _make_ids(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    keys = torch.rand(case["T"], case["E"], device=device, generator=generator)
    return {"topk_ids": keys.topk(case["k"]).indices.int()}


def _align_invalid(params: Mapping[str, Any]) -> str | None:
    reason = _positive(params, ("T", "E", "k", "bs"))
    return reason or ("k must not exceed E" if params["k"] > params["E"] else None)


def _align_check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    check_aligned(inputs["topk_ids"], expected["block_size"], expected["experts"], outputs)
    return _NONE


_ALIGN = OpBench(
    family="routing",
    op="moe_align_block_size",
    params={"T": None, "E": None, "k": None, "bs": None},
    invalid=_align_invalid,
    make=_make_ids,
    call=lambda case, inputs: ((inputs["topk_ids"], case["bs"], case["E"]), {}),
    out=lambda case, inputs: empty(case, inputs["topk_ids"].device),
    bytes_moved=lambda case: 4 * case["T"] * case["k"] + _aligned_bytes(case),
    reference=lambda case, inputs: {"block_size": case["bs"], "experts": case["E"]},
    check=_align_check,
    hot=True,  # the ids come from the router's kernel just before
)

# topk_softmax_align: the two benches' checks, one after the other


def _fused_call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (inputs["scores"], case["k"], case["bs"]), routing.options_of(case, inputs)


def _fused_out(case: Any, inputs: Inputs) -> Any:
    weights, indices = routing.BENCHES[0].out(case, inputs)
    return weights, indices, *empty(case, weights.device)


def _fused_reference(case: Any, inputs: Inputs) -> Any:
    found = routing.BENCHES[0].reference(case, inputs)
    return found | {"block_size": case["bs"], "experts": case["E"]}


def _fused_check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    error = routing.BENCHES[0].check(inputs, expected, outputs[:2], launch)
    check_aligned(outputs[1], expected["block_size"], expected["experts"], outputs[2:])
    return error


_FUSED = OpBench(
    family="routing",
    op="topk_softmax_align",
    params=routing.BENCHES[0].params | {"bs": None},
    invalid=lambda params: _positive(params, ("bs",)) or routing.BENCHES[0].invalid(params),
    make=routing.BENCHES[0].make,
    call=_fused_call,
    out=_fused_out,
    bytes_moved=lambda case: routing.BENCHES[0].bytes_moved(case) + _aligned_bytes(case),
    reference=_fused_reference,
    check=_fused_check,
    hot=True,
)

# moe_sum


def _make_sum(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (case["T"], case["k"], case["H"])
    x = torch.randn(shape, device=device, generator=generator, dtype=getattr(torch, case.dtype))
    weights = torch.rand(shape[:2], device=device, generator=generator)
    return {"x": x, "weights": weights if case["weighted"] else None}


def _sum_bytes(case: Any) -> int:
    elements = case["T"] * (case["k"] + 1) * case["H"] * _ELEMENT[case.dtype]
    return int(elements + (4 * case["T"] * case["k"] if case["weighted"] else 0))


def _sum_reference(case: Any, inputs: Inputs) -> Any:
    from tiercel import ref

    x = inputs["x"]
    if x.numel() > 1 << 28:  # in float64 it would not fit beside the inputs
        parts = [_sum_of(ref, inputs, slice(i, i + 512)) for i in range(0, len(x), 512)]
        import torch

        return torch.cat(parts)
    return _sum_of(ref, inputs, slice(None))


def _sum_of(ref: Any, inputs: Inputs, rows: slice) -> Any:
    weights = inputs["weights"]
    return ref.moe_sum(inputs["x"][rows].double(), None if weights is None else weights[rows])


def _sum_check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    import torch

    (out,) = outputs
    if out.shape != expected.shape:
        raise WrongResult(f"shape {tuple(out.shape)}")
    errors = (out.double() - expected).abs()
    scale = float(expected.abs().max())
    # The last rounding, and float32 sums before it; peers may round in between too.
    tolerance = (2 if launch.exact else 16) * torch.finfo(out.dtype).eps * scale
    if not bool(torch.isfinite(errors).all()) or float(errors.max()) > tolerance:
        raise WrongResult(f"off by {float(errors.max()):.1e}, tolerance {tolerance:.1e}")
    rms = errors.square().mean().sqrt() / expected.square().mean().sqrt()
    return Error(rms=float(rms), maximum=float(errors.max()) / scale)


_SUM = OpBench(
    family="routing",
    op="moe_sum",
    params={"T": None, "k": None, "H": None, "weighted": False},
    invalid=lambda params: _positive(params, ("T", "k", "H")),
    make=_make_sum,
    call=lambda case, inputs: ((inputs["x"], inputs["weights"]), {}),
    out=lambda case, inputs: inputs["x"].new_empty((case["T"], case["H"])),
    bytes_moved=_sum_bytes,
    reference=_sum_reference,
    check=_sum_check,
)

BENCHES = [_ALIGN, _FUSED, _SUM]
