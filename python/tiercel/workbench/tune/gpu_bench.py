# SPDX-License-Identifier: Apache-2.0
"""Checks and times candidates on this process's GPU, as ``tiercel bench`` does operators."""

from __future__ import annotations

from typing import Any

from tiercel.workbench.bench import ops as bench_ops
from tiercel.workbench.bench.launch import Impl, Launch
from tiercel.workbench.bench.runner import input_sets, prepare
from tiercel.workbench.bench.timing import Clock, CudaClock
from tiercel.workbench.tune.ops import Tunable
from tiercel.workbench.tune.problem import Candidate, Problem, name_of


class GpuBench:
    """Inputs and the float64 reference of one problem are kept while its candidates are tried."""

    def __init__(self, tunable: Tunable, clock: Clock | None = None, device: str = "cuda") -> None:
        self._tunable = tunable
        self._bench = bench_ops.load()[tunable.op]
        self._clock = clock or CudaClock()
        self._device = device
        self._open: tuple[Problem, int] | None = None
        self._case: Any = None
        self._sets: list[Any] = []
        self._expected: Any = None
        self._replays: dict[str, Any] = {}

    def facts(self) -> dict[str, str]:
        import tiercel
        from tiercel.workbench.bench.environment import describe

        about = describe()
        facts = {name: str(about[name]) for name in ("gpu", "driver", "torch", "commit")}
        return facts | {"tiercel": tiercel.__version__}

    def compile(self, problem: Problem, candidate: Candidate) -> None:
        self._tunable.launch(problem, candidate)

    def check(self, problem: Problem, tokens: int, candidate: Candidate | None) -> None:
        self._enter(problem, tokens)
        launch = self._tunable.launch(problem, candidate)

        def prepared(case: Any, inputs: Any) -> Launch:
            out = self._bench.out(case, inputs)

            def run() -> tuple[Any, ...]:
                made = launch(inputs, out)
                return made if isinstance(made, tuple) else (out if made is None else made,)

            return Launch(run, strict=True)

        impl = Impl("tiercel", "", prepared, ours=True)
        made = prepare(self._bench, self._case, impl, self._sets, self._expected, self._clock)
        self._replays[_name(candidate)] = made.replay
        # Graphs hold memory: keep those of the largest final round, no more.
        while len(self._replays) > 32:
            self._replays.pop(next(iter(self._replays)))

    def sample(
        self, problem: Problem, tokens: int, candidate: Candidate | None, count: int
    ) -> list[float]:
        replay = self._replays[_name(candidate)]
        replay.sample(1)
        samples: list[float] = replay.sample(count)
        return samples

    def usable(self) -> bool:
        try:
            self._clock.synchronize()
        except Exception:
            return False
        return True

    def _enter(self, problem: Problem, tokens: int) -> None:
        if self._open == (problem, tokens):
            return
        self._replays.clear()
        self._case = self._tunable.case(problem, tokens)
        sets = range(input_sets(self._bench, self._case))
        self._sets = [self._bench.make(self._case, self._device, seed) for seed in sets]
        self._expected = self._bench.reference(self._case, self._sets[0])
        self._open = (problem, tokens)


def _name(candidate: Candidate | None) -> str:
    return "today" if candidate is None else name_of(candidate)
