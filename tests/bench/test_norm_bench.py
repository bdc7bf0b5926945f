# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the norms: what their checks let through."""

from dataclasses import replace

import pytest
import torch

from tiercel.workbench.bench import adapters, ops, ours, runner
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import Impl, Launch, WrongResult

BENCHES = ops.load()
ADAPTERS = adapters.load()
GRADIENTS = ["rms_norm_backward", "layer_norm_backward"]


def case(op, **params):
    params = {"M": 67, "N": 136, "bias": op.startswith("layer")} | params
    return Case("norm", op, "bfloat16", {**BENCHES[op].params, **params})


def prepared(problem):
    bench = BENCHES[problem.op]
    assert bench.invalid(problem.params) is None
    inputs = bench.make(problem, "cpu", 3)
    return bench, inputs, bench.reference(problem, inputs)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("op", GRADIENTS)
def test_torch_and_our_reference_agree_with_float64(op, residual):
    problem = case(op, residual=residual)
    bench, inputs, expected = prepared(problem)
    launches = [impl.prepare(problem, inputs) for impl in ours.impls(bench, ["ref"])]
    if op == "layer_norm_backward":  # the RMS norm's kernel is a GPU's only
        launches.append(ADAPTERS["torch"][op](problem, inputs))
    for launch in launches:
        bench.check(inputs, expected, launch.run(), launch)


@pytest.mark.parametrize("op", GRADIENTS)
def test_a_gradient_without_the_residuals_is_caught(op):
    bench, inputs, expected = prepared(case(op, residual=True))
    good = [due.to(torch.bfloat16) for due in expected]
    bench.check(inputs, expected, good, Launch(run=tuple))
    good[0] = (expected[0] - inputs["grad_residual"].double()).to(torch.bfloat16)
    with pytest.raises(WrongResult, match="off by"):
        bench.check(inputs, expected, good, Launch(run=tuple))


@pytest.mark.parametrize(("residual", "tensors"), [(False, 3), (True, 4)])
@pytest.mark.parametrize("op", GRADIENTS)
def test_bytes(op, residual, tensors):
    problem = case(op, residual=residual)
    parameters = 2 if op.startswith("layer") else 1
    assert BENCHES[op].bytes_moved(problem) == (67 * 136 * tensors + 136 * parameters) * 2


def add_in_place(x, residual, weight, eps):
    residual += x
    x.copy_(torch.nn.functional.rms_norm(residual.float(), x.shape[-1:], weight.float(), eps))


@pytest.fixture
def fused(monkeypatch):
    """Stands in for vLLM's operator, in place on `x` and `residual`."""

    class Operators:
        fused_add_rms_norm = staticmethod(add_in_place)

    monkeypatch.setattr(torch.ops, "_C", Operators, raising=False)
    return Operators


@pytest.fixture
def prepare(fused, fake_clock):
    def prepare(dead=()):
        problem = case("rms_norm", residual=True)
        bench, inputs, expected = prepared(problem)
        clock = fake_clock({"vllm": 0.01})
        clock.dead_graphs |= set(dead)

        def launch(case, inputs):
            return replace(ADAPTERS["vllm"]["rms_norm"](case, inputs), details={"name": "vllm"})

        impl = Impl("vllm", "", launch)
        return runner.prepare(bench, problem, impl, [inputs], expected, clock)

    return prepare


def test_a_norm_in_place_is_checked_after_its_first_call_too(prepare):
    assert prepare().error.rms < 5e-3
    with pytest.raises(WrongResult, match="nothing was added"):
        prepare(dead=["vllm"])


@pytest.mark.parametrize("good", [0, 2])
def test_a_wrong_norm_in_place_is_caught(prepare, fused, good):
    calls = []

    def wrong(x, residual, weight, eps):
        add_in_place(x, residual, weight, eps)
        calls.append(x)
        if len(calls) > good:
            x *= 1.1

    fused.fused_add_rms_norm = staticmethod(wrong)
    with pytest.raises(WrongResult, match="off by"):
        prepare()
