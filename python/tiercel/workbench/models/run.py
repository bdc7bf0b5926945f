# SPDX-License-Identifier: Apache-2.0
"""Builds models, runs them in several ways, and measures single steps."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tiercel
from tiercel._terminal import line
from tiercel.workbench.bench import BenchError
from tiercel.workbench.bench.records import rounded
from tiercel.workbench.bench.runner import first_line
from tiercel.workbench.models import engine, mxfp4

CONFIGS = Path(__file__).parent / "configs"
_SPARE = 512  # places of a cache behind the context, for the steps that are timed
_WARMUP = 4
_LEAST = 0.5  # seconds of measurement; 0.1 were too few on a host that is slower for a moment
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


@dataclass(frozen=True)
class Step:
    """(The model, or a compiled one) -> logits or a loss; the inputs are always the same."""

    run: Callable[[Callable[..., Any]], Tensor]
    cache_bytes: float = 0.0  # of keys and values, which a decoding step reads


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
    """A model's class, its whole number of layers, the arguments of its configuration, and whether
    its published experts are in MXFP4."""

    name: str
    kind: str
    layers: int
    config: dict[str, Any]
    mxfp4: bool = False

    def changed(self, words: Sequence[str]) -> Sizes:
        """With values of the configuration given as NAME=VALUE, in JSON."""
        config = dict(self.config)
        for word in words:
            name, _, value = word.partition("=")
            try:
                config[name] = json.loads(value)
            except ValueError:
                raise BenchError(f"--set: {line(word)!r} is not NAME=VALUE, in JSON") from None
        name = f"{self.name} with {', '.join(words)}" if words else self.name
        return replace(self, name=name, config=config)


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
        kind, layers, config = str(found["class"]), int(found["layers"]), dict(found["config"])
        return Sizes(path.stem, kind, layers, config, found.get("experts") == "mxfp4")
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
    torch.manual_seed(1)
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (case.batch, case.tokens), device=device)
    if case.phase == "prefill":
        return Step(lambda run: run(ids, use_cache=False, logits_to_keep=1).logits)
    return (_decode if case.phase == "decode" else _train)(model, ids)


def _decode(model: Any, ids: Tensor) -> Step:
    """One token over a full context; each step writes to the same place, or moves a full sliding
    cache on."""
    context = ids.shape[1]
    cache = import_transformers().StaticCache(config=model.config, max_cache_len=context + _SPARE)
    for row in ids.split(256, 1):
        model(row, past_key_values=cache, logits_to_keep=1)

    def step(run: Callable[..., Any]) -> Any:
        logits = run(ids[:, :1], past_key_values=cache).logits
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)
            if layer.is_sliding:  # a number of Python's, of which a graph would know each value
                layer.cumulative_length_int = context
        return logits

    used = 0.0
    for layer in cache.layers:
        share = min(1.0, context / layer.max_cache_len)
        used += share * (layer.keys.nbytes + layer.values.nbytes)
    return Step(step, used)


def _train(model: Any, ids: Tensor) -> Step:
    """Forward, loss and backward, without an optimizer."""

    def step(run: Callable[..., Any]) -> Tensor:
        with torch.enable_grad():
            loss = run(ids, labels=ids, use_cache=False).loss
            loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()  # type: ignore[no-any-return]

    return Step(step)


def floor_ms(model: Any, new_tokens: int, cache_bytes: float) -> float | None:
    """The time to read once what a step needs: weights, keys and values; None without a GPU.

    Counts as many experts as random choices of each token name.
    """
    from tiercel.integrations.transformers.experts import is_experts

    tables = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    seen = {id(tables[0])} if tables[0] is not tables[1] else set()
    total = cache_bytes
    for module in model.modules():
        share = 1.0
        if is_experts(module):
            share -= (1 - model.config.num_experts_per_tok / module.num_experts) ** new_tokens
        for x in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            total += 0 if id(x) in seen else share * x.nbytes
            seen.add(id(x))
    if model.device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(model.device)
    clock = getattr(properties, "memory_clock_rate", None)  # not in every torch
    return clock and total / (2e3 * clock * properties.memory_bus_width / 8) * 1e3


@contextlib.contextmanager
def prepared(
    way: str, model: Any, case: Case, device: str, tensors: dict[str, Tensor]
) -> Iterator[tuple[Any, str | None]]:
    """The model as it is called that way, and what Tiercel replaced of it.

    `tensors` are the experts' in MXFP4, with which ours infer.
    """
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        text = None
        if way.startswith("tiercel"):
            from tiercel.integrations.transformers import apply

            if tensors and case.phase != "train":
                stack.enter_context(mxfp4.used(model, tensors))
            report = apply(model)
            stack.callback(report.undo)
            text = str(report)
        elif way == "liger":
            _apply_liger(model)
        run = model.train(case.phase == "train")
        stack.callback(model.eval)
        if way.endswith(".compiled"):
            graphs = case.phase == "decode" and device == "cuda"
            run = torch.compile(model, fullgraph=True, mode="reduce-overhead" if graphs else None)
        yield run, text


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


def keep_compiled(folder: Path) -> None:
    """Makes torch.compile look in `folder` for what an earlier run compiled, and leave its own."""
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        place = folder.resolve() / name
        place.mkdir(parents=True, exist_ok=True)
        os.environ[variable] = str(place)


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
        samples, host = [], []
        start = time.perf_counter()
        while not host or time.perf_counter() - start < _LEAST:
            began = time.perf_counter()
            samples += [self._step(function) for _ in range(steps)]
            host.append((time.perf_counter() - began) / steps * 1e3)
            self._wait()
        if self._gpu:
            samples = [first.elapsed_time(last) for first, last in samples]
        return {
            "ms_median": statistics.median(samples),
            "ms_min": min(samples),
            "host_ms": statistics.median(host),
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
    until: float | None = None,
) -> Iterator[dict[str, Any]]:
    """A record for each case and way, without what the records of a run share.

    None begins after `until`, on the clock of time.monotonic().
    """
    model, timer = None, Timer(device)
    tensors: dict[str, Tensor] = {}
    right: dict[Case, Tensor] = {}
    # Compiled ways behind the others: nothing that a compiler leaves behind shares the host with
    # them. Liger last: what it does to the model stays.
    for way in sorted(ways, key=lambda way: (way == "liger", way.endswith(".compiled"))):
        for case in cases:
            if way == "engine" and case.phase == "train":
                continue
            record = {"model": sizes.name, "layers": layers, "phase": case.phase}
            record |= {"case": case.name, "way": way, "version": version(way)}
            if until is not None and time.monotonic() > until:
                yield record | {"status": "left out"}
                continue
            if model is None:
                model = build(sizes, layers, device)
                tensors = mxfp4.draw(model) if sizes.mxfp4 else {}
            try:
                if way == "engine":
                    found = engine.measure(engine_folder, model, case, steps, timer.launches)
                    if case.phase == "decode":
                        cache = found.pop("cache_bytes")
                        found["floor_ms"] = floor_ms(model, case.new_tokens, cache)
                else:
                    found = _measure(model, timer, case, way, right, steps, device, tensors)
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
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    with torch.no_grad():
        step = step_of(case, model, device)
        with prepared(way, model, case, device, tensors) as (run, replaced):
            call = functools.partial(step.run, run)
            found = timer.measure(call, steps)
            got = call().float().clone()
            if case.phase == "decode":
                found["floor_ms"] = floor_ms(model, case.new_tokens, step.cache_bytes)
    if replaced is not None:
        found["replaced"] = replaced
    if way == "transformers":
        right[case] = got
    known = right.get(case)
    error = None if known is None else float((got - known).norm() / known.norm())
    return {**found, "rel_err": error}
