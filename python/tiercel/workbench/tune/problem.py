# SPDX-License-Identifier: Apache-2.0
"""Problems, candidates and trials, with names that are stable across processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union

Value = Union[int, bool]  # noqa: UP007  (evaluated at run time, on Python 3.10 too)
Candidate = Mapping[str, Value]


def name_of(candidate: Candidate) -> str:
    """``tile_m=64,split_k=true``: the same in every process."""
    return ",".join(f"{name}={_text(value)}" for name, value in candidate.items())


def _text(value: Value) -> str:
    return str(value).lower()


@dataclass(frozen=True)
class Problem:
    """Weights' sizes and dtype; what varies at run time is the number of tokens."""

    op: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str

    @classmethod
    def of(cls, op: str, dtype: str, **sizes: int) -> Problem:
        return cls(op, tuple(sizes.items()), dtype)

    def __getitem__(self, name: str) -> int:
        return dict(self.sizes)[name]

    @property
    def name(self) -> str:
        sizes = ",".join(f"{name}={size}" for name, size in self.sizes)
        return f"{self.op} {sizes},dtype={self.dtype}"

    def to_dict(self) -> dict[str, Any]:
        return {**dict(self.sizes), "dtype": self.dtype}


@dataclass(frozen=True)
class Batch:
    """Trials that one worker takes at once: they share inputs, reference and kernels."""

    problem: Problem
    tokens: int
    candidates: tuple[Candidate, ...]
    number: int  # within the problem and token count

    @property
    def group(self) -> str:
        return f"{self.problem.name} T={self.tokens}"

    @property
    def name(self) -> str:
        return f"{self.group} #{self.number}"

    def trial(self, candidate: Candidate) -> str:
        return f"{self.group} {name_of(candidate)}"


def batches(
    problem: Problem, tokens: int, candidates: list[Candidate], size: int = 8
) -> list[Batch]:
    return [
        Batch(problem, tokens, tuple(candidates[start : start + size]), start // size)
        for start in range(0, len(candidates), size)
    ]
