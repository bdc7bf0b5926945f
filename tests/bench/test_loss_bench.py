# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the losses: what their checks let through."""

import pytest

from tiercel.workbench.bench import adapters, ops, ours
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import Launch, WrongResult

BENCHES = ops.load()
ADAPTERS = adapters.load()
SIZES = {
    "cross_entropy": {"T": 67, "V": 1000},
    "linear_cross_entropy": {"T": 67, "H": 48, "V": 1000},
}
OPS = [*SIZES, *(f"{op}_with_gradient" for op in SIZES)]


def prepared(op, dtype="bfloat16"):
    bench = BENCHES[op]
    sizes = SIZES[op.removesuffix("_with_gradient")]
    problem = Case("loss", op, dtype, {**bench.params, **sizes})
    assert bench.invalid(problem.params) is None
    inputs = bench.make(problem, "cpu", 3)
    return problem, inputs, bench.reference(problem, inputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_torch_and_our_reference_agree_with_float64(op, dtype):
    problem, inputs, expected = prepared(op, dtype)
    launches = [impl.prepare(problem, inputs) for impl in ours.impls(BENCHES[op], ["ref"])]
    launches.append(ADAPTERS["torch"][op](problem, inputs))
    for launch in launches:
        error = BENCHES[op].check(inputs, expected, launch.run(), launch)
        assert error.rms < 2e-2


@pytest.mark.parametrize("op", OPS)
def test_what_is_wrong_is_caught(op):
    _, inputs, expected = prepared(op)
    launch, dtype = Launch(run=tuple), inputs[next(iter(inputs))].dtype
    good = [expected[0], *(due.to(dtype) for due in expected[1:])]
    BENCHES[op].check(inputs, expected, good, launch)
    with pytest.raises(WrongResult, match="the loss is off"):
        BENCHES[op].check(inputs, expected, [good[0] * 1.02, *good[1:]], launch)
    for i in range(1, len(good)):
        for wrong, why in (
            (good[i] * 1.05, "gradient|RMS error"),
            (good[i][:-1], "shape"),
            (good[i].double(), "shape"),
        ):
            with pytest.raises(WrongResult, match=why):
                BENCHES[op].check(inputs, expected, [*good[:i], wrong, *good[i + 1 :]], launch)


def test_sizes_and_work():
    problem, _, _ = prepared("linear_cross_entropy_with_gradient")
    bench = BENCHES[problem.op]
    assert bench.flops(problem) == 6 * 67 * 48 * 1000
    assert bench.bytes_moved(problem) == 2 * 2 * 48 * (67 + 1000) + 8 * 67
    plain = BENCHES["linear_cross_entropy"]
    assert plain.flops(problem) == bench.flops(problem) / 3
    assert "positive" in bench.invalid({"T": 0, "H": 1, "V": 1})
