# SPDX-License-Identifier: Apache-2.0
"""A decoder's layer over a paged cache, dense or with experts: what a mode costs in all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.ops.attention.cases_paged import lengths
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_PAGE = 16
# The sizes of Qwen3-8B's layers, and of Qwen3-30B-A3B's.
_COMMON = {"B": 0, "new": 0, "context": 0, "decoding": 0}
_DENSE = {"hidden": 4096, "H": 32, "Hk": 8, "D": 128, "inner": 12288}
_EXPERTS = {"hidden": 2048, "H": 32, "Hk": 4, "D": 128, "inner": 768, "E": 128, "k": 8}

# The distance of a row from one of plain PyTorch in the same dtype: both round between operators.
_TOLERANCE = 0.03
# The share of rows whose scores are so close that rounding chooses another expert; one may always.
_OTHERWISE = 0.05


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not all(isinstance(n, int) and n >= 0 for n in params.values()):
        return "all must be whole numbers"
    if not params["decoding"] and not (params["B"] and params["new"]):
        return "decoding, or B and new, must be positive"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype, of_each = getattr(torch, case.dtype), lengths(case)
    hidden, heads, kv_heads, d = (int(case[n]) for n in ("hidden", "H", "Hk", "D"))
    inner, experts = int(case["inner"]), (int(case["E"]),) if "E" in case.params else ()
    longest = max(keys for _, keys in of_each)
    columns = -(-longest // _PAGE)
    pages = len(of_each) * columns

    def random(*shape: int) -> Any:
        return torch.randn(shape, device=device, generator=generator, dtype=dtype)

    def weight(*shape: int) -> Any:
        return random(*shape) * shape[-1] ** -0.5

    table = torch.randperm(pages, device=device, generator=generator).view(len(of_each), columns)
    starts = torch.tensor([0, *(new for new, _ in of_each)]).cumsum(0).int()
    places = [torch.arange(keys - new, keys, device=device) for new, keys in of_each]
    slots = [table[b, at // _PAGE] * _PAGE + at % _PAGE for b, at in enumerate(places)]
    inputs = {
        "x": random(int(starts[-1]), hidden),
        "k_cache": random(pages, _PAGE, kv_heads, d),
        "v_cache": random(pages, _PAGE, kv_heads, d),
        "slots": torch.cat(slots),
        "positions": torch.cat(places),
        "angles": random(longest, d),
        "table": table.int(),
        "used": torch.tensor([keys for _, keys in of_each]).int().to(device),
        "starts": starts.to(device),
        "norm_before": 1 + random(hidden) / 8,
        "norm_between": 1 + random(hidden) / 8,
        "norm_q": 1 + random(d) / 8,
        "norm_k": 1 + random(d) / 8,
        "qkv": weight((heads + 2 * kv_heads) * d, hidden),
        "out": weight(hidden, heads * d),
        "up": weight(*experts, 2 * inner, hidden),
        "down": weight(*experts, hidden, inner),
    }
    if experts:
        inputs["router"] = weight(*experts, hidden)
    return inputs


def _layer(case: Any, inputs: Inputs, backend: str) -> Any:
    import torch

    import tiercel

    x, d = inputs["x"], int(case["D"])
    heads = tuple(int(case[n]) for n in ("H", "Hk", "Hk"))
    most_new, most_keys = (max(sizes) for sizes in zip(*lengths(case), strict=True))

    def linear(x: Any, weight: Any, residual: Any = None) -> Any:
        given = {"activation": "none", "residual": residual, "backend": backend}
        return tiercel.linear_act(x, weight, **given)

    normed = tiercel.rms_norm(x, inputs["norm_before"], backend=backend)
    q, k, v = linear(normed, inputs["qkv"]).unflatten(1, (-1, d)).split(heads, 1)
    q, k_cache, v_cache = tiercel.qk_norm_rope_cache(
        *(q, k, v, torch.empty(q.shape, device=q.device, dtype=q.dtype)),
        *(inputs[n] for n in ("k_cache", "v_cache", "slots", "positions", "angles")),
        *(inputs["norm_q"], inputs["norm_k"]),
        backend=backend,
    )
    seen = tiercel.paged_attention(
        *(q, k_cache, v_cache, inputs["table"], inputs["used"], inputs["starts"], most_new),
        max_seqused_k=most_keys,
        backend=backend,
    )
    x = linear(seen.flatten(1), inputs["out"], x)
    normed = tiercel.rms_norm(x, inputs["norm_between"], backend=backend)
    if "router" not in inputs:
        weights = (inputs["up"], inputs["down"])
        return tiercel.fused_mlp(normed, *weights, residual=x, backend=backend)
    scores = linear(normed, inputs["router"])
    factors, ids = tiercel.topk_softmax(scores, case["k"], renormalize=True, backend=backend)
    experts = (inputs["up"], inputs["down"], factors, ids)
    return x + tiercel.fused_moe(normed, *experts, backend=backend)


def _ours(case: Any, inputs: Inputs, backend: str) -> Launch:
    def run() -> tuple[Any, ...]:
        return (_layer(case, inputs, backend),)

    return Launch(run)


def _reference(case: Any, inputs: Inputs) -> Any:
    """Plain PyTorch's, whose sums are float32."""
    return _layer(case, inputs, "ref").float()


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    (result,) = outputs
    if result.shape != expected.shape or result.dtype != inputs["x"].dtype:
        raise WrongResult(f"shape {tuple(result.shape)}, {result.dtype}")
    errors = (result.float() - expected).norm(dim=1) / expected.norm(dim=1)
    if not bool(errors.isfinite().all()):
        raise WrongResult("a result is not finite")
    far = int((errors > _TOLERANCE).sum())
    if far > (max(1, _OTHERWISE * len(errors)) if "router" in inputs else 0):
        raise WrongResult(f"{far} of {len(errors)} rows are off by more than {_TOLERANCE:.0%}")
    return Error(float(errors.median()), float(errors.max()), far)


def _weights(case: Any, tokens: int) -> int:
    """The weights that so many tokens need at least."""
    hidden, d = int(case["hidden"]), int(case["D"])
    of_heads = int(2 * case["H"] + 2 * case["Hk"]) * d
    inner = 3 * int(case["inner"])
    if "E" in case.params:
        inner = inner * min(int(case["E"]), tokens * int(case["k"])) + int(case["E"])
    return hidden * (of_heads + inner)


def _bytes(case: Any) -> int:
    of_each = lengths(case)
    tokens, keys = (sum(n) for n in zip(*of_each, strict=True))
    of_keys = 2 * keys * int(case["Hk"] * case["D"])
    return 2 * (_weights(case, tokens) + of_keys + 2 * tokens * int(case["hidden"]))


def _bench(name: str, sizes: Mapping[str, Any]) -> OpBench:
    return OpBench(
        family="attention",
        op=name,
        params=_COMMON | sizes,
        invalid=_invalid,
        make=_make,
        call=lambda case, inputs: ((), inputs),
        out=lambda case, inputs: None,
        bytes_moved=_bytes,
        reference=_reference,
        check=_check,
        ours=_ours,
    )


BENCHES = [_bench("dense_layer", _DENSE), _bench("moe_layer", _EXPERTS)]
