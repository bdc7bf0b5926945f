# SPDX-License-Identifier: Apache-2.0
"""A dimension of size 1 has no next entry, so its stride means nothing: whatever it is, a call gets
the same kernel. Plans need no GPU."""

import contextlib
import dataclasses
import types

import pytest
import torch
from support.dlpack_tensor import as_cuda

from tiercel import _C
from tiercel._explain import resolve_call
from tiercel.core import dispatch as _op
from tiercel.core.op import Op
from tiercel.plugins.contracts import CONTRACTS

pytestmark = pytest.mark.torch

STRIDES = (2**40 + 1, 3, 0)
# The first has scales on the CPU; the others took their plans from _C when they were made.
_OTHERS = {"nvfp4_gemv", "attention", "attention_varlen"}


@pytest.fixture
def plans(monkeypatch):
    """Plans take CPU tensors for a GPU's."""
    for name in dir(_C):
        if name.endswith("_plan"):
            plan = getattr(_C, name)
            monkeypatch.setattr(
                _C, name, lambda *args, plan=plan, **named: plan(*map(as_cuda, args), **named)
            )
    launch = Op._launch  # an op took its plan from _C when it was made

    def launch_for_cuda(op, native, *rest):
        if not isinstance(native, types.BuiltinFunctionType):
            return launch(op, native, *rest)
        return launch(op, getattr(_C, native.__name__), *rest)

    monkeypatch.setattr(Op, "_launch", launch_for_cuda)


def variants(contract):
    """The contract's cases, also with each of their sizes 1."""
    for case in contract.cases:
        for name in case.sizes:
            sizes = dict(case.sizes) | {name: 1}
            yield dataclasses.replace(case, sizes=sizes)


def arguments_of(contract, case):
    """What the operator's plan gets; None where a size of 1 makes no sense."""
    with contextlib.suppress(Exception):
        return resolve_call(_op.registry[contract.op], **contract.make(case, "cpu", 0))[:2]


def restrided(value, stride):
    if not isinstance(value, torch.Tensor) or 1 not in value.shape or value.numel() == 0:
        return value
    steps = zip(value.shape, value.stride(), strict=True)
    return value.as_strided(value.shape, [stride if n == 1 else step for n, step in steps])


@pytest.mark.parametrize("op", sorted(set(CONTRACTS) - _OTHERS))
def test_the_kernel_is_the_same(op, plans):
    contract, compared = CONTRACTS[op], 0
    for case in variants(contract):
        found = arguments_of(contract, case)
        if found is None or found[0].describe is None:
            continue
        operator, args = found
        try:
            due = operator.describe(*args)
        except (NotImplementedError, ValueError):
            continue  # of such sizes there is none
        for i, value in enumerate(args):
            for stride in STRIDES:
                other = restrided(value, stride)
                if other is not value:
                    given = (*args[:i], other, *args[i + 1 :])
                    assert operator.describe(*given) == due, (case, operator.argument_names[i])
                    compared += 1
    assert compared > 3
