# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention, and the selection before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.ops.mla.cases import close
from tiercel.ops.mla.spec import LATENT, PACKED, ROTARY
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_COLUMNS = LATENT + ROTARY
_SCALE = 192**-0.5
_PAGE = 64
_WIDTHS = {"same": 2 * _COLUMNS, "uint8": PACKED}  # bytes of a row


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not all(isinstance(params[n], int) and params[n] > 0 for n in ("T", "H", "k", "L")):
        return "T, H, k and L must be positive whole numbers"
    return None if params["cache"] in _WIDTHS else f"`cache` must be one of {', '.join(_WIDTHS)}"


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    from tiercel.ops.mla.reference import mla_cache_write

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    pages = -(-case["L"] // _PAGE)
    cache = torch.empty(pages * _PAGE, _COLUMNS, dtype=dtype, device=device)
    cache.normal_(generator=generator)
    if case["cache"] == "uint8":
        packed = torch.zeros(pages, _PAGE, PACKED, dtype=torch.uint8, device=device)
        slots = torch.arange(len(cache), device=device)
        cache = mla_cache_write(*cache.split((LATENT, ROTARY), 1), packed, slots)
    shape = (case["T"], case["k"])
    return {
        "q": torch.randn(case["T"], case["H"], _COLUMNS, device=device, generator=generator).to(
            dtype
        ),
        "kv_cache": cache.view(pages, _PAGE, -1),
        "indices": torch.randint(case["L"], shape, device=device, generator=generator).int(),
    }


def _reference(case: Any, inputs: Inputs) -> Any:
    """float64, of the first and the last query."""
    from tiercel.ops.mla.reference import mla_sparse_attention

    ends = [0, len(inputs["q"]) - 1]
    q, indices = inputs["q"][ends].double(), inputs["indices"][ends]
    cache = inputs["kv_cache"]
    cache = cache if case["cache"] == "uint8" else cache.double()
    return mla_sparse_attention(q, cache, indices, scale=_SCALE)


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    (result,) = outputs
    q = inputs["q"]
    if result.shape != (*q.shape[:2], LATENT) or result.dtype != q.dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    return close(result[[0, len(q) - 1]], expected)


def _flops(case: Any) -> int:
    return 2 * int(case["T"] * case["k"] * case["H"]) * (_COLUMNS + LATENT)


def _bytes(case: Any) -> int:
    """Each row of the cache that is read, once."""
    rows = min(int(case["L"]), int(case["T"] * case["k"]))
    tokens = int(case["T"])
    return (
        rows * _WIDTHS[case["cache"]]
        + 2 * tokens * int(case["H"]) * (_COLUMNS + LATENT)
        + 4 * tokens * int(case["k"])
    )


def _invalid_top_k(params: Mapping[str, Any]) -> str | None:
    whole = all(isinstance(params[n], int) and params[n] > 0 for n in ("T", "N", "k"))
    return None if whole else "T, N and k must be positive whole numbers"


def _make_top_k(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    return {"logits": torch.randn(case["T"], case["N"], device=device, generator=generator)}


def _reference_top_k(case: Any, inputs: Inputs) -> Any:
    from tiercel.ops.mla.reference import top_k_indices

    return top_k_indices(inputs["logits"], case["k"])


def _check_top_k(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Other orders of the same indices are right, too."""
    (result,) = outputs
    differing = int((result.sort(dim=1).values != expected.sort(dim=1).values).sum())
    if differing:
        raise WrongResult(f"{differing} indices differ")
    return Error(rms=0.0, maximum=0.0)


def _make_indexer(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, device=device, generator=generator)

    tokens, keys, heads = case["T"], case["K"], case["H"]
    return {
        "q": drawn(tokens, heads, 128).to(torch.float8_e4m3fn),
        "k": drawn(keys, 128).to(torch.float8_e4m3fn),
        "k_scale": drawn(keys).abs(),
        "weights": drawn(tokens, heads),
    }


def _reference_indexer(case: Any, inputs: Inputs) -> Any:
    """float64, of the first and the last token, and the sums of magnitudes."""
    from tiercel.ops.mla.reference import indexer_logits

    q, k, k_scale, weights = inputs.values()
    ends = [0, len(q) - 1]
    weights = weights[ends].double()
    return tuple(indexer_logits(q[ends], k, k_scale, w) for w in (weights, weights.abs()))


def _check_indexer(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Against the sum of magnitudes: the tensor cores keep about 13 bits."""
    (result,) = outputs
    truth, terms = expected
    errors = (result[[0, len(result) - 1]].double() - truth).abs()
    worst = float((errors / (terms + terms.mean())).max())
    if not worst <= 2.0**-11:
        raise WrongResult(f"a result is off by {worst:.1e} of its terms, {2.0**-11:.1e} is allowed")
    rms = float(errors.square().mean().sqrt() / truth.square().mean().sqrt())
    return Error(rms=rms, maximum=float(errors.max() / truth.abs().max()))


def _invalid_indexer(params: Mapping[str, Any]) -> str | None:
    whole = all(isinstance(params[n], int) and params[n] > 0 for n in ("T", "K", "H"))
    return None if whole else "T, K and H must be positive whole numbers"


BENCHES = [
    OpBench(
        family="mla",
        op="indexer_logits",
        params={"T": None, "K": None, "H": 64},
        invalid=_invalid_indexer,
        make=_make_indexer,
        call=lambda case, inputs: (tuple(inputs.values()), {}),
        out=lambda case, inputs: None,
        bytes_moved=lambda case: (
            int(case["T"]) * (132 * int(case["H"]) + 4 * int(case["K"])) + 132 * int(case["K"])
        ),
        flops=lambda case: 2 * int(case["T"] * case["K"] * case["H"]) * 128,
        reference=_reference_indexer,
        check=_check_indexer,
    ),
    OpBench(
        family="mla",
        op="mla_sparse_attention",
        params={"T": None, "H": 128, "k": 2048, "L": 131072, "cache": "same"},
        invalid=_invalid,
        make=_make,
        call=lambda case, inputs: (tuple(inputs.values()), {"scale": _SCALE}),
        out=lambda case, inputs: inputs["q"].new_empty((*inputs["q"].shape[:2], LATENT)),
        bytes_moved=_bytes,
        flops=_flops,
        reference=_reference,
        check=_check,
    ),
    OpBench(
        family="mla",
        op="top_k_indices",
        params={"T": None, "N": None, "k": 2048},
        invalid=_invalid_top_k,
        make=_make_top_k,
        call=lambda case, inputs: ((inputs["logits"], case["k"]), {}),
        out=lambda case, inputs: None,
        bytes_moved=lambda case: 4 * int(case["T"]) * int(case["N"] + case["k"]),
        reference=_reference_top_k,
        check=_check_top_k,
    ),
]
