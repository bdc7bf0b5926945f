# SPDX-License-Identifier: Apache-2.0
"""Sums, means and maxima."""

from __future__ import annotations

import math
from typing import Any

from tiercel.plugins.contract import Case, Contract, ScalarSpec, TensorSpec


def _case(
    outer: int, length: int, inner: int, dtype: str, op: str, values: str = "random", **more: Any
) -> Case:
    return Case({"A": outer, "N": length, "B": inner}, dtype, {"op": op, **more}, values)


_CASES = (
    _case(1, 1, 1, "float32", "sum"),
    _case(64, 100, 1, "bfloat16", "sum"),
    _case(64, 100, 1, "bfloat16", "sum", result="float32"),
    _case(5, 33, 7, "float16", "mean"),
    _case(1, 300, 40, "float32", "mean"),
    _case(1, 5000, 1, "float32", "sum"),
    _case(3, 8, 129, "bfloat16", "amax"),
    _case(40, 9, 1, "float32", "max"),
    _case(0, 9, 4, "float32", "sum"),
    _case(6, 0, 4, "float32", "sum"),
    _case(4, 50, 12, "float32", "sum", "strided"),
    _case(4, 50, 12, "float32", "amax", "special"),
)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    shape = tuple(case.sizes[name] for name in "ANB")
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=generator)  # no cancellation
    if case.values == "special":  # one in a hundred
        special = torch.tensor([torch.nan, torch.inf, -torch.inf])
        chosen = special[torch.randint(len(special), shape, generator=generator)]
        x = torch.where(torch.rand(shape, generator=generator) < 0.01, chosen, x)
    dtype = getattr(torch, case.dtype)
    x = x.to(device=device, dtype=dtype)
    if case.values == "strided":
        x = torch.cat([x, -x], dim=2)[:, :, : shape[2]]
    result = getattr(torch, case.options.get("result", case.dtype))
    return {"x": x, "dim": 1, "op": case.options["op"], "keepdim": False, "dtype": result}


def _shaped(call: Any, x: Any, dim: int | None, op: str, keepdim: bool, dtype: Any) -> Any:
    """As [A, N, B] over dimension 1."""
    shape = tuple(x.shape)
    if dim is None:
        outer, length, inner, left = (), shape, (), (1,) * len(shape) if keepdim else ()
    else:
        dim %= len(shape)
        outer, length, inner = shape[:dim], shape[dim : dim + 1], shape[dim + 1 :]
        left = (*outer, *((1,) if keepdim else ()), *inner)
    flat = x.reshape(math.prod(outer), math.prod(length), math.prod(inner))
    (result,) = call(flat, 1, op, False, dtype or x.dtype)
    return result.view(left)


def _into(call: Any, x: Any, out: Any, dim: int | None, op: str, keepdim: bool) -> None:
    out.copy_(_shaped(call, x, dim, op, keepdim, out.dtype))


REDUCE = Contract(
    family="reduce",
    op="reduce",
    arguments=(
        TensorSpec("x", ("A", "N", "B"), ("float32", "bfloat16", "float16"), strided=True),
        ScalarSpec("dim", "int"),
        ScalarSpec("op", "str"),
        ScalarSpec("keepdim", "bool"),
        ScalarSpec("dtype", "dtype"),
    ),
    # The result's rounding, and float32 sums of positive numbers.
    outputs=(TensorSpec("out", ("A", "B"), ("dtype",), rtol=4e-3, atol=1e-5),),
    cases=_CASES,
    timing={
        "cpu": _case(512, 1024, 1, "float32", "sum"),
        "cuda": _case(16384, 4096, 1, "bfloat16", "sum"),
    },
    make=_make,
    variants={
        "reduce": _shaped,
        "reduce_out": _into,
    },
)

CONTRACTS = (REDUCE,)

# Made of other operators.
WITHOUT_CONTRACT = ["reduce_sum"]
