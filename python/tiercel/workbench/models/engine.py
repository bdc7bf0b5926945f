# SPDX-License-Identifier: Apache-2.0
"""The way ``engine``: the serving engine of the repository's examples, with the model's weights."""

from __future__ import annotations

import importlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tiercel.workbench.bench import BenchError

if TYPE_CHECKING:
    from tiercel.workbench.models.run import Case

_FILES = ("memory", "model", "scheduler", "engine")


def load(folder: str) -> Any:
    """The engine's module, and with it the modules beside it."""
    for name in _FILES:
        if not (Path(folder) / f"{name}.py").is_file():
            raise BenchError(f"--engine: {folder} has no {name}.py")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("engine")
    finally:
        sys.path.remove(folder)


class Served:
    """Batches of random prompts, one after another, on one engine."""

    def __init__(self, folder: str, model: Any, case: Case, steps: int) -> None:
        module = load(folder)
        kinds = sys.modules["model"]
        self._vocabulary = model.config.vocab_size
        self._case = case
        chunk = 8192 if case.phase == "prefill" else 2048
        # Prompts of a batch end one after another: those that are ready decode meanwhile.
        self._new = 1 if case.phase == "prefill" else steps + case.batch * case.tokens // chunk + 8
        longest = case.tokens + self._new
        with torch.inference_mode():
            weights = kinds.Model(kinds.Config.read(model.config.to_dict()), model.state_dict())
        self.engine = module.Engine(
            weights,
            pages=case.batch * -(-longest // 16),
            most_sequences=case.batch,
            most_tokens=max(chunk, case.batch),
            longest=longest,
        )
        self._generator = torch.Generator().manual_seed(1)
        self.first = 0.0  # seconds of the first step

    def _run(self) -> Iterator[list[Any]]:
        shape = (self._case.batch, self._case.tokens)
        prompts = torch.randint(self._vocabulary, shape, generator=self._generator)
        for prompt in prompts.tolist():
            self.engine.add(prompt, self._new)
        return self.engine.run()  # type: ignore[no-any-return]

    def prefill(self) -> float:
        """Milliseconds until each of the prompts has its first token, on the host's clock."""
        began = time.perf_counter()
        for _ in self._run():
            pass
        return (time.perf_counter() - began) * 1e3

    def decode(self) -> tuple[list[float], list[float]]:
        """Milliseconds between the tokens of all sequences, and those of them that the host waits
        for the GPU."""
        began = time.perf_counter()
        ends: list[float] = []
        waits: list[float] = []
        flight = sys.modules["engine"].Flight
        wait = flight.wait

        def timed(self: Any) -> Any:
            began = time.perf_counter()
            found = wait(self)
            waits.append((time.perf_counter() - began) * 1e3)
            return found

        flight.wait = timed
        try:
            for drawn in self._run():
                now = time.perf_counter()
                if not waits[1:]:
                    self.first = now - began
                if len(drawn) == self._case.batch:
                    ends.append(now)
        finally:
            flight.wait = wait
        times = [(b - a) * 1e3 for a, b in itertools.pairwise(ends)]
        return times, waits[len(waits) - len(times) :]


def measure(
    folder: str | None,
    model: Any,
    case: Case,
    steps: int,
    launches: Callable[[Callable[[], Any]], int | None],
) -> dict[str, Any]:
    """The fields of a record that the engine can fill."""
    assert folder is not None
    served = Served(folder, model, case, steps)
    began = time.perf_counter()
    if case.phase == "prefill":
        served.prefill()
        first_call = time.perf_counter() - began
        times, host, count = [served.prefill() for _ in range(steps)], None, None
    else:
        times, waits = served.decode()
        first_call = served.first
        host = statistics.median(a - b for a, b in zip(times, waits, strict=True))
        count = launches(lambda: served.engine.decode(case.batch))
    cache = served.engine.pages.memory
    of_token = cache.nbytes / cache[0, 0, ..., 0, 0].numel()
    return {
        "cache_bytes": of_token * case.batch * case.tokens,
        "ms_median": statistics.median(times),
        "ms_min": min(times),
        "host_ms": host,
        "peak_mib": None,  # the model's weights are there twice
        "launches": count,
        "first_call_s": first_call,
        "rel_err": None,  # it has tokens, no logits
    }
