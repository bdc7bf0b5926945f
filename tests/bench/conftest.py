# SPDX-License-Identifier: Apache-2.0
"""A clock without a GPU, a toy operator, and records."""

from pathlib import Path

import pytest
import torch

from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import Impl, Launch, WrongResult
from tiercel.workbench.bench.ops import Error, OpBench

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class FakeReplay:
    timing = "graph"

    def __init__(self, clock, launches):
        self.clock = clock
        self.items = launches
        self.name = launches[0].details["name"]
        self.launches = len(launches)
        self.outputs = launches[0].run()

    def run(self):
        self.clock.log.append(("run", self.name))
        if self.name in self.clock.dead_graphs:
            return
        for output, new in zip(self.outputs, self.items[0].run(), strict=True):
            output.copy_(new)

    def sample(self, count):
        self.clock.log.append(("sample", self.name, count))
        return [self.clock.take(self.name) for _ in range(count)]


class FakeClock:
    """Times come from a table: name -> milliseconds, or a list of them to go through."""

    def __init__(self, times, host=None):
        self.times = {k: v if isinstance(v, list) else [v] for k, v in times.items()}
        self.host_ms = host or {}
        self.log = []
        self.dead_graphs = set()
        self._taken = {}

    def take(self, name):
        value = self.times[name][self._taken.get(name, 0) % len(self.times[name])]
        self._taken[name] = self._taken.get(name, 0) + 1
        if isinstance(value, Exception):
            raise value
        return value

    def synchronize(self):
        pass

    def prepare(self, launches):
        self.log.append(("prepare", launches[0].details["name"], len(launches)))
        return FakeReplay(self, launches)

    def host(self, call, count):
        call()
        return [self.host_ms.get(getattr(call, "host_name", ""), 0.005)] * count

    def sampled(self):
        return [entry[1] for entry in self.log if entry[0] == "sample"]


@pytest.fixture
def fake_clock():
    return FakeClock


def _check(inputs, expected, outputs, launch):
    distance = (outputs[0].double() - expected).abs()
    if float(distance.max()) > 1e-6:
        raise WrongResult(f"{float(distance.max()):.1f} off")
    return Error(rms=float(distance.square().mean().sqrt()), maximum=float(distance.max()))


@pytest.fixture
def toy():
    """An operator that doubles n numbers."""
    return OpBench(
        family="toys",
        op="double",
        params={"n": None, "kind": "plain"},
        make=lambda case, device, seed: {"x": torch.arange(1.0, case["n"] + 1)},
        call=lambda case, inputs: ((inputs["x"],), {}),
        out=lambda case, inputs: None,
        bytes_moved=lambda case: case["n"] * 8,
        reference=lambda case, inputs: inputs["x"].double() * 2,
        check=_check,
        hot=True,
    )


@pytest.fixture
def toy_case():
    return Case("toys", "double", "float32", {"n": 4, "kind": "plain"})


@pytest.fixture
def impl():
    """impl(name, factor): one that multiplies by `factor`, which is right for 2."""

    def make(name, factor=2.0, *, ours=False, error=None, **launch):
        def prepare(case, inputs):
            if error is not None:
                raise error
            host = launch.pop("host", None)
            return Launch(
                lambda: (inputs["x"] * factor,), details={"name": name}, host=host, **launch
            )

        return Impl(name, "1.0", prepare, ours=ours)

    return make


@pytest.fixture
def record():
    """record(impl, ms, ...): a valid one; fields by keyword."""

    def make(impl="tiercel", ms=0.002, **fields):
        made = {
            "run": "r1",
            "date": "2026-01-02T03:04:05Z",
            "commit": "0123456789abcdef",
            "gpu": "NVIDIA H200",
            "driver": "580.1",
            "torch": "2.11.0",
            "command": "tiercel bench --suite full",
            "family": "routing",
            "op": "topk_softmax",
            "case": "T16 E128 k8 renorm",
            "dtype": "bfloat16",
            "impl": impl,
            "version": "1.0",
            "timing": "graph",
            "status": "ok",
            "ms_median": ms,
            "ms_p10": ms * 0.9,
            "ms_p90": ms * 1.1,
            "gbps": 100.0,
            "tflops": None,
            "limit_frac": 0.25,
            "rel_err": 1e-7,
            "exact": True,
            "ratio": None if impl == "tiercel" else ms / 0.002,
            "round_ms": [ms] * 5,
        }
        return made | fields

    return make


@pytest.fixture
def benchmarks():
    return BENCHMARKS
