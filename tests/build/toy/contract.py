# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of toy_shift, and the contract of its plug-ins."""

from __future__ import annotations

from typing import Any

from tiercel.ops.toy.spec import TOY_SHIFT
from tiercel.plugins.contract import Case, Contract


def _case(rows: int, columns: int, amount: float = 1.0) -> Case:
    return Case({"M": rows, "N": columns}, "float32", {"amount": amount})


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.sizes["M"], case.sizes["N"], generator=generator)
    return {"x": x.to(device), **case.options}


CONTRACTS = (
    Contract.of(
        "toy",
        TOY_SHIFT,
        cases=(_case(1, 1), _case(3, 100, 2.5), _case(0, 8)),
        timing={"cpu": _case(64, 64), "cuda": _case(4096, 4096)},
        make=_make,
    ),
)

# Names in tiercel.plugins.types.
ALIASES = {"ToyInput": "toy_shift.x"}
