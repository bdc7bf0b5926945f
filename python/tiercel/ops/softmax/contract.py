# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of softmax_online and log_softmax, and the contract of their plug-ins."""

from __future__ import annotations

from typing import Any

from tiercel.core.spec import Call, Spec
from tiercel.ops.softmax.spec import LOG_SOFTMAX, SOFTMAX_ONLINE
from tiercel.plugins.contract import Case, Contract, TensorSpec


def _case(rows: int, columns: int, dtype: str, values: str = "no mask", scale: Any = None) -> Case:
    # A backend gets two dimensions and softmax goes along the last.
    return Case({"M": rows, "N": columns, "dim": -1}, dtype, {"scale": scale}, values)


_CASES = (
    _case(1, 16, "float32"),
    _case(33, 128, "bfloat16"),
    _case(7, 1000, "float16", scale=0.125),
    _case(5, 4097, "float32", "keep"),
    _case(40, 264, "bfloat16", "add", scale=0.125),
    _case(3, 20000, "float16", "keep"),
    _case(2, 70000, "bfloat16"),
    _case(129, 1, "float32"),
    _case(0, 64, "bfloat16"),
    _case(40, 264, "bfloat16", "strided"),
    _case(40, 32, "float32", "special"),
)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, columns = case.sizes["M"], case.sizes["N"]
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(rows, columns, generator=generator)
    mask = None
    if case.values == "keep":
        mask = (torch.rand(rows, columns, generator=generator) < 0.8).to(device)
    elif case.values == "add":
        mask = torch.randn(rows, columns, generator=generator).to(device)
    elif case.values == "special":  # one in twenty
        special = torch.tensor([torch.nan, torch.inf, -torch.inf])
        chosen = special[torch.randint(len(special), (rows, columns), generator=generator)]
        x = torch.where(torch.rand(rows, columns, generator=generator) < 0.05, chosen, x)
    x = x.to(device=device, dtype=getattr(torch, case.dtype))
    if case.values == "strided":
        x = torch.cat([x, -x], dim=1)[:, :columns]
    return {"x": x, "mask": mask, "dim": -1, **case.options}


def along_last(backend: Any, call: Call) -> Any:
    """The result of a backend, which works on the rows of a matrix, along any dimension."""
    moved = call.x.movedim(call.dim, -1)
    flat, mask = moved.reshape(-1, moved.shape[-1]), call.mask
    if mask is not None:
        mask = mask.expand(call.x.shape).movedim(call.dim, -1).reshape(flat.shape)
    (result,) = backend(flat, mask, -1, call.scale)
    return result.view(moved.shape).movedim(-1, call.dim).contiguous()


def _contract(spec: Spec) -> Contract:
    return Contract.of(
        "softmax",
        spec,
        replaced={
            "mask": TensorSpec("mask", ("M", "N"), ("bool", "float32"), strided=True, optional=True)
        },
        order=("x", "mask", "dim", "scale"),
        cases=_CASES,
        timing={"cpu": _case(256, 1024, "bfloat16"), "cuda": _case(16384, 4096, "bfloat16")},
        make=_make,
    )


CONTRACTS = (_contract(SOFTMAX_ONLINE), _contract(LOG_SOFTMAX))

# Names in tiercel.plugins.types.
ALIASES = {
    "SoftmaxScores": "softmax_online.x",
    "SoftmaxMask": "softmax_online.mask",
    "SoftmaxResult": "softmax_online.out",
}
PROTOCOLS = {"softmax_online": "Softmax", "log_softmax": "Softmax"}
