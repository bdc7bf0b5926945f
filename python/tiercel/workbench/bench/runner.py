# SPDX-License-Identifier: Apache-2.0
"""Runs one case: every implementation checked first, then all of them timed in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercel.workbench.bench import stats
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import Impl, Launch, Unsupported, WrongResult
from tiercel.workbench.bench.ops import Error, OpBench
from tiercel.workbench.bench.timing import Clock, Replay

_L2_BYTES = 60e6
_MAX_SETS = 64
# From here on an input pushes its own beginning out of the L2: one of them is enough, and several
# implementations with their outputs fit into the GPU's memory.
_ALONE_BYTES = 16 * _L2_BYTES
# A slow operator needs fewer samples: this long in a round, and at least so many of them.
_ROUND_MS, _LEAST = 60.0, 3


@dataclass(frozen=True)
class Settings:
    warmup: int = 3  # replays before each round's samples
    iterations: int = 20  # samples in a round
    rounds: int = 5


@dataclass
class Result:
    """The outcome of one implementation in one case and timing."""

    impl: Impl
    status: str  # ok, wrong, error, unsupported
    timing: str = ""
    reason: str = ""
    launch: Launch | None = None
    rounds: stats.Rounds = field(default_factory=list)
    launches: int = 0
    sets: int = 1
    error: Error | None = None
    ratio: float | None = None  # this one's time over ours

    @property
    def summary(self) -> stats.Summary:
        return stats.summarize(self.rounds)


@dataclass
class _Ready:
    """An implementation that gave the right answer, also from its graph."""

    launch: Launch
    replay: Replay
    error: Error


def input_sets(bench: OpBench, case: Case) -> int:
    """The number of inputs to rotate so that each has left L2 when its turn comes."""
    if bench.hot:
        return 1
    moved = bench.bytes_moved(case)
    if moved >= _ALONE_BYTES:
        return 1
    return min(max(math.ceil(2 * _L2_BYTES / moved), 2), _MAX_SETS)


def run_case(
    bench: OpBench,
    case: Case,
    impls: Sequence[Impl],
    clock: Clock,
    settings: Settings,
    device: str = "cuda",
) -> list[Result]:
    """The results in the order of `impls`; those of host timing follow."""
    sets = [bench.make(case, device, seed) for seed in range(input_sets(bench, case))]
    expected = bench.reference(case, sets[0])
    ready: dict[str, _Ready] = {}
    results: dict[str, Result] = {}
    for impl in impls:
        try:
            ready[impl.name] = prepare(bench, case, impl, sets, expected, clock)
        except Unsupported as reason:
            results[impl.name] = Result(impl, "unsupported", reason=str(reason))
        except WrongResult as reason:
            results[impl.name] = Result(impl, "wrong", reason=str(reason))
        except Exception as error:
            results[impl.name] = Result(impl, "error", reason=first_line(error))

    del expected  # in float64: the largest thing in memory
    samplers = {name: _sampler(r.replay, settings) for name, r in ready.items()}
    taken, failed = stats.interleave(samplers, settings.rounds)
    for impl in impls:
        if impl.name in failed:
            text = first_line(failed[impl.name])
            results[impl.name] = Result(impl, "error", reason=text)
        elif impl.name in taken:
            made = ready[impl.name]
            results[impl.name] = Result(
                impl,
                "ok",
                made.replay.timing,
                launch=made.launch,
                rounds=taken[impl.name],
                launches=made.replay.launches,
                sets=len(sets),
                error=made.error,
            )
    ordered = [results[impl.name] for impl in impls]
    hosted = _host(bench, case, sets[0], ordered, clock, settings) if case.host else []
    for group in (ordered, hosted):
        _set_ratios(group)
    return ordered + hosted


def prepare(
    bench: OpBench, case: Case, impl: Impl, sets: list[Any], expected: Any, clock: Clock
) -> _Ready:
    launches = [impl.prepare(case, inputs) for inputs in sets]
    for launch in launches[1:]:
        launch.run()
    _check(bench, sets[0], expected, launches[0].run(), launches[0], first=True)
    replay = clock.prepare(launches)
    # Once more, from what will be timed: a graph that does nothing must not pass by old results.
    if launches[0].reset is not None:
        launches[0].reset()
    else:
        given = {value.data_ptr() for value in sets[0].values() if hasattr(value, "data_ptr")}
        for output in replay.outputs:
            if output.data_ptr() not in given:
                _clear(output)
    clock.synchronize()
    replay.run()
    clock.synchronize()
    error = _check(bench, sets[0], expected, replay.outputs, launches[0], first=False)
    return _Ready(launches[0], replay, error)


def _check(
    bench: OpBench, inputs: Any, expected: Any, outputs: Any, launch: Launch, *, first: bool
) -> Error:
    if launch.check is None or (first and launch.reset is not None):
        return bench.check(inputs, expected, outputs, launch)
    found: Error = launch.check(outputs)
    return found


def _clear(output: Any) -> None:
    """Not all dtypes have a fill."""
    if output.dtype.itemsize == 1:
        import torch

        output = output.view(torch.uint8)
    output.zero_()


def _sampler(replay: Replay, settings: Settings) -> Callable[[], list[float]]:
    fitting: list[tuple[int, int]] = []  # warm-up and samples, known once one has been taken

    def sample() -> list[float]:
        if not fitting:
            fitting.append(_fit(replay, settings))
        warmup, iterations = fitting[0]
        if warmup:
            replay.sample(warmup)
        return replay.sample(iterations)

    return sample


def _fit(replay: Replay, settings: Settings) -> tuple[int, int]:
    if settings.iterations <= _LEAST:
        return settings.warmup, settings.iterations
    ms = replay.sample(1)[0] * replay.launches
    iterations = min(settings.iterations, max(math.ceil(_ROUND_MS / max(ms, 1e-6)), _LEAST))
    return min(settings.warmup, iterations // _LEAST), iterations


def _host(
    bench: OpBench,
    case: Case,
    inputs: dict[str, Any],
    timed: Sequence[Result],
    clock: Clock,
    settings: Settings,
) -> list[Result]:
    """Eager calls as a user writes them, for what ran right, and the operator's baselines."""
    impls: dict[str, Impl] = {}
    launches: dict[str, Launch | None] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for result in timed:
        if result.launch is not None:
            name = result.impl.name
            impls[name], launches[name] = result.impl, result.launch
            calls[name] = result.launch.host or result.launch.run
    if not calls:
        return []
    for name, make in bench.host_baselines.items():
        impls[name] = Impl(name, _torch_version(), lambda case, inputs: Launch(tuple))
        launches[name], calls[name] = None, make(case, inputs)

    def sampler(call: Callable[[], Any]) -> Callable[[], list[float]]:
        return lambda: clock.host(call, 3)

    for call in calls.values():
        call()
    taken, failed = stats.interleave({n: sampler(c) for n, c in calls.items()}, settings.rounds)
    results = []
    for name, impl in impls.items():
        if name in failed:
            results.append(Result(impl, "error", "host", reason=first_line(failed[name])))
        else:
            results.append(Result(impl, "ok", "host", launch=launches[name], rounds=taken[name]))
    return results


def _set_ratios(results: Sequence[Result]) -> None:
    ours = next((r for r in results if r.impl.ours and r.status == "ok"), None)
    for result in results:
        if ours is not None and result is not ours and result.status == "ok":
            result.ratio = stats.ratio(result.rounds, ours.rounds)


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
