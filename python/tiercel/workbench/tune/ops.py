# SPDX-License-Identifier: Apache-2.0
"""How each operator is tuned: the `Tunable`s of the families' ``tune.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tiercel import _families
from tiercel.workbench.tune.hardware import Needs
from tiercel.workbench.tune.problem import Candidate, Problem


@dataclass(frozen=True)
class Tunable:
    """An operator that can be tuned, as data.

    Args:
        op: Its public name.
        command: Its name as a subcommand.
        sizes: What a problem's sizes are called.
        problems: Sizes that are tuned where none are named.
        tokens: Numbers of tokens that are tuned where none is named.
        dtypes: The dtypes; the first is the default.
        invalid: Why a problem with a number of tokens cannot be tuned, or None.
        candidates: (problem, tokens, quick, compiled) -> what to try, with or without what has to
            be compiled here.
        needs: What a block of a candidate needs.
        precompiled: Whether the wheel has a candidate's kernel.
        case: (problem, tokens) -> the benchmark's case of it.
        launch: (problem, candidate or None for today's choice) -> (inputs, out) -> the launch,
            which fills `out` or returns what it made.
        config: A candidate as it is kept in a file.
    """

    op: str
    command: str
    sizes: tuple[str, ...]
    problems: Sequence[tuple[int, ...]]
    tokens: Sequence[int]
    dtypes: Sequence[str]
    invalid: Callable[[Problem, int], str | None]
    candidates: Callable[[Problem, int, bool, bool], list[Candidate]]
    needs: Callable[[Problem, int, Candidate], Needs]
    precompiled: Callable[[Candidate], bool]
    case: Callable[[Problem, int], Any]
    launch: Callable[[Problem, Candidate | None], Callable[[Any, Any], Any]]
    config: Callable[[Candidate], dict[str, Any]]


def load() -> dict[str, Tunable]:
    """All of them by subcommand. Importing them needs no torch."""
    found = {}
    for module in _families.modules("tune"):
        for value in vars(module).values():
            if isinstance(value, Tunable):
                found[value.command] = value
    return dict(sorted(found.items()))
