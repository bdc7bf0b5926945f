# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d in PyTorch."""

from __future__ import annotations

from typing import Any

from tiercel.ops.conv.cases import convolved
from tiercel.workbench.bench.launch import Launch


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    return Launch(lambda: (convolved(*inputs.values()),))


ADAPTERS = {"torch": {"causal_conv1d": _torch}}
