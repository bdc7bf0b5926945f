# SPDX-License-Identifier: Apache-2.0
"""toy_shift with PyTorch, and all that derives from its folder."""

import importlib.metadata
import inspect

import pytest
import torch

import tiercel
from tiercel.plugins import types
from tiercel.plugins.contracts import contract_of
from tiercel.workbench.bench import cases, environment, ops

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::tiercel.FallbackWarning")]


def test_the_op():
    x = torch.randn(2, 3, requires_grad=True)
    got = tiercel.toy_shift(x, 2.0)
    assert torch.equal(got, x + 2)
    got.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))
    assert torch.equal(torch.ops.tiercel.toy_shift(x.detach()), x + 1)
    torch.library.opcheck(torch.ops.tiercel.toy_shift.default, (x, 2.0))
    with pytest.raises(TypeError, match="toy_shift: `x` must have dtype float32, got float64"):
        tiercel.toy_shift(x.double())
    assert tiercel.explain(tiercel.toy_shift, x, backend="ref").backend == "ref"


def test_it_is_public():
    assert {"toy_shift"} <= set(tiercel.__all__) & set(tiercel.ops.__all__)
    assert torch.equal(tiercel.ref.toy_shift(torch.zeros(2)), torch.ones(2))


def test_a_plug_in():
    assert contract_of("toy_shift").names == ("x", "amount")
    assert list(inspect.signature(types.ToyShift.__call__).parameters) == ["self", "x", "amount"]

    @tiercel.backends.register(op="toy_shift", name="mine", description="", language="torch")
    def mine(x: types.ToyInput, amount: float):
        return x + amount

    assert torch.equal(tiercel.toy_shift(torch.zeros(2), backend="mine"), torch.ones(2))


def test_bench_cases():
    chosen = cases.select(cases.read(environment.suites_path()), ops.load(), suite="full")
    assert [case["M"] for case in chosen if case.op == "toy_shift"] == [16, 4096]


def test_the_stubs_have_it():
    files = {str(file): file for file in importlib.metadata.files("tiercel")}
    for name in ("__init__", "ops/__init__", "ref/__init__", "_C"):
        assert "toy_shift" in files[f"tiercel/{name}.pyi"].read_text(), name
    assert "class ToyShift(Protocol)" in files["tiercel/plugins/types.pyi"].read_text()
