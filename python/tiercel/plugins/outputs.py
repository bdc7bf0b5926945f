# SPDX-License-Identifier: Apache-2.0
"""Checks that a backend's outputs are new: plain tensors in memory of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def check_new(
    who: str,
    names: Sequence[str],
    results: Sequence[Any],
    arguments: Mapping[str, Any],
    written: Iterable[str] = (),
) -> None:
    """Checks outputs, by name; those of `written` are arguments themselves and may be.

    Raises:
        TypeError: One is of a subclass of Tensor, such as Parameter.
        ValueError: One requires a gradient, has no memory or another's.
    """
    import torch

    of_arguments = {_place(value): name for name, value in arguments.items()}
    taken: list[tuple[int, int, str]] = []  # by outputs: two may be parts of one allocation
    for name, result in zip(names, results, strict=True):
        if name in written:
            continue
        kind = type(result)
        # Transforms of torch's own, such as tracing, put theirs in a tensor's place.
        if kind is not torch.Tensor and not kind.__module__.startswith("torch._"):
            raise TypeError(f"{who} must return `{name}` as a plain Tensor, got {kind.__name__}")
        if result.requires_grad:
            raise ValueError(f"{who} must return `{name}` without requires_grad: detach it")
        problem = _memory_problem(result)
        if problem:
            raise ValueError(f"{who} must return `{name}` in memory of its own, {problem}")
        place = _place(result)
        if not place:
            continue
        start = result.data_ptr()
        end = start + result.numel() * result.element_size()
        whose = [
            f"output `{other}`" for begun, ended, other in taken if start < ended and begun < end
        ]
        if place in of_arguments:
            whose.append(f"argument `{of_arguments[place]}`")
        if whose:
            text = f"got a tensor that shares that of the {whose[0]}"
            raise ValueError(f"{who} must return `{name}` in memory of its own, {text}")
        taken.append((start, end, name))


def _place(tensor: Any) -> int:
    """The address of a tensor's storage; 0 if it is empty or has none."""
    try:
        return int(tensor.untyped_storage().data_ptr()) if tensor.numel() else 0
    except (RuntimeError, NotImplementedError):  # one without storage
        return 0


def _memory_problem(tensor: Any) -> str:
    try:
        storage = tensor.untyped_storage()
        have, start = storage.nbytes(), tensor.storage_offset()
    except (RuntimeError, NotImplementedError):
        return ""
    need = (start + tensor.numel()) * tensor.element_size()  # outputs are contiguous
    if tensor.numel() and tensor.device.type != "meta" and have < need:
        return f"got one whose storage has {have} bytes of {need}: it was freed"
    return ""
