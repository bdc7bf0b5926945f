# SPDX-License-Identifier: Apache-2.0
"""Around attention: rotary position embedding, and new keys and values into a paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_ROWS = 32768  # positions
_BLOCK = 16


def _positive(params: Mapping[str, Any], names: str) -> str | None:
    sizes = [params[name] for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return f"{', '.join(names)} must be positive whole numbers"
    return None


def invalid_rotary(params: Mapping[str, Any]) -> str | None:
    if params["style"] not in ("neox", "interleaved"):
        return "`style` must be neox or interleaved"
    return _positive(params, "THGDR")


def _random(generator: Any, *shape: int) -> Any:
    import torch

    return torch.randn(shape, device=generator.device, generator=generator)


def make_rotary(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    tokens, heads, kv_heads, size, rotated = (case[name] for name in "THGDR")
    angles = torch.rand(_ROWS, rotated // 2, device=device, generator=generator) * 6.2832
    return {
        "positions": torch.randint(_ROWS, (tokens,), device=device, generator=generator),
        "q": _random(generator, tokens, heads, size).to(dtype),
        "k": _random(generator, tokens, kv_heads, size).to(dtype),
        "cache": torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype),
    }


def _call_rotary(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(inputs.values()), {"interleaved": case["style"] == "interleaved"}


def _out_rotary(case: Any, inputs: Inputs) -> Any:
    return inputs["q"].new_empty(inputs["q"].shape), inputs["k"].new_empty(inputs["k"].shape)


def _bytes_rotary(case: Any) -> int:
    tokens, heads, kv_heads, size, rotated = (case[name] for name in "THGDR")
    return int(tokens * (2 * (heads + kv_heads) * size + rotated) * ELEMENT[case.dtype])


def rotated(positions: Any, q: Any, k: Any, cache: Any, interleaved: bool) -> Any:
    """The reference's steps, with their dtypes."""
    from tiercel.ops.rotary.reference import rotary_embedding

    return rotary_embedding(positions, q, k, cache, interleaved=interleaved)


def _reference_rotary(case: Any, inputs: Inputs) -> Any:
    positions, *floats = inputs.values()
    wide = (x.double() for x in floats)
    return rotated(positions, *wide, case["style"] == "interleaved")


def _check_rotary(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Others may round products too: two more units of numbers of about 1."""
    import torch

    worst, rms, largest = 0.0, 0.0, 0.0
    for got, due in zip(outputs, expected, strict=True):
        if got.shape != due.shape or got.dtype != inputs["q"].dtype:
            raise WrongResult(f"shape {tuple(got.shape)}, {got.dtype}")
        unit = torch.finfo(got.dtype).eps / 2
        errors = (got.double() - due).abs()
        worst = max(worst, float((errors / (1.1 * unit * due.abs() + 6 * unit)).max()))
        rms = max(rms, float(errors.square().mean().sqrt() / due.square().mean().sqrt()))
        largest = max(largest, float(errors.max() / due.abs().max()))
    if not worst <= 1:
        raise WrongResult(f"a result is off by {worst:.1f} times its tolerance")
    return Error(rms=rms, maximum=largest)


def _invalid_kv(params: Mapping[str, Any]) -> str | None:
    if params["cache"] not in ("same", "float8_e4m3fn"):
        return "`cache` must be same or float8_e4m3fn"
    return _positive(params, "TGD")


def _make_kv(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    tokens, heads, size = (case[name] for name in "TGD")
    blocks = tokens // _BLOCK * 2 + 1  # half of the cache is someone else's
    shape = (blocks, _BLOCK, heads, size)
    stored = dtype if case["cache"] == "same" else getattr(torch, case["cache"])
    caches = [torch.zeros(shape, dtype=dtype, device=device).to(stored) for _ in range(2)]
    # Whole blocks in a random order, as an allocator gives them.
    order = torch.randperm(blocks, device=device, generator=generator)
    slots = (order[:, None] * _BLOCK + torch.arange(_BLOCK, device=device)).flatten()[:tokens]
    return {
        "key": _random(generator, tokens, heads, size).to(dtype),
        "value": _random(generator, tokens, heads, size).to(dtype),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slots": slots.contiguous(),
    }


def _call_kv(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(inputs.values()), {}


def _bytes_kv(case: Any) -> int:
    stored = case.dtype if case["cache"] == "same" else case["cache"]
    elements = 2 * int(case["T"] * case["G"] * case["D"])
    return elements * (ELEMENT[case.dtype] + ELEMENT[stored]) + 8 * int(case["T"])


def _reference_kv(case: Any, inputs: Inputs) -> Any:
    return inputs["key"].double(), inputs["value"].double()


def _check_kv(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """The new lines only; what lies between them is not looked at."""
    for cache, due in zip(outputs, expected, strict=True):
        lines = cache.flatten(0, 1).float()[inputs["slots"]].double()
        close = 2.0**-4 if cache.element_size() == 1 else 0.0
        if not bool(((lines - due).abs() <= close * due.abs() + close / 32).all()):
            raise WrongResult("a line of the cache is not what was written")
    return Error(rms=0.0, maximum=0.0)


def _make_fused(case: Any, device: str, seed: int) -> Inputs:
    rotary, kv = make_rotary(case, device, seed), _make_kv(case, device, seed + 1)
    q = rotary["q"]
    return {
        "q": q,
        "k": rotary["k"],
        "v": kv["value"],
        "q_out": q.new_empty(q.shape, dtype=kv["key_cache"].dtype),
        "key_cache": kv["key_cache"],
        "value_cache": kv["value_cache"],
        "slots": kv["slots"],
        "positions": rotary["positions"],
        "cos_sin_cache": rotary["cache"],
        "q_weight": q.new_ones(case["D"]) * 1.5,
        "k_weight": q.new_ones(case["D"]) * 0.5,
    }


def _bytes_fused(case: Any) -> int:
    stored = case.dtype if case["cache"] == "same" else case["cache"]
    tokens, heads, kv_heads, size, rotated = (case[name] for name in "THGDR")
    elements = int(tokens * (heads + 2 * kv_heads) * size)
    rest = int(tokens * (rotated * ELEMENT[case.dtype] + 16))
    return elements * (ELEMENT[case.dtype] + ELEMENT[stored]) + rest


def _reference_fused(case: Any, inputs: Inputs) -> Any:
    """The new lines of the caches, and the queries."""
    from tiercel.ops.rotary.reference import qk_norm_rope_cache

    wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    results = qk_norm_rope_cache(**wide, interleaved=case["style"] == "interleaved")
    return results[0], *(cache.flatten(0, 1)[inputs["slots"]] for cache in results[1:])


def _check_fused(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Others may round after each step: numbers of up to 5, among 40 million, by 2^-8 of them."""
    slots = inputs["slots"]
    worst = 0.0
    for number, (got, due) in enumerate(zip(outputs, expected, strict=True)):
        lines = got.float() if number == 0 else got.float().flatten(0, 1)[slots]
        unit = 2.0**-4 if got.element_size() == 1 else 2.0**-8
        slack, steps = (1.1, 4) if launch.strict else (1.5, 8)
        allowed = slack * unit * due.abs() + steps * 2.0**-8
        worst = max(worst, float(((lines.double() - due).abs() / allowed).max()))
    if not worst <= 1:
        raise WrongResult(f"a result is off by {worst:.1f} times its tolerance")
    return Error(rms=0.0, maximum=worst)


BENCHES = [
    OpBench(
        family="rotary",
        op="rotary_embedding",
        params={"T": None, "H": 32, "G": 8, "D": 128, "R": 128, "style": "neox"},
        invalid=invalid_rotary,
        make=make_rotary,
        call=_call_rotary,
        out=_out_rotary,
        bytes_moved=_bytes_rotary,
        reference=_reference_rotary,
        check=_check_rotary,
    ),
    OpBench(
        family="rotary",
        op="kv_cache_write",
        params={"T": None, "G": 8, "D": 128, "cache": "same"},
        invalid=_invalid_kv,
        make=_make_kv,
        call=_call_kv,
        out=lambda case, inputs: None,
        bytes_moved=_bytes_kv,
        reference=_reference_kv,
        check=_check_kv,
    ),
    OpBench(
        family="rotary",
        op="qk_norm_rope_cache",
        params={"T": None, "H": 32, "G": 8, "D": 128, "R": 128, "style": "neox", "cache": "same"},
        invalid=lambda params: invalid_rotary(params) or _invalid_kv(params),
        make=_make_fused,
        call=_call_rotary,
        out=lambda case, inputs: None,
        bytes_moved=_bytes_fused,
        reference=_reference_fused,
        check=_check_fused,
    ),
]
