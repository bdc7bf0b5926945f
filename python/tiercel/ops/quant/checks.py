# SPDX-License-Identifier: Apache-2.0
"""What the quantising operators check, and why the kernels do not apply."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel.core import platform
from tiercel.core.checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.platform import Reason

VALUES = (torch.float32, torch.bfloat16, torch.float16)
E4M3, E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2


def reason_of(plan: Any, *args: Any) -> Reason | None:
    """What the kernels do not take of arguments that are right."""
    reason = platform.why_not(args[0].device)
    if reason is not None:
        return reason
    try:
        plan(*args)
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).partition(": ")[2])
    return None


def check_values(op: str, name: str, values: Tensor) -> None:
    check_rank(op, name, values, 2)
    check_dtype(op, name, values.dtype, VALUES)


def check_narrow(
    op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: Any, why: str, like: Any
) -> None:
    check_dtype(op, name, tensor.dtype, (dtype,))
    check_shape(op, name, tensor, shape, why)
    check_same_device(op, name, tensor, *like)
    check_contiguous(op, name, tensor)
