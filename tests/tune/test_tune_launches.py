# SPDX-License-Identifier: Apache-2.0
"""`tiercel tune` calls the native functions with arguments that they take. Plans stand in for the
launches, which need a GPU."""

import pytest
from support.dlpack_tensor import as_cuda

from tiercel import _C
from tiercel.workbench.bench import ops as bench_ops
from tiercel.workbench.tune import ops
from tiercel.workbench.tune.problem import Problem

pytestmark = pytest.mark.torch

SIZES = {"N": 256, "K": 512, "E": 8, "k": 2, "H": 256, "I": 256}
TUNABLES = ops.load()


@pytest.fixture
def planned(monkeypatch):
    """The kernels that launches would have run."""
    kernels = []
    plans = {name: getattr(_C, name) for name in dir(_C) if name.endswith("_plan")}
    for name, native in plans.items():

        def plan(*args, native=native):
            return native(*map(as_cuda, args))

        def launch(*args, plan=plan):
            kernels.append(plan(*args)["kernel"])

        monkeypatch.setattr(_C, name, plan)
        if hasattr(_C, name.removesuffix("_plan")):
            monkeypatch.setattr(_C, name.removesuffix("_plan"), launch)
    return kernels


@pytest.mark.parametrize("command", sorted(TUNABLES))
def test_launches_take_the_candidates(command, planned):
    tunable = TUNABLES[command]
    bench = bench_ops.load()[tunable.op]
    sizes = {name: SIZES[name] for name in tunable.sizes}
    problem, tokens = Problem.of(tunable.op, tunable.dtypes[0], **sizes), tunable.tokens[0]
    assert tunable.invalid(problem, tokens) is None
    case = tunable.case(problem, tokens)
    inputs = bench.make(case, "cpu", 0)
    candidates = tunable.candidates(problem, tokens, True, False)
    assert len(candidates) > 1
    for candidate in (None, candidates[0], candidates[-1]):
        planned.clear()
        tunable.launch(problem, candidate)(inputs, bench.out(case, inputs))
        assert planned, candidate
