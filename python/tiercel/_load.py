# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tiercel import _C
from tiercel import _needs_torch as _needs_torch
from tiercel._explain import find
from tiercel.core import platform
from tiercel.core.dispatch import registry
from tiercel.ops import _register as _register  # fills the registry


def load(
    *operators: str | Callable[..., Any], device: torch.device | str | int | None = None
) -> None:
    """Loads operators' precompiled kernels on a GPU ahead of their first calls.

    It is optional: a first call loads what it launches, even inside a CUDA graph capture, which
    takes some milliseconds.

    Args:
        *operators: Operators such as ``tiercel.topk_softmax``, or their names; by default all.
        device: The CUDA device; by default the current one.

    Raises:
        ValueError: No such operator, or the device is not a CUDA device.
        RuntimeError: The kernels do not run there; the message says why.

    Example:
        >>> tiercel.load(tiercel.topk_softmax, device="cuda:1")
    """
    chosen = [find(op) for op in operators] or list(registry.values())
    index = _index(device)
    reason = platform.why_not(torch.device("cuda", index))
    if reason is not None:
        raise reason.error(f"tiercel.load: {reason.text}")
    for op in chosen:
        if op.load is not None:
            op.load(index)


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int, type(None))):
        raise TypeError(
            "tiercel.load: `device` must be a torch.device, a str or an int, got "
            f"{type(device).__name__}"
        )
    if isinstance(device, int):
        if device < 0:
            raise ValueError(f"tiercel.load: `device` must be a CUDA device's index, got {device}")
        device = torch.device("cuda", device)
    try:
        found = torch.device("cuda" if device is None else device)
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise ValueError(f"tiercel.load: `device` must be a CUDA device: {said}") from None
    if found.type != "cuda":
        raise ValueError(f"tiercel.load: `device` must be a CUDA device, got {found}")
    if found.index is not None:
        return found.index
    if not torch.cuda.is_available():
        info = _C.driver_info()
        problem = "this PyTorch sees no CUDA device" if info["ok"] else info["message"]
        raise RuntimeError(f"tiercel.load: {problem}")
    return torch.cuda.current_device()
