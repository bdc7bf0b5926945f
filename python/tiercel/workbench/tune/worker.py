# SPDX-License-Identifier: Apache-2.0
"""One worker: takes batches, tries their candidates, and at last the best ones in turn."""

from __future__ import annotations

import os
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tiercel.workbench.bench.launch import WrongResult
from tiercel.workbench.bench.stats import interleave, summarize
from tiercel.workbench.tune.board import Board, Record
from tiercel.workbench.tune.journal import Journal
from tiercel.workbench.tune.problem import Batch, Candidate, Problem, name_of
from tiercel.workbench.tune.progress import Progress

_SAMPLES = 5  # of a candidate in the sweep
_ROUNDS, _ROUND_SAMPLES = 7, 5  # of each finalist
_STARTS = 2  # a trial that took its process with it so often is not tried again
TODAY = "today"
TIMED_OUT = 75  # a worker's exit status when a trial hangs


class Bench(Protocol):
    """What compiles, checks and times; tests bring their own."""

    def facts(self) -> dict[str, str]: ...
    def compile(self, problem: Problem, candidate: Candidate) -> None: ...
    def check(self, problem: Problem, tokens: int, candidate: Candidate | None) -> None:
        """Raises WrongResult. None is what runs today."""

    def sample(
        self, problem: Problem, tokens: int, candidate: Candidate | None, count: int
    ) -> list[float]:
        """Milliseconds a launch."""

    def usable(self) -> bool:
        """Whether the device still answers after an error."""


class DeviceLost(Exception):
    """A candidate broke the device's context: the process has to start anew."""


@dataclass(frozen=True)
class Final:
    """The last round of one problem and number of tokens."""

    problem: Problem
    tokens: int
    candidates: tuple[Candidate, ...]

    @property
    def group(self) -> str:
        return f"{self.problem.name} T={self.tokens}"


def short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def attempt(bench: Bench, batch: Batch, candidate: Candidate) -> Record:
    """Compiles, checks and times one candidate; what is wrong with it is part of the record."""
    record: Record = {"trial": batch.trial(candidate), "candidate": dict(candidate)}
    try:
        step = "does not compile"
        bench.compile(batch.problem, candidate)
        step = "fails"
        bench.check(batch.problem, batch.tokens, candidate)
        samples = bench.sample(batch.problem, batch.tokens, candidate, _SAMPLES)
    except WrongResult as error:
        return record | {"status": "wrong", "reason": str(error)}
    except Exception as error:
        if not bench.usable():
            raise DeviceLost(f"{record['trial']}: {short(error)}") from error
        return record | {"status": step, "reason": short(error)}
    return record | {"status": "ok", "us": statistics.median(samples) * 1e3}


class Watch:
    """Ends the process when a trial takes too long: a hung kernel cannot be called off."""

    def __init__(self, seconds: float, trial: str) -> None:
        self._timer = threading.Timer(seconds, self._end, (seconds, trial))
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    @staticmethod
    def _end(seconds: float, trial: str) -> None:
        print(
            f"tiercel tune: {trial} took more than {seconds:.0f} s; run the command again to go on",
            file=sys.stderr,
            flush=True,
        )
        os._exit(TIMED_OUT)


def sweep(
    batches: Sequence[Batch],
    board: Board,
    bench: Bench,
    journal: Journal,
    progress: Progress,
    trial_limit: float,
) -> None:
    """Until all batches are done, by this worker or another."""
    for record in journal.records.values():
        board.publish(record["trial"], record)
    while (item := board.claim()) is not None:
        batch = batches[item]
        for candidate in batch.candidates:
            trial = batch.trial(candidate)
            if board.find(trial) is not None:
                continue
            if not board.holds(item):
                break
            journal.start(trial)
            if journal.starts.get(trial, 0) >= _STARTS:
                reason = f"its process ended {journal.starts[trial]} times"
                record = {"trial": trial, "candidate": dict(candidate)}
                record |= {"status": "fails", "reason": reason}
            else:
                with Watch(trial_limit, trial):
                    record = attempt(bench, batch, candidate)
            journal.result(record)
            board.publish(trial, record)
            progress.show(board.count(), batch.group)
        if board.holds(item):
            board.finish(item)


def finals(
    groups: Sequence[Final], board: Board, bench: Bench, journal: Journal, trial_limit: float
) -> None:
    """Times the finalists of each group and what runs today in turn, on one device."""
    for key, record in journal.records.items():
        if key.startswith("final "):
            board.publish(key, record)
    while (item := board.claim()) is not None:
        group = groups[item]
        key = final_key(group)
        if board.find(key) is None:
            with Watch(trial_limit * (len(group.candidates) + 1), key):
                record = {"trial": key} | _final(bench, group)
            journal.result(record)
            board.publish(key, record)
        board.finish(item)


def final_key(group: Final) -> str:
    """Says who takes part: another sweep's winners are timed anew."""
    return f"final {group.group}: {' | '.join(name_of(c) for c in group.candidates)}"


def _final(bench: Bench, group: Final) -> Record:
    samplers: dict[str, Any] = {}
    configs: dict[str, Candidate] = {}
    problems: dict[str, str] = {}
    for candidate in (None, *group.candidates):
        name = TODAY if candidate is None else name_of(candidate)
        try:
            if candidate is not None:
                configs[name] = candidate
                bench.compile(group.problem, candidate)
            bench.check(group.problem, group.tokens, candidate)
            samplers[name] = _sampler(bench, group, candidate)
        except Exception as error:
            problems[name] = short(error)
    taken, failed = interleave(samplers, _ROUNDS)
    problems |= {name: short(error) for name, error in failed.items()}
    times = {name: summarize(rounds) for name, rounds in taken.items()}
    return {
        "group": group.group,
        "us": {name: s.median * 1e3 for name, s in times.items()},
        "spread_us": {name: [s.p10 * 1e3, s.p90 * 1e3] for name, s in times.items()},
        "candidates": {name: dict(c) for name, c in configs.items() if name in times},
        "problems": problems,
    }


def _sampler(bench: Bench, group: Final, candidate: Candidate | None) -> Any:
    return lambda: bench.sample(group.problem, group.tokens, candidate, _ROUND_SAMPLES)


def finalists(
    batches: Sequence[Batch], records: Mapping[str, Record], keep: int, precompiled: Any
) -> list[Final]:
    """The fastest of each group, and at least one that the wheel has."""
    groups: dict[tuple[Problem, int], list[tuple[float, str, Candidate]]] = {}
    for batch in batches:
        rows = groups.setdefault((batch.problem, batch.tokens), [])
        for candidate in batch.candidates:
            record = records.get(batch.trial(candidate))
            if record is not None and record["status"] == "ok":
                rows.append((record["us"], name_of(candidate), candidate))
    found = []
    for (problem, tokens), rows in groups.items():
        rows.sort(key=lambda row: row[:2])
        ours = [row for row in rows if precompiled(row[2])][: max(keep // 2, 1)]
        chosen = sorted({row[1]: row for row in rows[:keep] + ours}.values(), key=lambda r: r[:2])
        found.append(Final(problem, tokens, tuple(row[2] for row in chosen)))
    return found
