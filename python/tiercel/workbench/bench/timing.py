# SPDX-License-Identifier: Apache-2.0
"""Clocks: GPU time by events around CUDA-graph replays, host time around a loop of calls.

The runner sees a clock only by `Clock` and `Replay`, so tests bring their own.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tiercel.workbench.bench.launch import Launch

# A replay costs a few microseconds by itself: it holds launches for this long, within these
# numbers, so that a launch's share of that cost vanishes; beyond _LONG_MS one launch is enough.
_TARGET_MS, _LONG_MS = 0.5, 2.0
_MIN_LAUNCHES, _MAX_LAUNCHES = 4, 400
_HOST_CALLS = 400  # below the driver's queue depth: the loop never waits for the GPU


class Replay(Protocol):
    timing: str  # graph or events
    launches: int  # in one sample
    outputs: tuple[Any, ...]  # of the first set of inputs

    def run(self) -> None: ...
    def sample(self, count: int) -> list[float]: ...  # milliseconds a launch


class Clock(Protocol):
    def synchronize(self) -> None: ...
    def prepare(self, launches: Sequence[Launch]) -> Replay: ...
    def host(self, call: Callable[[], Any], count: int) -> list[float]: ...


class CudaClock:
    """The clock of a CUDA GPU."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        import torch

        self._torch = torch
        self._now = now

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def prepare(self, launches: Sequence[Launch]) -> Replay:
        """A replay of the launches in turn; each has run once before."""
        graph = all(launch.graph for launch in launches)
        runs = [launch.run for launch in launches]
        make = _GraphReplay if graph else _EventReplay
        # A graph cannot reuse the memory that a check in float64 left in the allocator.
        self._torch.cuda.empty_cache()
        pilot = make(self._torch, runs, self._pilot(runs))
        pilot.sample(2)
        per_launch = min(pilot.sample(3))
        count = launches_for(per_launch, len(runs))
        return pilot if count == pilot.launches else make(self._torch, runs, count)

    def _pilot(self, runs: Sequence[Callable[[], Any]]) -> int:
        """Launches to time first: 20, or one turn of what takes a millisecond."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        runs[0]()
        end.record()
        self.synchronize()
        return _rounded(20 if start.elapsed_time(end) < 1.0 else 1, len(runs))

    def host(self, call: Callable[[], Any], count: int) -> list[float]:
        """Milliseconds a call that the CPU is busy with it; the GPU's queue never fills."""
        samples = []
        collecting = gc.isenabled()
        gc.disable()
        try:
            for _ in range(count):
                self.synchronize()
                start = self._now()
                for _ in range(_HOST_CALLS):
                    call()
                samples.append((self._now() - start) * 1e3 / _HOST_CALLS)
        finally:
            if collecting:
                gc.enable()
            self.synchronize()
        return samples


def launches_for(ms: float, sets: int) -> int:
    """The launches of `ms` in a sample: whole turns through the sets of inputs."""
    wanted = math.ceil(_TARGET_MS / max(ms, 1e-6))
    least = min(math.ceil(_LONG_MS / max(ms, 1e-6)), _MIN_LAUNCHES)
    return _rounded(min(max(wanted, least), _MAX_LAUNCHES), sets)


def _rounded(count: int, sets: int) -> int:
    return -(-count // sets) * sets


class _EventReplay:
    """Launches in a loop between events: for what no graph can hold."""

    timing = "events"

    def __init__(self, torch: Any, runs: Sequence[Callable[[], Any]], launches: int) -> None:
        self._torch = torch
        self._runs = runs
        self.launches = launches
        self.outputs = runs[0]()

    def run(self) -> None:
        for number in range(self.launches):
            outputs = self._runs[number % len(self._runs)]()
            if number % len(self._runs) == 0:
                self.outputs = outputs

    def sample(self, count: int) -> list[float]:
        event = self._torch.cuda.Event
        events = [event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for after in events[1:]:
            self.run()
            after.record()
        self._torch.cuda.synchronize()
        pairs = itertools.pairwise(events)
        return [a.elapsed_time(b) / self.launches for a, b in pairs]


class _GraphReplay(_EventReplay):
    timing = "graph"

    def __init__(self, torch: Any, runs: Sequence[Callable[[], Any]], launches: int) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up off the default stream, as captures want it
            for run in runs:
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        self._torch = torch
        self._runs = runs
        self.launches = launches
        with torch.cuda.graph(self._graph):
            _EventReplay.run(self)
        self.run()
        torch.cuda.synchronize()

    def run(self) -> None:
        self._graph.replay()
