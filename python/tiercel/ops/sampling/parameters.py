# SPDX-License-Identifier: Apache-2.0
"""Parameters that are a number for all rows or a tensor with one for each."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def either(rows: Any, given: Any, default: float) -> tuple[Any, Any]:
    """A tensor of the rows' values and a number, of which the tensor goes first."""
    return (given, default) if isinstance(given, Tensor) else (rows, given)
