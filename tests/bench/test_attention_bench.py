# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of attention: each one's inputs, reference and check fit together."""

import pytest

from tiercel.workbench.bench import ops, ours
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import Launch, WrongResult

BENCHES = ops.load()
HEADS = {"H": 4, "Hk": 2, "D": 64}
SIZES = {
    "attention": {"B": 2, "Sq": 33, "H": 4, "D": 64},
    "attention_varlen": {"B": 2, "L": 33, **HEADS},
    "decode_attention": {"B": 2, "L": 33, **HEADS},
    "paged_attention": {"B": 2, "new": 5, "context": 20, "decoding": 3, **HEADS},
}


@pytest.mark.parametrize("op", SIZES)
def test_the_reference_passes_and_what_is_off_does_not(op):
    bench = BENCHES[op]
    problem = Case("attention", op, "bfloat16", {**bench.params, **SIZES[op]})
    assert bench.invalid(problem.params) is None
    inputs = bench.make(problem, "cpu", 3)
    expected = bench.reference(problem, inputs)
    (reference,) = ours.impls(bench, ["ref"])
    launch = reference.prepare(problem, inputs)
    (result, *_) = launch.run()
    assert bench.check(inputs, expected, (result,), launch).rms < 2e-2
    for wrong, why in (
        (result * 1.05, "off by|RMS"),
        (result[:-1], "shape"),
        (result.double(), "shape"),
    ):
        with pytest.raises(WrongResult, match=why):
            bench.check(inputs, expected, (wrong,), Launch(run=tuple))
