# SPDX-License-Identifier: Apache-2.0
"""A bad argument of any op has an error that names it, says what was expected and what came."""

import pytest
import torch
from support import bad_arguments, declared, mutations
from support import contract_calls as calls

from tiercel.core import dispatch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning"),
]
OTHERS = sorted(set(declared.OPERATORS) - set(calls.OPS))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def refuse_all(public, cases):
    """Asserts that each bad call has the error that its declaration asks for."""
    count = 0
    for bad, function, values in cases:
        with pytest.raises((TypeError, ValueError)) as info:
            bad_arguments.run(function, values, bad.changes)
        assert bad.is_right(public, info.value), (bad.title, info.value)
        count += 1
    return count


@pytest.mark.parametrize("op", calls.OPS)
def test_public_functions(op):
    public = r"\w+" if op in declared.COMPOSITE else op
    assert refuse_all(public, bad_arguments.public(op)) > 15


@pytest.mark.parametrize("name", OTHERS)
def test_operators_behind_them(name):
    """Gradients, and the forms with other results or arguments."""
    public = declared.OPERATORS[name].spec.public
    assert refuse_all(public, bad_arguments.of_operator(name)) > 15


@pytest.mark.parametrize("op", calls.OPS)
def test_an_unknown_backend(op):
    values = declared.public_calls(op)[0]
    with pytest.raises(ValueError, match=r"^\w+ has no backend 'warp'; it has ref, sm90"):
        calls.function(op)(**{**calls.copied(values), "backend": "warp"})


def test_every_operator_is_tried():
    registered = {op.name for ops in dispatch.variants.values() for op in ops}
    assert {name.partition(".")[0] for name in registered} == set(declared.OPERATORS)
    assert set(OTHERS) <= set(declared.operator_calls())


@pytest.mark.parametrize("name", ["copy_transpose", "moe_sum", "topk_softmax"])
def test_a_dropped_check_is_noticed(name):
    """For all of them: python tests/support/mutations.py"""
    dropped = dict(mutations.of_data(name))
    assert len(dropped) > 5
    assert all(dropped.values()), [what for what, noticed in dropped.items() if not noticed]
