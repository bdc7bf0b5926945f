# SPDX-License-Identifier: Apache-2.0
"""Each operator checked against float64 and timed beside PyTorch, on whatever machine this is."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tiercel.plugins.contract import Contract


@dataclass(frozen=True)
class Stop:
    """One operator of the tour."""

    op: str
    case: str
    backend: str  # sm90, or ref where that is what runs here
    why: str
    right: bool
    wrong: str | None = None
    ms: float | None = None
    torch_ms: float | None = None

    @property
    def speedup(self) -> float | None:
        if self.ms is None or self.torch_ms is None or self.backend == "ref":
            return None
        return self.torch_ms / self.ms

    @property
    def cost(self) -> float | None:
        """The overhead of an op on ref: its time over that of the same PyTorch without Tiercel."""
        if self.ms is None or self.torch_ms is None or self.backend != "ref":
            return None
        return self.ms / self.torch_ms


def tour(
    device: str,
    seconds: float,
    *,
    quick: bool = False,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Stop | str]:
    """A stop an operator; an operator's name alone where the time was up before it."""
    from tiercel.ops import _register  # noqa: F401
    from tiercel.plugins.contracts import CONTRACTS

    end = now() + seconds
    with _threads(1 if quick and device == "cpu" else None):
        for contract in CONTRACTS.values():
            if now() > end:
                yield contract.op
            else:
                yield _stop(contract, device, quick)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """PyTorch's own: on few cores that others use too, its threads wait for one another, and on
    small problems that is most of the time."""
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _stop(contract: Contract, device: str, quick: bool) -> Stop:
    from tiercel.workbench.smoke import measure

    rounds, round_ms = (3, 4.0) if quick else (5, 20.0)
    kind = device.partition(":")[0]
    case = contract.cases[0] if quick else contract.timing[kind]
    why = measure.why_not(contract, "sm90", case, device)
    backend = "sm90" if why is None else "ref"  # what a call without `backend` runs on
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tried = measure.try_case(contract, backend, case, device)
        if tried["status"] != "right":
            reason = str(tried["reason"] or tried["status"])
            return Stop(contract.op, str(case), backend, why or "", False, reason)
        times = {"rounds": rounds, "round_ms": round_ms}
        try:
            if backend == "ref":
                ms, torch_ms = measure.race_plain(contract, case, device, **times)
            else:
                ms, torch_ms = measure.race(contract, backend, case, device, **times)
        except Exception as error:  # out of memory, say; the others are still to be seen
            text = f"{type(error).__name__} while it was timed: {str(error).partition(chr(10))[0]}"
            return Stop(contract.op, str(case), backend, why or "", False, text)
    return Stop(contract.op, str(case), backend, why or "", True, None, ms, torch_ms)


def as_line(stop: Stop) -> str:
    mark = "right" if stop.right else "WRONG"
    line = f"{stop.op:<28} {stop.backend:<5} {mark}"
    if not stop.right:
        return f"{line}  {stop.wrong}  ({stop.case})"
    if stop.ms is not None:
        line += f"  {stop.ms * 1e3:10.1f} us"
    if stop.speedup is not None:
        line += f"  {stop.speedup:6.2f} times PyTorch's {stop.torch_ms or 0:.3f} ms"
    if stop.cost is not None:
        line += f"  {stop.cost:6.2f} of PyTorch alone"
    return f"{line}  ({stop.case})"
