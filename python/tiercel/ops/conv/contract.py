# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of the convolutions, and the contracts of their plug-ins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiercel.core.spec import Tensor
from tiercel.ops.conv.spec import CAUSAL_CONV1D, CAUSAL_CONV1D_UPDATE
from tiercel.plugins.contract import Case, Contract


def _case(
    batch: int,
    tokens: int,
    channels: int,
    width: int,
    dtype: str,
    values: str = "random",
    **more: Any,
) -> Case:
    sizes = {"M": batch, "T": tokens, "D": channels, "W": width}
    return Case(sizes, dtype, {"activation": "silu"} | more, values)


_CASES = (
    _case(1, 1, 8, 4, "bfloat16"),
    _case(3, 70, 64, 4, "bfloat16"),
    _case(2, 33, 24, 3, "float16", activation=None),
    _case(4, 5, 20, 2, "float32"),
    _case(1, 200, 16, 4, "bfloat16", "packed"),
    _case(2, 40, 32, 3, "bfloat16", "strided"),
    _case(0, 8, 16, 4, "bfloat16"),
)


_PACKED = 5  # sequences


def _starts(rows: int, generator: Any) -> Any:
    """Sequences of any lengths."""
    import torch

    inner = torch.randint(rows + 1, (_PACKED - 1,), generator=generator).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([rows])]).to(torch.int32)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    batch, tokens, channels, width = (case.sizes[name] for name in "MTDW")
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    x, starts = random(batch, tokens, channels), None
    if case.values == "packed":
        starts = _starts(tokens, generator).to(device)
    elif case.values == "strided":
        x = torch.cat([x, -x], dim=-1)[..., :channels]
    return {
        "x": x,
        "weight": random(channels, width) / width**0.5,
        "bias": None if case.values == "strided" else random(channels),
        "cu_seqlens": starts,
        "activation": case.options["activation"],
    }


CAUSAL = Contract.of(
    "conv",
    CAUSAL_CONV1D,
    cases=_CASES,
    timing={
        "cpu": _case(1, 512, 256, 4, "bfloat16"),
        "cuda": _case(1, 32768, 8192, 4, "bfloat16"),
    },
    make=_make,
)


def _make_update(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    sizes = case.sizes
    given = _make(replace(case, sizes=sizes | {"M": sizes["B"]}), device, seed)
    count = _PACKED if case.values == "packed" else sizes["B"]
    generator = torch.Generator().manual_seed(seed + 1)
    slots = 2 * count + 1
    states = torch.randn(slots, sizes["W"] - 1, sizes["D"], generator=generator)
    indices = torch.randperm(slots, generator=generator)[:count].to(torch.int32)
    indices[1::3] = -1
    flags = torch.rand(count, generator=generator) < 0.7
    return {
        "x": given["x"],
        "states": states.to(given["x"]),
        "weight": given["weight"],
        "out": torch.zeros_like(given["x"], memory_format=torch.contiguous_format),
        "bias": given["bias"],
        "state_indices": indices.to(device),
        "has_state": None if case.values == "strided" else flags.to(device),
        "cu_seqlens": given["cu_seqlens"],
        "activation": given["activation"],
    }


def _update_case(*given: Any, **more: Any) -> Case:
    case = _case(*given, **more)
    return replace(case, sizes={"B": case.sizes["M"], **{n: case.sizes[n] for n in "TDW"}})


# A backend returns new states and results, which the operator copies into those that it writes to.
_NEW = [
    replace(each, name=f"new_{each.name}", dtypes=each.name, written=False, rtol=1e-2, atol=1e-5)
    for each in CAUSAL_CONV1D_UPDATE.tensors
    if each.written
]

UPDATE = Contract.of(
    "conv",
    CAUSAL_CONV1D_UPDATE.changed(
        results=_NEW,
        arguments=tuple(
            replace(each, written=False) if isinstance(each, Tensor) else each
            for each in CAUSAL_CONV1D_UPDATE.arguments
        ),
    ),
    cases=(
        _update_case(1, 1, 8, 4, "bfloat16"),
        _update_case(5, 1, 64, 4, "bfloat16"),
        _update_case(3, 70, 64, 4, "bfloat16"),
        _update_case(2, 33, 24, 3, "float16", activation=None),
        _update_case(4, 5, 20, 2, "float32"),
        _update_case(1, 200, 16, 4, "bfloat16", "packed"),
        _update_case(2, 40, 32, 3, "bfloat16", "strided"),
        _update_case(0, 8, 16, 4, "bfloat16"),
    ),
    timing={
        "cpu": _update_case(16, 1, 256, 4, "bfloat16"),
        "cuda": _update_case(256, 1, 8192, 4, "bfloat16"),
    },
    make=_make_update,
    mutates=("states", "out"),
)

CONTRACTS = (CAUSAL, UPDATE)
