# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of gated layers, MLPs, residuals and the backward: what their checks let through."""

import dataclasses

import pytest
import torch

from tiercel.workbench.bench import adapters, ops, ours
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import Launch, WrongResult

BENCHES = ops.load()
ADAPTERS = adapters.load()
SIZES = {
    "linear_act": {"M": 33, "N": 72, "K": 136, "residual": True},
    "gated_linear": {"M": 33, "N": 72, "K": 136},
    "fused_mlp": {"M": 33, "N": 72, "H": 136},
    "linear_act_backward": {"M": 133, "N": 72, "K": 136},
    "fp8_linear": {"M": 33, "N": 80, "K": 144},
}
OTHERS = [
    ("linear_act", {"bias": False}),
    ("gated_linear", {"act": "gelu_tanh", "bias": True}),
    ("gated_linear", {"bias": True, "blocks": True, "N": 128, "K": 384}),
    ("fused_mlp", {"gated": False, "act": "relu", "residual": False}),
    ("linear_act_backward", {"act": "none", "bias": False}),
    ("linear_act_backward", {"act": "silu"}),
    ("fp8_linear", {"act": "gelu", "bias": True}),
    ("fp8_linear", {"act": "silu", "blocks": True, "N": 136, "K": 384}),
]


def case(op, dtype="bfloat16", **params):
    return Case("linear", op, dtype, {**BENCHES[op].params, **SIZES[op], **params})


@pytest.mark.parametrize(("op", "params"), [*((op, {}) for op in SIZES), *OTHERS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torch_and_our_reference_agree_with_float64(op, params, dtype):
    float8 = op == "fp8_linear" or "blocks" in params
    dtype = "bfloat16" if float8 else dtype  # of its result
    bench, problem = BENCHES[op], case(op, dtype, **params)
    assert bench.invalid(problem.params) is None
    inputs = bench.make(problem, "cpu", 3)
    expected = bench.reference(problem, inputs)
    launches = [impl.prepare(problem, inputs) for impl in ours.impls(bench, ["ref"])]
    if not float8:  # torch has that product of rows for a GPU only
        launches.append(ADAPTERS["torch"][op](problem, inputs))
    unit = torch.finfo(getattr(torch, dtype)).eps / 2
    for launch in launches:
        error = bench.check(inputs, expected, launch.run(), launch)
        assert 0.1 * unit < error.rms < 3 * unit


@pytest.mark.parametrize("op", [op for op in SIZES if op != "linear_act"])
def test_what_lacks_a_part_is_caught(op):
    bench, problem = BENCHES[op], case(op)
    inputs = bench.make(problem, "cpu", 3)
    expected = bench.reference(problem, inputs)
    good = [due.to(torch.bfloat16) for due in expected]
    launch = Launch(run=tuple)
    bench.check(inputs, expected, good, launch)
    for i, result in enumerate(good):
        for spoil in (
            lambda t: t[..., 3:5].zero_(),
            lambda t: t.mul_(1.02),
            lambda t: t[..., :1].fill_(torch.nan),
        ):
            bad = [r.clone() for r in good]
            spoil(bad[i])
            with pytest.raises(WrongResult):
                bench.check(inputs, expected, bad, launch)
        bad = [*good[:i], result[:-1], *good[i + 1 :]]
        with pytest.raises(WrongResult, match="shape"):
            bench.check(inputs, expected, bad, launch)


def test_wrong_parameters_are_named():
    for op, params, text in (
        ("gated_linear", {"act": "none"}, "`act` must be one of silu"),
        ("gated_linear", {"M": 0}, "positive"),
        ("gated_linear", {"blocks": True}, "N and K must be multiples of 128"),
        ("fused_mlp", {"gated": 1}, "gated, residual must be true or false"),
        ("linear_act_backward", {"bias": "yes"}, "bias must be true or false"),
        ("linear_act", {"residual": 1}, "`residual` must be true or false"),
    ):
        problem = case(op)
        problem = dataclasses.replace(problem, params={**problem.params, **params})
        assert text in BENCHES[op].invalid(problem.params)


def test_bytes_and_operations():
    gated = case("gated_linear", M=2, N=8, K=16)
    assert BENCHES["gated_linear"].bytes_moved(gated) == 2 * (2 * 16 + 2 * 8 * 16 + 2 * 8)
    assert BENCHES["gated_linear"].flops(gated) == 2 * 2 * 2 * 8 * 16
    mlp = case("fused_mlp", M=2, N=8, H=16)
    hidden = 2 * 2 * 16  # written and read
    assert BENCHES["fused_mlp"].bytes_moved(mlp) == 2 * (3 * 16 + hidden + 3 * 8 * 16)
    assert BENCHES["fused_mlp"].flops(mlp) == 2 * 3 * 2 * 8 * 16
