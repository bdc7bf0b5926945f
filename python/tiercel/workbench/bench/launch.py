# SPDX-License-Identifier: Apache-2.0
"""The launches that an implementation hands to the runner for one case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Unsupported(Exception):
    """An implementation has nothing for this case; the text says why. Not a failure."""


class WrongResult(Exception):
    """The answer differs from the float64 reference by more than the tolerance."""


@dataclass(frozen=True)
class Launch:
    """One call, ready to be made again and again.

    Args:
        run: Makes the call and returns its output tensors as a tuple.
        host: The call as a user writes it in eager mode, where that differs from ``run``.
        exact: Whether it computes exactly what the operator promises.
        strict: Whether the outputs must be the reference's own where others may choose (ties).
        slack: Relative error in the inputs that the implementation's method amounts to.
        graph: Whether it can be captured in a CUDA graph.
        check: Compares the outputs where they are not the operator's, but those of the part of it
            that `details["part"]` names: (outputs) -> the error; raises WrongResult. With `reset`,
            those of any call but the first.
        reset: Of a call that works in place, on what it left before: gives it its inputs back.
        details: What ran, for the record.
    """

    run: Callable[[], tuple[Any, ...]]
    host: Callable[[], Any] | None = None
    exact: bool = True
    strict: bool = False
    slack: float = 0.0
    graph: bool = True
    check: Callable[[tuple[Any, ...]], Any] | None = None
    reset: Callable[[], None] | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Impl:
    """An implementation that is installed here: ours, one of our backends, or a peer."""

    name: str
    version: str
    prepare: Callable[[Any, dict[str, Any]], Launch]  # (case, inputs)
    ours: bool = False


def in_place(
    run: Callable[[], tuple[Any, ...]],
    reset: Callable[[], None],
    check: Callable[[tuple[Any, ...]], Any],
) -> Launch:
    """A call that works on the state that the last one left.

    A replay makes it several times: its outputs must be the bits of one of the first calls after a
    reset, of which `check` compares the first with the reference.
    """
    import torch

    def replayed(outputs: tuple[Any, ...]) -> Any:
        kept = [output.clone() for output in outputs]
        reset()
        again = run()
        error = check(again)
        for _ in range(1024):
            if all(map(torch.equal, kept, again)):
                return error
            again = run()
        raise WrongResult("a replay's results are not those of the same calls, one by one")

    reset()
    return Launch(run, check=replayed, reset=reset)
