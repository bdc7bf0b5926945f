# SPDX-License-Identifier: Apache-2.0
"""torch.autocast, for functions whose time goes to matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel.core.eager import is_dynamo_compiling


def under_autocast(x: Any, *others: Any) -> tuple[Any, ...]:
    """The tensors in the dtype of products under torch.autocast."""
    given = (x, *others)
    if not (is_dynamo_compiling() or torch._C._is_any_autocast_enabled()):  # the fastest to ask
        return given
    if not isinstance(x, Tensor) or x.is_meta:  # there is no autocast for meta tensors
        return given
    if not torch.is_autocast_enabled(x.device.type):
        return given
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in given
    )
