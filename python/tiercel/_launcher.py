# SPDX-License-Identifier: Apache-2.0
"""Operators whose outputs are like their arguments, made and launched without Python in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tiercel import _C


class Argument(int):
    """In what a launch takes: the operator's argument at this place."""


class Output(int):
    """In what a launch takes: the operator's output at this place."""


class Choice(NamedTuple):
    """In what a launch takes: what a table has for the operator's argument at this place, a string
    or a number."""

    place: int
    table: dict[Any, Any]


class Like(NamedTuple):
    """A contiguous output of the shape of the argument at this place, or made of `dims`."""

    place: int
    divisor: int = 1  # of its last dimension
    dtype: torch.dtype | None = None  # None: the argument's
    rank: int = -1  # that the argument has to have for `dims`
    dims: tuple[tuple[int, int], ...] = ()  # (argument, dimension) of each of the output's


_KINDS = {Argument: "argument", Output: "output", Choice: "choice"}


def launcher(
    launch: Callable[..., None],
    takes: Sequence[Any],
    *,
    count: int,
    dense: Sequence[int] = (),
    outputs: Sequence[Like] = (),
    otherwise: Callable[..., Any],
) -> Callable[..., Any]:
    """An operator's `run`.

    Args:
        launch: The function of `_C`.
        takes: What it takes: an Argument, Output or Choice, or anything else as it is.
        count: How many arguments the operator has.
        dense: Places of tensors that have to be contiguous.
        outputs: What to make, and return: None, a tensor or a tuple.
        otherwise: The same in Python, for whatever is not so: tensors that are not contiguous,
            of another rank or not torch's own, sizes that cannot be divided, what the table of a
            Choice lacks.
    """
    return _C.Launcher(
        launch=launch,
        count=count,
        slots=tuple((_KINDS.get(type(value), "constant"), value) for value in takes),
        outputs=tuple(outputs),
        dense=sum(1 << place for place in set(dense)),
        otherwise=otherwise,
    )
