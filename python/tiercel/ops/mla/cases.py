# SPDX-License-Identifier: Apache-2.0
"""Latent attention, and writes into its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.ops.mla.spec import LATENT, PACKED, ROTARY
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench, judged

_COLUMNS = LATENT + ROTARY
SCALE = 192**-0.5
PAGES = (1, 16, 32, 64, 128)
CACHES = {"same": 2 * _COLUMNS, "float8_e4m3fn": _COLUMNS, "uint8": PACKED}  # bytes of a row


def close(result: Any, truth: Any) -> Error:
    """Over many keys, results are small beside values of about 1 whose weights are rounded."""
    import torch

    unit = torch.finfo(result.dtype).eps / 2
    tolerance = 8 * unit * (truth.abs() + truth.square().mean().sqrt())
    return judged((result.double() - truth).abs(), truth, tolerance, 2.5 * unit)


def lengths(case: Any) -> list[int]:
    """All the same, or of a ragged batch 1/4, 2/4, 3/4, 4/4 of L in turn."""
    batch, length = int(case["B"]), int(case["L"])
    if not case["ragged"]:
        return [length] * batch
    return [max(length * (i % 4 + 1) // 4, 1) for i in range(batch)]


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not isinstance(params["ragged"], bool):
        return "`ragged` must be true or false"
    if params["page"] not in PAGES:
        return f"`page` must be one of {', '.join(map(str, PAGES))}"
    if not all(isinstance(params[n], int) and params[n] > 0 for n in ("B", "L", "Sq", "H")):
        return "B, L, Sq and H must be positive whole numbers"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    batch, page = case["B"], case["page"]
    columns = -(-case["L"] // page)
    pages = batch * columns
    cache = torch.empty(pages, page, _COLUMNS, dtype=dtype, device=device)
    for part in cache.split(max(1, (1 << 26) // (page * _COLUMNS))):
        part.normal_(generator=generator)
    shape = (batch, case["Sq"], case["H"], _COLUMNS)
    table = torch.randperm(pages, device=device, generator=generator).view(batch, columns)
    return {
        "q": torch.randn(shape, device=device, generator=generator).to(dtype),
        "kv_cache": cache,
        "page_table": table.int(),
        "seqused_k": torch.tensor(lengths(case), dtype=torch.int32, device=device),
    }


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(inputs.values()), {"scale": SCALE}


def _bytes(case: Any) -> int:
    rows = int(case["B"] * case["Sq"] * case["H"])
    return sum(lengths(case)) * CACHES["same"] + 2 * rows * (_COLUMNS + LATENT)


def _flops(case: Any) -> int:
    return 2 * sum(lengths(case)) * int(case["Sq"] * case["H"]) * (_COLUMNS + LATENT)


def _reference(case: Any, inputs: Inputs) -> Any:
    """float64, of some heads of the first and the last sequence."""
    import torch

    q, cache, table = (inputs[n] for n in ("q", "kv_cache", "page_table"))
    page, queries = cache.shape[1], q.shape[1]
    found = []
    for b in sorted({0, q.shape[0] - 1}):
        key = torch.arange(int(inputs["seqused_k"][b]), device=q.device)
        own = len(key) - queries + torch.arange(queries, device=q.device)[:, None]
        keys = cache[table[b].long()[key // page], key % page].double()
        for head in sorted({0, q.shape[2] // 2, q.shape[2] - 1}):
            scores = q[b, :, head].double() @ keys.T * SCALE
            scores.masked_fill_(key > own, -torch.inf)
            found.append((b, head, scores.softmax(-1) @ keys[:, :LATENT]))
    return found


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    import torch

    (result,) = outputs
    q = inputs["q"]
    if result.shape != (*q.shape[:3], LATENT) or result.dtype != q.dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    pairs = [(result[b, :, head], x) for b, head, x in expected]
    return close(*(torch.cat(each) for each in zip(*pairs, strict=True)))


def _invalid_write(params: Mapping[str, Any]) -> str | None:
    if not isinstance(params["T"], int) or params["T"] < 1:
        return "T must be a positive whole number"
    return None if params["cache"] in CACHES else f"`cache` must be one of {', '.join(CACHES)}"


def _make_write(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    tokens, kind = case["T"], case["cache"]
    rows = torch.randn(tokens, _COLUMNS, device=device, generator=generator)
    rows = rows.to(getattr(torch, case.dtype))
    blocks, width = -(-tokens // 64) + 1, PACKED if kind == "uint8" else _COLUMNS
    dtype = case.dtype if kind == "same" else kind
    slots = torch.randperm(blocks * 64, device=device, generator=generator)[:tokens]
    return {
        "latent": rows[:, :LATENT].contiguous(),
        "rotary": rows[:, LATENT:].contiguous(),
        "kv_cache": torch.zeros(blocks, 64, width, dtype=getattr(torch, dtype), device=device),
        "slots": slots,
    }


def _call_write(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(inputs.values()), {}


def _bytes_write(case: Any) -> int:
    return int(case["T"]) * (CACHES["same"] + CACHES[case["cache"]] + 8)


def _reference_write(case: Any, inputs: Inputs) -> Any:
    from tiercel.ops.mla.reference import mla_cache_write

    cache = inputs["kv_cache"].clone()
    return mla_cache_write(inputs["latent"], inputs["rotary"], cache, inputs["slots"])


def _check_write(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    import torch

    (result,) = outputs
    differing = int((result.view(torch.uint8) != expected.view(torch.uint8)).sum())
    if differing:
        raise WrongResult(f"{differing} bytes differ")
    return Error(rms=0.0, maximum=0.0)


BENCHES = [
    OpBench(
        family="mla",
        op="mla_decode",
        params={"B": None, "L": None, "H": 128, "page": 64, "Sq": 1, "ragged": False},
        invalid=_invalid,
        make=_make,
        call=_call,
        out=lambda case, inputs: inputs["q"].new_empty((*inputs["q"].shape[:3], LATENT)),
        bytes_moved=_bytes,
        flops=_flops,
        reference=_reference,
        check=_check,
    ),
    OpBench(
        family="mla",
        op="mla_cache_write",
        params={"T": None, "cache": "same"},
        invalid=_invalid_write,
        make=_make_write,
        call=_call_write,
        out=lambda case, inputs: None,
        bytes_moved=_bytes_write,
        reference=_reference_write,
        check=_check_write,
    ),
]
