# SPDX-License-Identifier: Apache-2.0
"""Builds models, runs them in several ways, and measures single steps."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tiercel
from tiercel._terminal import line
from tiercel.workbench.bench import BenchError
from tiercel.workbench.bench.records import rounded
from tiercel.workbench.bench.runner import first_line
from tiercel.workbench.models import engine

CONFIGS = Path(__file__).parent / "configs"
_SPARE = 512  # places of a cache behind the context, for the steps that are timed
_WARMUP = 4
# Events on the GPU's timeline that are the profiler's own work.
_OF_THE_PROFILER = {
    "Activity Buffer Request",
    "Buffer Flush",
    "Command Buffer Full",
    "Driver Compiler",
    "Instrumentation",
    "Lazy Function Loading",
    "Resource",
    "Runtime Triggered Module Loading",
    "UVM Activity Init",
}

Step = Callable[[Callable[..., Any]], Tensor]


@dataclass(frozen=True)
class Case:
    """A phase, and how many sequences of how many tokens."""

    phase: str
    batch: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.tokens}"

    @property
    def new_tokens(self) -> int:
        """The tokens that a step works on."""
        return self.batch * (1 if self.phase == "decode" else self.tokens)


@dataclass(frozen=True)
class Sizes:
    """A model's class, its whole number of layers, and the arguments of its configuration."""

    name: str
    kind: str
    layers: int
    config: dict[str, Any]


def names() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def read_sizes(name: str) -> Sizes:
    """Those of `configs/`, or of a file of the user's."""
    path = CONFIGS / f"{name}.json"
    if name not in names():
        path = Path(name)
        if path.suffix != ".json":
            raise BenchError(
                f"no model {line(name)!r}; there are {', '.join(names())}, or FILE.json"
            )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Sizes(path.stem, str(found["class"]), int(found["layers"]), dict(found["config"]))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: wants `class`, `layers` and `config`: {line(error)}") from None


def build(sizes: Sizes, layers: int, device: str) -> Any:
    transformers = import_transformers()
    kind = getattr(transformers, f"{sizes.kind}Config", None)
    if kind is None:
        raise BenchError(f"transformers {transformers.__version__} has no {sizes.kind}Config")
    config = kind(**sizes.config, num_hidden_layers=layers, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise BenchError("models come from transformers: pip install 'transformers>=5'") from None
    return transformers


def step_of(case: Case, model: Any, device: str) -> Step:
    """(the model, or a compiled one) -> logits or a loss; the inputs are always the same."""
    torch.manual_seed(1)
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (case.batch, case.tokens), device=device)
    if case.phase == "prefill":
        return lambda run: run(ids, use_cache=False, logits_to_keep=1).logits
    return (_decode if case.phase == "decode" else _train)(model, ids)


def _decode(model: Any, ids: Tensor) -> Step:
    """One token over a full context; each step writes to the same place."""
    context = ids.shape[1]
    cache = import_transformers().StaticCache(config=model.config, max_cache_len=context + _SPARE)
    for row in ids.split(256, 1):
        model(row, past_key_values=cache, logits_to_keep=1)

    def step(run: Callable[..., Any]) -> Tensor:
        logits = run(ids[:, :1], past_key_values=cache).logits
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)
        return logits  # type: ignore[no-any-return]

    return step


def _train(model: Any, ids: Tensor) -> Step:
    """Forward, loss and backward, without an optimizer."""

    def step(run: Callable[..., Any]) -> Tensor:
        with torch.enable_grad():
            loss = run(ids, labels=ids, use_cache=False).loss
            loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()  # type: ignore[no-any-return]

    return step


@contextlib.contextmanager
def prepared(way: str, model: Any, case: Case, device: str) -> Iterator[Any]:
    """The model as it is called that way."""
    torch._dynamo.reset()
    report = None
    if way.startswith("tiercel"):
        from tiercel.integrations.transformers import apply

        report = apply(model)
    elif way == "liger":
        _apply_liger(model)
    run = model
    if way.endswith(".compiled"):
        graphs = case.phase == "decode" and device == "cuda"
        run = torch.compile(model, fullgraph=True, mode="reduce-overhead" if graphs else None)
    try:
        yield run
    finally:
        if report is not None:
            report.undo()


def _apply_liger(model: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


def version(way: str) -> str | None:
    """The version of what makes a way what it is; None if that is not installed."""
    package = way.partition(".")[0]
    if package in ("tiercel", "engine"):
        return tiercel.__version__
    try:
        return importlib.metadata.version({"liger": "liger-kernel"}.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


class Timer:
    """Times of single steps, on a GPU between events."""

    def __init__(self, device: str) -> None:
        self._gpu = device == "cuda"

    def _wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def _step(self, function: Callable[[], Any]) -> Any:
        if not self._gpu:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        function()
        last.record()
        return first, last

    def measure(self, function: Callable[[], Any], steps: int) -> dict[str, Any]:
        self._wait()
        start = time.perf_counter()
        function()
        self._wait()
        first_call = time.perf_counter() - start
        for _ in range(_WARMUP):
            function()
        self._wait()
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        samples = [self._step(function) for _ in range(steps)]
        host = (time.perf_counter() - start) / steps * 1e3
        self._wait()
        if self._gpu:
            samples = [first.elapsed_time(last) for first, last in samples]
        return {
            "ms_median": statistics.median(samples),
            "ms_min": min(samples),
            "host_ms": host,
            "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if self._gpu else None,
            "launches": self.launches(function),
            "first_call_s": first_call,
        }

    def launches(self, function: Callable[[], Any]) -> int | None:
        """The kernels, copies and fills of a step on the GPU."""
        if not self._gpu:
            return None
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            function()
            torch.cuda.synchronize()
        on_gpu = (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        return sum(event.name not in _OF_THE_PROFILER for event in on_gpu)


def measure(
    sizes: Sizes,
    layers: int,
    cases: Sequence[Case],
    ways: Sequence[str],
    steps: int,
    device: str,
    engine_folder: str | None = None,
) -> Iterator[dict[str, Any]]:
    """A record for each case and way, without what the records of a run share."""
    model, timer = build(sizes, layers, device), Timer(device)
    right: dict[Case, Tensor] = {}
    for way in ways:
        for case in cases:
            if way == "engine" and case.phase == "train":
                continue
            record = {"model": sizes.name, "layers": layers, "phase": case.phase}
            record |= {"case": case.name, "way": way, "version": version(way)}
            try:
                if way == "engine":
                    found = engine.measure(engine_folder, model, case, steps, timer.launches)
                else:
                    found = _measure(model, timer, case, way, right, steps, device)
                record |= {"status": "ok", **found}
                record["tokens_per_s"] = case.new_tokens / found["ms_median"] * 1e3
            except Exception as error:  # the other ways are still measured
                record |= {"status": "failed", "reason": first_line(error)[:500]}
            model.zero_grad(set_to_none=True)
            if device == "cuda":
                torch.cuda.empty_cache()
            yield {name: rounded(value) for name, value in record.items()}


def _measure(
    model: Any,
    timer: Timer,
    case: Case,
    way: str,
    right: dict[Case, Tensor],
    steps: int,
    device: str,
) -> dict[str, Any]:
    with torch.no_grad():
        step = step_of(case, model, device)
        with prepared(way, model, case, device) as run:
            call = functools.partial(step, run)
            found = timer.measure(call, steps)
            got = call().float().clone()
    known = right.setdefault(case, got)
    return {**found, "rel_err": float((got - known).norm() / known.norm())}
