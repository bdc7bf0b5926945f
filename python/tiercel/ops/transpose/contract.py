# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of copy_transpose, and the contract of its plug-ins."""

from __future__ import annotations

from typing import Any

from tiercel.ops.transpose.spec import COPY_TRANSPOSE
from tiercel.plugins.contract import Case, Contract, TensorSpec

# Few of PyTorch's functions take float8, so it is not tried.
_TRIED = ("bfloat16", "float16", "float32", "int8", "uint8", "int16", "int32")


def _case(batch: int, rows: int, columns: int, dtype: str, values: str = "random") -> Case:
    return Case({"B": batch, "M": rows, "N": columns}, dtype, {}, values)


_CASES = (
    _case(1, 64, 64, "bfloat16"),
    _case(1, 128, 512, "float16"),
    _case(3, 100, 36, "float32"),
    _case(2, 33, 65, "bfloat16"),
    _case(1, 256, 128, "uint8"),
    _case(1, 31, 77, "int8"),
    _case(1, 1, 1, "float32"),
    _case(4, 0, 8, "bfloat16"),
    _case(2, 40, 72, "int32"),
    _case(3, 20, 9, "int16"),
    _case(2, 48, 64, "bfloat16", "strided"),
)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    batch, rows, columns = (case.sizes[name] for name in "BMN")
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-100, 100, (batch, rows, columns), generator=generator)
    x = x.float().to(getattr(torch, case.dtype)).to(device)
    if case.values == "strided":
        x = torch.cat([x, x], dim=2)[:, :, 5 : 5 + columns]
    return {"x": x, "tile_size": None}


CONTRACTS = (
    Contract.of(
        "transpose",
        COPY_TRANSPOSE,
        batch="B",
        replaced={"x": TensorSpec("x", ("B", "M", "N"), _TRIED, strided=True)},
        cases=_CASES,
        timing={
            "cpu": _case(1, 512, 512, "float32"),
            "cuda": _case(1, 8192, 8192, "bfloat16"),
        },
        make=_make,
    ),
)

# Names in tiercel.plugins.types.
ALIASES = {"Matrices": "copy_transpose.x", "Transposed": "copy_transpose.out"}
