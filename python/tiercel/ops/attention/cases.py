# SPDX-License-Identifier: Apache-2.0
"""Attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench, judged

_FLOAT8 = "float8_e4m3fn"


def _keys(case: Any) -> int:
    return int(case["Sk"] or case["Sq"])


def _kv_heads(case: Any) -> int:
    return int(case["Hk"] or case["H"])


def _columns(case: Any) -> tuple[int, int]:
    """The head dimensions of keys and of values."""
    return int(case["D"]), int(case["Dv"] or case["D"])


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not isinstance(params["causal"], bool):
        return "`causal` must be true or false"
    if not all(isinstance(params[n], int) and params[n] > 0 for n in ("B", "Sq", "H", "D")):
        return "B, Sq, H and D must be positive whole numbers"
    if not all(isinstance(params[n], int) and params[n] >= 0 for n in ("Sk", "Hk", "Dv")):
        return "Sk, Hk and Dv must be whole numbers"
    if params["Hk"] and params["H"] % params["Hk"]:
        return "Hk must divide H"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(length: int, heads: int, d: int) -> Any:
        shape = (case["B"], length, heads, d)
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    keys, kv_heads, (d, d_v) = _keys(case), _kv_heads(case), _columns(case)
    q = random(case["Sq"], case["H"], d)
    inputs = {"q": q, "k": random(keys, kv_heads, d), "v": random(keys, kv_heads, d_v)}
    if case.dtype == _FLOAT8:
        inputs["one"] = torch.ones(case["B"], kv_heads, device=device)
    return inputs


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = {"causal": case["causal"]}
    if case.dtype == _FLOAT8:
        options |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), inputs["one"])
    return (inputs["q"], inputs["k"], inputs["v"]), options


def _out(case: Any, inputs: Inputs) -> Any:
    import torch

    q, v = inputs["q"], inputs["v"]
    shape = (*q.shape[:-1], v.shape[-1])
    return q.new_empty(shape, dtype=torch.bfloat16 if case.dtype == _FLOAT8 else q.dtype)


def _bytes(case: Any) -> int:
    element = 1 if case.dtype == _FLOAT8 else 2
    queries, keys = int(case["Sq"] * case["H"]), _keys(case) * _kv_heads(case)
    d, d_v = _columns(case)
    read = d * queries + (d + d_v) * keys
    return int(case["B"]) * (element * read + 2 * d_v * queries)


def _flops(case: Any) -> int:
    """Operations for the scores that the mask leaves; half of a causal square, as is customary."""
    queries, keys = int(case["Sq"]), _keys(case)
    scores = queries * keys
    if case["causal"]:
        scores -= queries * min(queries, keys) // 2
    return 2 * int(case["B"] * case["H"]) * sum(_columns(case)) * scores


def _reference(case: Any, inputs: Inputs) -> Any:
    """float64, of some heads, and of long ones 512 queries at each end."""
    import torch

    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    share = q.shape[2] // k.shape[2]
    rows = torch.arange(q.shape[1], device=q.device)
    if q.shape[1] > 1024:
        rows = torch.cat([rows[:512], rows[-512:]])
    found = []
    for head in sorted({0, q.shape[2] // 2, q.shape[2] - 1}):
        queries = q[-1, rows, head].double()
        keys, values = (x[-1, :, head // share].double() for x in (k, v))
        scores = queries @ keys.T * q.shape[3] ** -0.5
        if case["causal"]:
            own = rows[:, None] + k.shape[1] - q.shape[1]
            scores.masked_fill_(torch.arange(k.shape[1], device=q.device) > own, -torch.inf)
        found.append((head, scores.softmax(-1) @ values))
    return rows, found


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Probabilities and results are rounded to the dtype, u (half a unit in the last place) each.

    What a rounded sum is off by goes with the values' size, about 1, times the root of the sum of
    the squared probabilities; a row with one key has it all, and its result is exact. Probabilities
    of float8 inputs are rounded to float8.
    """
    import torch

    (result,) = outputs
    float8 = "one" in inputs
    dtype = torch.bfloat16 if float8 else inputs["q"].dtype
    shape = (*inputs["q"].shape[:-1], inputs["v"].shape[-1])
    if result.shape != shape or result.dtype != dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    unit = torch.finfo(inputs["q"].dtype).eps / 2
    of_largest, of_rms = (4.0, 0.8) if float8 else (6.0, 2.5)
    rows, heads = expected
    errors = torch.cat([(result[-1, rows, head].double() - x).abs_() for head, x in heads])
    truth = torch.cat([x for _, x in heads])
    return judged(errors, truth, of_largest * unit * (truth.abs() + 1), of_rms * unit)


def _torch_sdpa(case: Any, inputs: Inputs) -> Callable[[], Any]:
    from torch.nn import functional

    q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
    options = {"is_causal": case["causal"], "enable_gqa": q.shape[1] != k.shape[1]}
    return lambda: functional.scaled_dot_product_attention(q, k, v, **options)


_PARAMS = {"B": None, "Sq": None, "Sk": 0, "H": None, "Hk": 0, "D": None, "Dv": 0}

BENCHES = [
    OpBench(
        family="attention",
        op="attention",
        params=_PARAMS | {"causal": False},
        invalid=_invalid,
        make=_make,
        call=_call,
        out=_out,
        bytes_moved=_bytes,
        flops=_flops,
        reference=_reference,
        check=_check,
        host_baselines={"torch.sdpa": _torch_sdpa},
    )
]
