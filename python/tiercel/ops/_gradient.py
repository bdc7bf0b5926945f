# SPDX-License-Identifier: Apache-2.0
"""The dtype of a weight's gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel.core.eager import is_dynamo_compiling


def grad_dtype(weight: Any) -> torch.dtype | None:
    """float32 where that is what ``weight.grad`` of a 16-bit leaf is to be, else None."""
    if is_dynamo_compiling() or not isinstance(weight, Tensor) or weight.dtype == torch.float32:
        return None
    wanted = weight.requires_grad and weight.is_leaf and getattr(weight, "grad_dtype", None)
    return torch.float32 if wanted == torch.float32 else None
