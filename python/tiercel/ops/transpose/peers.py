# SPDX-License-Identifier: Apache-2.0
"""Transposed copies."""

from __future__ import annotations

from typing import Any

from tiercel.workbench.bench.launch import Launch


def copy_transpose(x: Any) -> Any:
    return x.transpose(-2, -1).contiguous()


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    x = inputs["x"]
    return Launch(run=lambda: (copy_transpose(x),))


_last: dict[Any, Any] = {}  # one compilation for all inputs of a case


def _compiled(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    if case.key not in _last:
        torch._dynamo.reset()
        _last.clear()
        _last[case.key] = torch.compile(copy_transpose, dynamic=False, fullgraph=True)
    compiled, x = _last[case.key], inputs["x"]
    return Launch(run=lambda: (compiled(x),))


ADAPTERS = {
    "torch": {"copy_transpose": _torch},
    "torch.compile": {"copy_transpose": _compiled},
}
