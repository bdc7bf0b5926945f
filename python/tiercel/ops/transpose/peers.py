# SPDX-License-Identifier: Apache-2.0
"""Transposed copies."""

from __future__ import annotations

from typing import Any

from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch


def copy_transpose(x: Any) -> Any:
    return x.transpose(-2, -1).contiguous()


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    x = inputs["x"]
    return Launch(run=lambda: (copy_transpose(x),))


def _compiled(case: Any, inputs: dict[str, Any]) -> Launch:
    compiled, x = compiled_for(case, copy_transpose), inputs["x"]
    return Launch(run=lambda: (compiled(x),))


ADAPTERS = {
    "torch": {"copy_transpose": _torch},
    "torch.compile": {"copy_transpose": _compiled},
}
