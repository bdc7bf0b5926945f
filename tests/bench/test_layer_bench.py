# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of whole layers, on the CPU: what their check lets through."""

import pytest
import torch

from tiercel.workbench.bench import ops, ours
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import WrongResult

SMALL = {"hidden": 64, "H": 4, "Hk": 2, "D": 16, "inner": 48, "context": 20}
EXPERTS = {"E": 8, "k": 2}


def prepared(op, **sizes):
    bench = ops.load()[op]
    params = {**bench.params, **SMALL, **(EXPERTS if op == "moe_layer" else {}), **sizes}
    assert bench.invalid(params) is None
    case = Case("attention", op, "bfloat16", params)
    inputs = bench.make(case, "cpu", 3)
    (impl,) = ours.impls(bench, ["ref"])
    return bench, case, inputs, impl.prepare(case, inputs)


@pytest.mark.parametrize("op", ["dense_layer", "moe_layer"])
@pytest.mark.parametrize("sizes", [{"decoding": 3}, {"B": 2, "new": 9, "decoding": 1}])
def test_a_layer_and_its_check(op, sizes):
    bench, case, inputs, launch = prepared(op, **sizes)
    expected = bench.reference(case, inputs)
    (out,) = launch.run()
    assert out.shape == inputs["x"].shape
    assert bench.check(inputs, expected, (out,), launch).maximum < 1e-2
    with pytest.raises(WrongResult, match="rows are off"):
        bench.check(inputs, expected, (out * 1.1,), launch)
    with pytest.raises(WrongResult, match="not finite"):
        bench.check(inputs, expected, (out * torch.inf,), launch)


def test_each_part_of_a_layer_counts():
    bench, case, inputs, _ = prepared("moe_layer", decoding=3)
    expected = bench.reference(case, inputs)
    for name in ("k_cache", "qkv", "out", "up", "down", "norm_q", "norm_between", "router"):
        changed = {**inputs, name: inputs[name].flip(0)}
        (out,) = bench.ours(case, changed, "ref").run()
        assert not torch.equal(out.float(), expected), name


def test_bytes_of_a_layer():
    bench, case, *_ = prepared("dense_layer", decoding=2)
    weights = 64 * (12 * 16 + 3 * 48)
    assert bench.bytes_moved(case) == 2 * (weights + 2 * 42 * 2 * 16 + 2 * 2 * 64)
    bench, case, *_ = prepared("moe_layer", decoding=1)
    assert bench.bytes_moved(case) == 2 * (64 * (192 + 2 * 3 * 48 + 8) + 2 * 21 * 32 + 2 * 64)


@pytest.mark.parametrize("op", ["dense_layer", "moe_layer"])
def test_sizes_that_it_does_not_take(op):
    bench = ops.load()[op]
    assert bench.invalid(bench.params) == "decoding, or B and new, must be positive"
    assert bench.invalid({**bench.params, "H": 1.5}) == "all must be whole numbers"
