# SPDX-License-Identifier: Apache-2.0
"""TIERCEL_CHECK=1: what index tensors hold is looked at before an operator runs.

Kernels never leave their tensors, whatever an index tensor holds: what is no valid place is skipped
or taken for the nearest one (each operator's page says which). That hides mistakes. With the
variable set, a call waits for the GPU, and a wrong value is an error that names it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.core import selection

ENABLED = os.environ.get("TIERCEL_CHECK", "0").lower() not in ("", "0", "false", "no", "off")


class Index(NamedTuple):
    """The rule for an argument's values.

    Args:
        name: The argument.
        values: What it holds, or what follows from that; None where it was not given.
        wrong: Which of the values are wrong, as a mask of their shape.
        due: What is right, behind "must".
    """

    name: str
    values: Tensor | None
    wrong: Callable[[Tensor], Tensor]
    due: str


def between(name: str, values: Tensor | None, low: int, high: int) -> Index:
    """All numbers from `low` to `high`."""

    def wrong(numbers: Tensor) -> Tensor:
        return (numbers < low) | (numbers > high)

    return Index(name, values, wrong, f"hold numbers from {low} to {high}")


def places(name: str, values: Tensor | None, count: int) -> Index:
    """Numbers of `count` places, or -1 for none."""
    index = between(name, values, -1, count - 1)
    return index._replace(due=f"hold numbers from 0 to {count - 1}, or -1 for none")


def ascending(name: str, values: Tensor) -> Index:
    """No number is below the one before it."""

    def wrong(numbers: Tensor) -> Tensor:
        return torch.cat([numbers[:1] < numbers[:1], numbers[1:] < numbers[:-1]])

    return Index(name, values, wrong, "hold numbers that do not decrease")


def part_bounds(name: str, values: Tensor | None, last: int) -> list[Index]:
    """The beginnings of parts of `last` rows and the end of the last one; they may be absent."""
    return [] if values is None else [between(name, values, 0, last), ascending(name, values)]


def check(op: str, indices: Iterable[Index]) -> None:
    """Raises for the first wrong value.

    Raises:
        ValueError: An index tensor holds a value that it must not hold.
    """
    for index in indices:
        if index.values is None or index.values.numel() == 0:
            continue
        found = torch.nonzero(index.wrong(index.values))
        if found.shape[0] == 0:
            continue
        place = found[0].tolist()
        value = index.values[tuple(place)].item()
        raise ValueError(f"{op}: `{index.name}` must {index.due}, got {value} at {place}")


_warned = False


def can_look(tensor: Tensor) -> bool:
    """True if values can be read now: not during a graph capture, which warns once."""
    global _warned
    if tensor.is_meta:
        return False
    if not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    if not _warned:
        _warned = True
        text = "TIERCEL_CHECK: index tensors are not checked while a CUDA graph is captured"
        warnings.warn(text, UserWarning, stacklevel=selection.callers_level())
    return False
