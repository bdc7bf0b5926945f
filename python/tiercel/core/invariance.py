# SPDX-License-Identifier: Apache-2.0
"""The batch-invariant mode: what a call may not choose by the rest of its batch.

The kernels' launchers read the mode, a flag of the thread or else of the process, in each call:
compiled graphs follow it, and a CUDA graph keeps that of its capture. Needs no torch.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from tiercel import _C

__all__ = ["batch_invariant", "is_batch_invariant", "set_batch_invariant"]

_lock = threading.Lock()
_process = False
_blocks = 0  # that turn the mode on, in any thread

# True where the mode may be on. torch.compile guards on it, as it may record CUDA graphs.
watched = False


def _update(opened: int) -> None:
    global _blocks, watched
    _blocks += opened
    watched = _process or _blocks > 0


class batch_invariant:  # noqa: N801 (used as a function)
    """Runs operators in the batch-invariant mode inside a ``with`` block, in this thread only.

    In the mode the bits of a row's result depend on that row's inputs and its own length: not on
    what else is in the batch, on how a prefill was cut into chunks, or on the size of a CUDA graph.
    The kernels then choose tiles and splits by the sizes of weights, heads and rows alone, which
    costs time. A call that the kernels do not take raises, as ref makes no such promise;
    ``backend="ref"`` still runs it. What holds for each operator, and what it costs:
    https://github.com/tiercel/tiercel/blob/main/docs/numerics.md.

    The mode is read when an operator runs, or when a CUDA graph is captured. Other threads have
    that of `set_batch_invariant`, among them the one in which torch runs a backward.

    Args:
        on: False turns the mode off inside the block.

    Example:
        >>> with tiercel.batch_invariant():
        ...     out = model(tokens)
    """

    def __init__(self, on: bool = True) -> None:
        if not isinstance(on, bool):
            raise TypeError(f"batch_invariant: `on` must be a bool, got {type(on).__name__}")
        self._on = on
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(_C.set_thread_batch_invariant(int(self._on)))
        with _lock:
            _update(int(self._on))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _C.set_thread_batch_invariant(self._before.pop())
        with _lock:
            _update(-int(self._on))


def set_batch_invariant(on: bool) -> None:
    """Turns the batch-invariant mode on or off for the whole process.

    The environment's ``TIERCEL_BATCH_INVARIANT=1`` does it from the start. What a `batch_invariant`
    block says in its thread comes first.

    Example:
        >>> tiercel.set_batch_invariant(True)
    """
    global _process
    if not isinstance(on, bool):
        raise TypeError(f"set_batch_invariant: `on` must be a bool, got {type(on).__name__}")
    with _lock:
        _process = on
        _C.set_batch_invariant(on)
        _update(0)


def is_batch_invariant() -> bool:
    """Whether the batch-invariant mode is on for this thread.

    Example:
        >>> tiercel.is_batch_invariant()
        False
    """
    return _C.batch_invariant()


if os.environ.get("TIERCEL_BATCH_INVARIANT", "0").lower() not in ("", "0", "false", "no", "off"):
    set_batch_invariant(True)
