# SPDX-License-Identifier: Apache-2.0
"""Attention of a few queries a sequence over a paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench, judged

CACHES = {"same": 2, "float8_e4m3fn": 1}  # bytes an element
PAGES = (1, 16, 32, 64, 128, 256)


def lengths(case: Any) -> list[int]:
    """All the same, or of a ragged batch 1/4, 2/4, 3/4, 4/4 of L in turn."""
    batch, length = int(case["B"]), int(case["L"])
    if not case["ragged"]:
        return [length] * batch
    return [max(length * (i % 4 + 1) // 4, 1) for i in range(batch)]


def _invalid(params: Mapping[str, Any]) -> str | None:
    if params["cache"] not in CACHES:
        return f"`cache` must be one of {', '.join(CACHES)}"
    if not isinstance(params["ragged"], bool):
        return "`ragged` must be true or false"
    if params["page"] not in PAGES:
        return f"`page` must be one of {', '.join(map(str, PAGES))}"
    if not all(isinstance(params[n], int) and params[n] > 0 for n in ("B", "L", "Sq", "H", "Hk")):
        return "B, L, Sq, H and Hk must be positive whole numbers"
    if params["H"] % params["Hk"]:
        return "Hk must divide H"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    batch, page, kv_heads, d = (case[name] for name in ("B", "page", "Hk", "D"))
    columns = -(-case["L"] // page)
    pages = batch * columns
    stored = dtype if case["cache"] == "same" else getattr(torch, case["cache"])
    caches = []
    for _ in range(2):
        cache = torch.empty(pages, page, kv_heads, d, dtype=stored, device=device)
        for part in cache.split(max(1, (1 << 26) // (page * kv_heads * d))):
            drawn = torch.randn(part.shape, dtype=dtype, device=device, generator=generator)
            part.copy_(drawn)
        caches.append(cache)
    shape = (batch, case["Sq"], case["H"], d)
    table = torch.randperm(pages, device=device, generator=generator).view(batch, columns)
    return {
        "q": torch.randn(shape, device=device, generator=generator).to(dtype),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "page_table": table.int(),
        "seqused_k": torch.tensor(lengths(case), dtype=torch.int32, device=device),
    }


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(inputs.values()), {}


def _bytes(case: Any) -> int:
    keys = 2 * sum(lengths(case)) * int(case["Hk"]) * CACHES[case["cache"]]
    queries = 2 * int(case["B"] * case["Sq"] * case["H"]) * 2
    return (keys + queries) * int(case["D"])


def _flops(case: Any) -> int:
    return 4 * sum(lengths(case)) * int(case["Sq"] * case["H"] * case["D"])


def rows_of_head(cache: Any, head: int, places: Any) -> Any:
    """float64 rows of one head."""
    import torch

    stored = cache[:, :, head]
    # Not every device indexes float8: its bits are as good.
    bits = stored.view(torch.uint8) if stored.element_size() == 1 else stored
    return bits[places].view(stored.dtype).double()


def _reference(case: Any, inputs: Inputs) -> Any:
    """float64, of some heads of the first and the last sequence."""
    import torch

    q, k, v, table = (inputs[n] for n in ("q", "k_cache", "v_cache", "page_table"))
    page, share, queries = k.shape[1], q.shape[2] // k.shape[2], q.shape[1]
    found = []
    for b in sorted({0, q.shape[0] - 1}):
        key = torch.arange(int(inputs["seqused_k"][b]), device=q.device)
        own = len(key) - queries + torch.arange(queries, device=q.device)[:, None]
        places = table[b].long()[key // page], key % page
        for head in sorted({0, q.shape[2] // 2, q.shape[2] - 1}):
            keys, values = (rows_of_head(cache, head // share, places) for cache in (k, v))
            scores = q[b, :, head].double() @ keys.T * q.shape[3] ** -0.5
            scores.masked_fill_(key > own, -torch.inf)
            found.append((b, head, scores.softmax(-1) @ values))
    return found


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """The check of `attention`. Over many keys, results are small beside values of about 1 whose
    weights are rounded: the error counts beside the root of the sum of the squared weights.
    """
    import torch

    (result,) = outputs
    if result.shape != inputs["q"].shape or result.dtype != inputs["q"].dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    unit = torch.finfo(result.dtype).eps / 2
    # Peers that multiply queries and probabilities in float8 are off by its units.
    exact = inputs["k_cache"].element_size() == 2 or launch.exact
    allowed = unit if exact else 2.0**-5
    truth = torch.cat([x for _, _, x in expected])
    errors = torch.cat([(result[b, :, head].double() - x).abs() for b, head, x in expected])
    scale = truth.square().mean().sqrt()
    return judged(errors, truth, 8 * allowed * (truth.abs() + scale), 2.5 * allowed)


BENCHES = [
    OpBench(
        family="attention",
        op="decode_attention",
        params={
            "B": None,
            "L": None,
            "H": 32,
            "Hk": 8,
            "D": 128,
            "page": 16,
            "Sq": 1,
            "cache": "same",
            "ragged": False,
        },
        invalid=_invalid,
        make=_make,
        call=_call,
        out=lambda case, inputs: inputs["q"].new_empty(inputs["q"].shape),
        bytes_moved=_bytes,
        flops=_flops,
        reference=_reference,
        check=_check,
    )
]
