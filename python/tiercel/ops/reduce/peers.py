# SPDX-License-Identifier: Apache-2.0
"""Sums, means and maxima."""

from __future__ import annotations

from typing import Any

from tiercel.ops.reduce.cases import dim_of, reduced
from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    x, dim, by = inputs["x"], dim_of(case), case["by"]
    return Launch(run=lambda: (reduced(x, dim, by),))


def _compiled(case: Any, inputs: dict[str, Any]) -> Launch:
    compiled = compiled_for(case, reduced)
    x, dim, by = inputs["x"], dim_of(case), case["by"]
    return Launch(run=lambda: (compiled(x, dim, by),))


ADAPTERS = {
    "torch": {"reduce": _torch},
    "torch.compile": {"reduce": _compiled},
}
