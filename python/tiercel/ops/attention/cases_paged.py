# SPDX-License-Identifier: Apache-2.0
"""Attention of any number of queries a sequence over a paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.ops.attention.cases_decode import CACHES, PAGES, rows_of_head
from tiercel.ops.attention.cases_varlen import check
from tiercel.workbench.bench.ops import Inputs, OpBench

_SIZES = ("new", "H", "Hk", "D")
_COUNTS = ("B", "context", "decoding")


def lengths(case: Any) -> list[tuple[int, int]]:
    """New tokens and keys: of the decoding sequences, then of the others."""
    context, new = int(case["context"]), int(case["new"])
    return [(1, context + 1)] * int(case["decoding"]) + [(new, context + new)] * int(case["B"])


def _invalid(params: Mapping[str, Any]) -> str | None:
    if params["cache"] not in CACHES:
        return f"`cache` must be one of {', '.join(CACHES)}"
    if not isinstance(params["tree"], bool) or (params["tree"] and params["new"] > 64):
        return "`tree` must be true or false, and false for more than 64 new tokens"
    if params["page"] not in PAGES:
        return f"`page` must be one of {', '.join(map(str, PAGES))}"
    if not all(isinstance(params[n], int) and params[n] > 0 for n in _SIZES):
        return "new, H, Hk and D must be positive whole numbers"
    if not all(isinstance(params[n], int) and params[n] >= 0 for n in _COUNTS):
        return "B, context and decoding must be whole numbers"
    if params["B"] + params["decoding"] == 0:
        return "B or decoding must be positive"
    if params["H"] % params["Hk"]:
        return "Hk must divide H"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype, of_each = getattr(torch, case.dtype), lengths(case)
    page, columns = case["page"], -(-max(keys for _, keys in of_each) // case["page"])
    pages = len(of_each) * columns
    stored = dtype if case["cache"] == "same" else getattr(torch, case["cache"])

    def random(*shape: int) -> Any:
        return torch.randn(shape, device=device, generator=generator, dtype=dtype)

    starts = torch.tensor([0, *(new for new, _ in of_each)]).cumsum(0).int()
    table = torch.randperm(pages, device=device, generator=generator)
    return {
        "q": random(int(starts[-1]), case["H"], case["D"]),
        "k_cache": random(pages, page, case["Hk"], case["D"]).to(stored),
        "v_cache": random(pages, page, case["Hk"], case["D"]).to(stored),
        "page_table": table.view(len(of_each), columns).int(),
        "seqused_k": torch.tensor([keys for _, keys in of_each]).int().to(device),
        "cu_seqlens_q": starts.to(device),
    }


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    longest, options = max(new for new, _ in lengths(case)), {}
    if case["tree"]:
        options["tree_mask"] = _binary_trees(case, inputs["q"].device)
    return (*inputs.values(), longest), options


def _binary_trees(case: Any, device: Any) -> Any:
    """Each new token's ancestors and itself."""
    import torch

    words = [1]
    while len(words) < int(case["new"]):
        words.append(words[(len(words) - 1) // 2] | 1 << len(words))
    words = [word - (word >> 63 << 64) for word in words]
    of_all = [1] * int(case["decoding"]) + words * int(case["B"])
    return torch.tensor(of_all, dtype=torch.int64, device=device)


def _bytes(case: Any) -> int:
    of_each = lengths(case)
    keys, queries = (sum(n) for n in zip(*((k, new) for new, k in of_each), strict=True))
    of_keys = 2 * keys * int(case["Hk"]) * CACHES[case["cache"]]
    return int(case["D"]) * (of_keys + 4 * queries * int(case["H"]))


def _flops(case: Any) -> int:
    """Operations; half of the square of the new tokens, as is customary."""
    scores = sum(new * keys - new * new // 2 if new > 1 else keys for new, keys in lengths(case))
    return 4 * int(case["H"] * case["D"]) * scores


def _reference(case: Any, inputs: Inputs) -> Any:
    """float64, of some heads of the first and the last sequence, 512 queries at most."""
    import torch

    q, k, v, table = (inputs[n] for n in ("q", "k_cache", "v_cache", "page_table"))
    page, share, of_each = k.shape[1], q.shape[1] // k.shape[2], lengths(case)
    found = []
    for b in sorted({0, len(of_each) - 1}):
        new, keys = of_each[b]
        end = sum(n for n, _ in of_each[: b + 1])
        rows = torch.arange(max(end - new, end - 512), end, device=q.device)
        key = torch.arange(keys, device=q.device)
        places = table[b].long()[key // page], key % page
        for head in sorted({0, q.shape[1] - 1}):
            stored = (rows_of_head(cache, head // share, places) for cache in (k, v))
            of_keys, of_values = stored
            scores = q[rows, head].double() @ of_keys.T * q.shape[2] ** -0.5
            hidden = key > (rows - end + keys)[:, None]
            if case["tree"] and new > 1:
                words = _binary_trees(case, q.device)[rows, None]
                hidden = (key >= keys - new) & (words >> (key - keys + new).clamp(0) & 1 == 0)
            scores.masked_fill_(hidden, -torch.inf)
            found.append((rows, head, scores.softmax(-1) @ of_values))
    return found


BENCHES = [
    OpBench(
        family="attention",
        op="paged_attention",
        params={
            "B": 1,
            "new": 1,
            "context": 0,
            "decoding": 0,
            "H": 32,
            "Hk": 8,
            "D": 128,
            "page": 16,
            "cache": "same",
            "tree": False,
        },
        invalid=_invalid,
        make=_make,
        call=_call,
        out=lambda case, inputs: inputs["q"].new_empty(inputs["q"].shape),
        bytes_moved=_bytes,
        flops=_flops,
        reference=_reference,
        check=check,
    )
]
