# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of rms_norm and layer_norm, and the contract of their plug-ins."""

from __future__ import annotations

from typing import Any

from tiercel.core.spec import Spec
from tiercel.ops.norm.spec import LAYER_NORM, RMS_NORM
from tiercel.plugins.contract import Case, Contract


def _case(rows: int, columns: int, dtype: str, values: str = "weight") -> Case:
    return Case({"M": rows, "N": columns}, dtype, {"eps": 1e-5}, values)


_CASES = (
    _case(1, 64, "bfloat16"),
    _case(33, 128, "float32", "weight bias"),
    _case(7, 1000, "float16", "bias"),
    _case(16, 1024, "bfloat16", "weight residual"),
    _case(5, 4096, "float32", "plain"),
    _case(3, 8192, "bfloat16", "weight bias residual"),
    _case(2, 20000, "bfloat16"),
    _case(9, 77, "float16"),
    _case(0, 256, "bfloat16", "weight residual"),
    _case(12, 512, "bfloat16", "weight strided"),
    _case(12, 512, "bfloat16", "float32-weight"),
)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, columns = (case.sizes[name] for name in "MN")
    words = case.values.split()
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    x = random(rows, columns) + 0.5
    if "strided" in words:
        x = torch.cat([x, -x], dim=1)[:, :columns]
    weight = random(columns) if "weight" in words else None
    if "float32-weight" in words:
        weight = random(columns).float()
    return {
        "x": x,
        "weight": weight,
        "bias": random(columns) if "bias" in words else None,
        "residual": random(rows, columns) if "residual" in words else None,
        **case.options,
    }


def _contract(spec: Spec) -> Contract:
    return Contract.of(
        "norm",
        spec,
        cases=_CASES,
        timing={
            "cpu": _case(256, 1024, "bfloat16"),
            "cuda": _case(8192, 4096, "bfloat16"),
        },
        make=_make,
    )


CONTRACTS = (_contract(RMS_NORM), _contract(LAYER_NORM))

# Names in tiercel.plugins.types.
ALIASES = {
    "Rows": "rms_norm.x",
    "NormWeight": "rms_norm.weight",
    "NormBias": "rms_norm.bias",
    "Residual": "rms_norm.residual",
    "Normalised": "rms_norm.out",
    "ResidualSum": "rms_norm.residual_out",
}
PROTOCOLS = {"rms_norm": "Norm", "layer_norm": "Norm"}
