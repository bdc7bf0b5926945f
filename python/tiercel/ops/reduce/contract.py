# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of reduce, and the contract of its plug-ins."""

from __future__ import annotations

import math
from typing import Any

from tiercel.core.spec import FLOATS, Call
from tiercel.ops.reduce.spec import REDUCE, shape_left
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


def over_the_middle(backend: Any, call: Call) -> Any:
    """The result of a backend, which works on [A, N, B] over the middle dimension."""
    shape = tuple(call.x.shape)
    if call.dim is None:
        outer, length, inner = (), shape, ()
    else:
        dim = call.dim % len(shape)
        outer, length, inner = shape[:dim], shape[dim : dim + 1], shape[dim + 1 :]
    flat = call.x.reshape(math.prod(outer), math.prod(length), math.prod(inner))
    (result,) = backend(flat, 1, call.op, False, call.dtype or call.x.dtype)
    return result.view(shape_left(call.x, call.dim, call.keepdim))


CONTRACTS = (
    Contract.of(
        "reduce",
        REDUCE,
        replaced={
            "x": TensorSpec("x", ("A", "N", "B"), FLOATS, strided=True),
            "dim": ScalarSpec("dim", "int"),
            "dtype": ScalarSpec("dtype", "dtype"),
            "out": TensorSpec("out", ("A", "B"), ("dtype",), rtol=4e-3, atol=1e-5),
        },
        cases=_CASES,
        timing={
            "cpu": _case(512, 1024, 1, "float32", "sum"),
            "cuda": _case(16384, 4096, 1, "bfloat16", "sum"),
        },
        make=_make,
    ),
)

# Made of other operators.
WITHOUT_CONTRACT = ["reduce_sum"]

# Names in tiercel.plugins.types.
ALIASES = {"Unreduced": "reduce.x", "Reduced": "reduce.out"}
