# SPDX-License-Identifier: Apache-2.0
"""softmax and its logarithm, forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tiercel.ops.softmax.cases import OPS, empty_output, result_of, scale_of
from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch, Unsupported

Inputs = dict[str, Any]


def forward(log: bool, x: Any, scale: float | None, mask: Any) -> Any:
    """The form that models have; torch's softmax itself computes in float32."""
    import torch

    if scale is not None:
        x = x * scale
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else x + mask.to(x.dtype)
    return torch.log_softmax(x, -1) if log else torch.softmax(x, -1)


def backward(log: bool, grad: Any, y: Any) -> Any:
    import torch

    if log:
        return torch.ops.aten._log_softmax_backward_data(grad, y, -1, y.dtype)
    return torch.ops.aten._softmax_backward_data(grad, y, -1, y.dtype)


def _torch(op: str, is_backward: bool, compiled: bool, case: Any, inputs: Inputs) -> Launch:
    plain = partial(backward if is_backward else forward, op == "log_softmax")
    run = compiled_for(case, plain) if compiled else plain
    if is_backward:
        y = result_of(op, inputs)
        return Launch(lambda: (run(inputs["grad"], y),))
    scale = scale_of(case)
    return Launch(lambda: (run(inputs["x"], scale, inputs["mask"]),))


def _plain_softmax(op: str, inputs: Inputs) -> None:
    if op != "softmax_online" or inputs["mask"] is not None:
        raise Unsupported("softmax without mask only")


def _liger(op: str, is_backward: bool, case: Any, inputs: Inputs) -> Launch:
    _plain_softmax(op, inputs)
    module: Any = importlib.import_module("liger_kernel.ops.softmax")
    if not is_backward:
        return Launch(lambda: (module._softmax_forward(inputs["x"])[0],))
    y = result_of(op, inputs)
    _, *settings = module._softmax_forward(inputs["x"])
    return Launch(lambda: (module._softmax_backward(inputs["grad"], y, *settings),))


def _quack(op: str, is_backward: bool, case: Any, inputs: Inputs) -> Launch:
    _plain_softmax(op, inputs)
    module: Any = importlib.import_module("quack.softmax")
    out = empty_output(case, inputs)
    y = result_of(op, inputs) if is_backward else None

    def run() -> tuple[Any, ...]:
        if is_backward:
            module._softmax_backward(inputs["grad"], y, out)
        else:
            module._softmax_fwd(inputs["x"], out)
        return (out,)

    return Launch(run)


def _all(make: Callable[..., Any]) -> dict[str, Any]:
    flags = (False, True)
    return {f"{op}{'_backward' * back}": partial(make, op, back) for op in OPS for back in flags}


ADAPTERS: dict[str, dict[str, Any]] = {
    "liger": _all(_liger),
    "quack": _all(_quack),
    "torch": _all(lambda op, back, case, inputs: _torch(op, back, False, case, inputs)),
    "torch.compile": _all(lambda op, back, case, inputs: _torch(op, back, True, case, inputs)),
}
