# SPDX-License-Identifier: Apache-2.0
"""Tells if the sm90 kernels run on a device, and says why not."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from tiercel import _C
from tiercel.core import tuned

CAPABILITY = (9, 0)


class Reason(NamedTuple):
    """Why a backend does not apply: the exception to raise when it was asked for, and its text."""

    error: type[Exception]
    text: str


# CUDA devices that the kernels run on. Membership is the one test on the fast path.
ready: set[int] = set()
_refused: dict[int, Reason] = {}

# In a forked child calls leave the fast path, where PyTorch's own error would come first.
os.register_at_fork(after_in_child=ready.clear)


def refuse_fork(op: str, tensor: torch.Tensor) -> None:
    """Raises for a CUDA tensor in a child that was forked after CUDA was used."""
    if tensor.is_cuda and torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            f"{op}: CUDA cannot be used in a forked child process; use the 'spawn' start method "
            "(torch.multiprocessing.set_start_method('spawn'))"
        )


def why_not(device: torch.device) -> Reason | None:
    """None when the sm90 kernels run on the device. Opens the driver the first time."""
    if device.type != "cuda":
        return Reason(
            RuntimeError, f"the sm90 kernels need CUDA tensors, these are on {device.type}"
        )
    if torch.version.hip is not None:
        return Reason(RuntimeError, "the sm90 kernels need an NVIDIA GPU, this PyTorch is for ROCm")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index in ready:
        return None
    if index not in _refused:
        reason = _ask_driver(index)
        if reason is None:
            tuned.load(
                index, torch.cuda.get_device_name(index) if torch.cuda.is_available() else ""
            )
            ready.add(index)
            _C.set_native_device(index, True)
            return None
        _refused[index] = reason
    return _refused[index]


def _ask_driver(index: int) -> Reason | None:
    info = _C.driver_info()
    if not info["ok"]:
        if "fork" in info["message"]:  # no backend works on a GPU in a forked child
            raise RuntimeError(info["message"])
        return Reason(RuntimeError, info["message"])
    capability = _C.device_capability(index)
    if capability != CAPABILITY:
        return Reason(
            RuntimeError,
            f"GPU {index} has compute capability {capability[0]}.{capability[1]}, and this wheel's "
            f"kernels are built for {CAPABILITY[0]}.{CAPABILITY[1]} (H100, H200)",
        )
    return None
