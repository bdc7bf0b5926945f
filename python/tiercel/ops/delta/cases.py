# SPDX-License-Identifier: Apache-2.0
"""gated_delta_rule over prompts, and steps with a pool of states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult, in_place
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
_SIZE = 128  # of keys and values
_CHUNK = 64


def _invalid(params: Mapping[str, Any]) -> str | None:
    sizes = [value for value in params.values() if isinstance(value, int)]
    if not all(size > 0 for size in sizes):
        return "sizes must be positive whole numbers"
    if params["Hv"] % params["Hk"]:
        return "Hk must divide Hv"
    if params.get("gate", "head") not in ("head", "channel"):
        return "`gate` must be head or channel"
    if params.get("state", "float32") not in ("float32", "bfloat16"):
        return "`state` must be float32 or bfloat16"
    return None


def _inputs(case: Any, device: str, seed: int, tokens: int, channels: bool) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype, batch = getattr(torch, case.dtype), case["B"]

    def random(*shape: int) -> Any:
        return torch.randn(shape, device=device, generator=generator)

    q, k = (random(batch, tokens, case["Hk"], _SIZE).to(dtype) for _ in range(2))
    v = random(batch, tokens, case["Hv"], _SIZE).to(dtype)
    g = random(batch, tokens, case["Hv"], *([_SIZE] if channels else []))
    g = torch.nn.functional.logsigmoid(g + 3.0)
    return {"q": q, "k": k, "v": v, "g": g, "beta": random(*v.shape[:3]).sigmoid()}


def _make(case: Any, device: str, seed: int) -> Inputs:
    return _inputs(case, device, seed, case["T"], case["gate"] == "channel")


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(inputs.values()), {"qk_l2norm": True}


def _bytes(case: Any) -> int:
    """q, k, v and out, g and beta."""
    heads = (2 * case["Hk"] + 2 * case["Hv"]) * _SIZE * _ELEMENT[case.dtype] + 4 * case["Hv"]
    gates = 4 * case["Hv"] * (_SIZE if case["gate"] == "channel" else 1)
    return int(case["B"] * case["T"] * (heads + gates))


def _flops(case: Any) -> int:
    """Operations in chunks of 64: three products with the state, and half of four of 64 x 64."""
    of_token = 2 * (3 * _SIZE * _SIZE + 4 * _CHUNK * _SIZE // 2)
    return int(case["B"] * case["T"] * case["Hv"] * of_token)


_LOOKED_AT = 512  # tokens that the recurrence goes through; the first of each sequence


def _reference(case: Any, inputs: Inputs) -> Any:
    from tiercel.ops.delta.reference import gated_delta_rule

    few = [t[:, :_LOOKED_AT] for t in inputs.values()]
    out = gated_delta_rule(*(t.double() for t in few), qk_l2norm=True)
    return (out,)


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """The results' errors as a part of their size."""
    due = expected[0]
    got = outputs[0]
    if got.shape != inputs["v"].shape or got.dtype != inputs["v"].dtype:
        raise WrongResult(f"shape {tuple(got.shape)}, {got.dtype}")
    got = got[:, : due.shape[1]].double()
    rms = float((got - due).norm() / due.norm())
    if not rms <= 2**-6:
        raise WrongResult(f"results are off by {rms:.2g} of their size")
    return Error(rms=rms, maximum=float((got - due).abs().max() / due.abs().max()))


def _make_decode(case: Any, device: str, seed: int) -> Inputs:
    import torch

    made = _inputs(case, device, seed, 1, case["gate"] == "channel")
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    slots = case["B"] + case["B"] // 4 + 1
    states = torch.randn(slots, case["Hv"], _SIZE, _SIZE, device=device, generator=generator).to(
        getattr(torch, case["state"])
    )
    order = torch.randperm(slots, device=device, generator=generator)[: case["B"]]
    return made | {"states": states, "state_indices": order.int(), "first": states.clone()}


def _call_decode(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    *given, states, indices, _ = inputs.values()
    out = inputs["v"].new_empty(inputs["v"].shape)
    return (*given, states, out, indices), {"qk_l2norm": True}


def _ours_decode(case: Any, inputs: Inputs, backend: str) -> Launch:
    import tiercel

    given, options = _call_decode(case, inputs)

    def run() -> tuple[Any]:
        return (tiercel.gated_delta_rule_decode(*given, **options, backend=backend)[1],)

    expected = _reference_decode(case, inputs)
    return in_place(
        run,
        reset=lambda: inputs["states"].copy_(inputs["first"]),
        check=lambda outputs: _check(inputs, expected, outputs, Launch(run)),
    )


def _bytes_decode(case: Any) -> int:
    """Each state read and written."""
    return int(2 * case["B"] * case["Hv"] * _SIZE * _SIZE * _ELEMENT[case["state"]])


def _reference_decode(case: Any, inputs: Inputs) -> Any:
    from tiercel.ops.delta.reference import gated_delta_rule

    *given, _, indices, first = inputs.values()
    state = first[indices.long()].double()
    out = gated_delta_rule(*(t.double() for t in given), initial_state=state, qk_l2norm=True)
    return (out,)


BENCHES = [
    OpBench(
        family="delta",
        op="gated_delta_rule",
        params={"B": 1, "T": None, "Hk": None, "Hv": None, "gate": "head"},
        invalid=_invalid,
        make=_make,
        call=_call,
        out=lambda case, inputs: None,
        bytes_moved=_bytes,
        flops=_flops,
        reference=_reference,
        check=_check,
    ),
    OpBench(
        family="delta",
        op="gated_delta_rule_decode",
        params={"B": None, "Hk": None, "Hv": None, "gate": "head", "state": "float32"},
        invalid=_invalid,
        make=_make_decode,
        call=_call_decode,
        out=lambda case, inputs: None,
        bytes_moved=_bytes_decode,
        reference=_reference_decode,
        check=_check,
        ours=_ours_decode,
    ),
]
