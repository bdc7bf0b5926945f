# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences of several lengths behind each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench, judged

FLOAT8 = "float8_e4m3fn"


def lengths(case: Any) -> list[int]:
    """1/4, 2/4, 3/4, 4/4 of L in turn."""
    return [max(int(case["L"]) * (i % 4 + 1) // 4, 1) for i in range(int(case["B"]))]


def _columns(case: Any) -> tuple[int, int]:
    """The head dimensions of keys and of values."""
    return int(case["D"]), int(case["Dv"] or case["D"])


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not isinstance(params["causal"], bool):
        return "`causal` must be true or false"
    if not all(isinstance(params[n], int) and params[n] > 0 for n in ("B", "L", "H", "Hk", "D")):
        return "B, L, H, Hk and D must be positive whole numbers"
    if not isinstance(params["Dv"], int) or params["Dv"] < 0:
        return "Dv must be a whole number"
    if params["H"] % params["Hk"]:
        return "Hk must divide H"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    starts = torch.tensor([0, *lengths(case)]).cumsum(0).int().to(device)

    def random(heads: int, d: int) -> Any:
        shape = (sum(lengths(case)), heads, d)
        drawn = torch.randn(shape, device=device, generator=generator)
        return drawn.to(getattr(torch, case.dtype))

    d, d_v = _columns(case)
    q, k, v = random(case["H"], d), random(case["Hk"], d), random(case["Hk"], d_v)
    inputs = {"q": q, "k": k, "v": v, "cu_seqlens_q": starts, "cu_seqlens_k": starts.clone()}
    if case.dtype == FLOAT8:
        one = torch.ones(case["B"], case["Hk"], device=device)
        inputs |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), one)
    return inputs


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = list(inputs.items())
    longest = max(lengths(case))
    packed = (*(value for _, value in given[:5]), longest, longest)
    return packed, {"causal": case["causal"], **dict(given[5:])}


def _bytes(case: Any) -> int:
    element, (d, d_v) = 1 if case.dtype == FLOAT8 else 2, _columns(case)
    row = element * (d * case["H"] + (d + d_v) * case["Hk"]) + 2 * d_v * case["H"]
    return sum(lengths(case)) * int(row)


def _flops(case: Any) -> int:
    """Operations; half of a causal square, as is customary."""
    scores = sum(n * n - (n * n // 2 if case["causal"] else 0) for n in lengths(case))
    return 2 * int(case["H"]) * sum(_columns(case)) * scores


def _reference(case: Any, inputs: Inputs) -> Any:
    """float64, of some heads of the shortest and the longest sequence, 512 queries at most."""
    import torch

    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    share, used = q.shape[1] // k.shape[1], lengths(case)
    found = []
    for b in sorted({0, used.index(max(used))}):
        first, end = sum(used[:b]), sum(used[: b + 1])
        rows = torch.arange(max(first, end - 512), end, device=q.device)
        hidden = torch.arange(first, end, device=q.device) > rows[:, None]
        for head in sorted({0, q.shape[1] - 1}):
            keys, values = (x[first:end, head // share].double() for x in (k, v))
            scores = q[rows, head].double() @ keys.T * q.shape[2] ** -0.5
            if case["causal"]:
                scores.masked_fill_(hidden, -torch.inf)
            found.append((rows, head, scores.softmax(-1) @ values))
    return found


def check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """The check of `attention`."""
    import torch

    (result,) = outputs
    float8 = "q_descale" in inputs
    dtype = torch.bfloat16 if float8 else inputs["q"].dtype
    values = inputs["v"] if "v" in inputs else inputs["v_cache"]
    shape = (*inputs["q"].shape[:-1], values.shape[-1])
    if result.shape != shape or result.dtype != dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    unit = torch.finfo(inputs["q"].dtype).eps / 2
    of_largest, of_rms = (4.0, 0.8) if float8 else (6.0, 2.5)
    errors = torch.cat([(result[rows, head].double() - x).abs() for rows, head, x in expected])
    truth = torch.cat([x for _, _, x in expected])
    return judged(errors, truth, of_largest * unit * (truth.abs() + 1), of_rms * unit)


BENCHES = [
    OpBench(
        family="attention",
        op="attention_varlen",
        params={"B": None, "L": None, "H": 32, "Hk": 8, "D": 128, "Dv": 0, "causal": True},
        invalid=_invalid,
        make=_make,
        call=_call,
        out=lambda case, inputs: None,
        bytes_moved=_bytes,
        flops=_flops,
        reference=_reference,
        check=check,
    )
]
