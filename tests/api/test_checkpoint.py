# SPDX-License-Identifier: Apache-2.0
"""torch.utils.checkpoint around every operator with a gradient: that of the call without one."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tiercel
from tiercel import ops as ops  # fills the registry
from tiercel.core.dispatch import registry
from tiercel.core.dispatch import variants as families
from tiercel.plugins.contracts import CONTRACTS

pytestmark = pytest.mark.torch

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def has_gradient(name):
    return any(op._function is not None for op in families[name])


# A contract has no operator of its own name where the public function is made of others.
OPS = sorted(name for name in CONTRACTS if name in registry and has_gradient(name))


def cases():
    """The smallest that there is for each set of options."""
    found = []
    for name in OPS:
        chosen = {}
        for case in sorted(CONTRACTS[name].cases, key=lambda case: sum(case.sizes.values())):
            if 0 not in case.sizes.values():
                chosen.setdefault(repr(sorted(case.options.items(), key=str)), case)
        found += [pytest.param(name, case, id=f"{name}-{case}") for case in chosen.values()]
    return found


def wide(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize > 1


def gradients(name, arguments, use_reentrant):
    """Of all that takes one, of a weighted sum of the results; without a checkpoint for None."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in arguments.items() if wide(x)}

    def run(*tensors):
        given = {**arguments, **dict(zip(leaves, tensors, strict=True))}
        return registry[name].public(**given)

    if use_reentrant is None:
        found = run(*leaves.values())
    else:
        found = checkpoint(run, *leaves.values(), use_reentrant=use_reentrant)
    results = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in results]
    # A row that sees no key has no logarithm.
    torch.autograd.backward([x.masked_fill(x.isinf(), 0.0) for x in results], weights)
    return {n: x.grad for n, x in leaves.items()}


def test_the_operators_are_those_with_a_gradient():
    """Each public function: it has an operator here, or says that it has no derivative."""
    known = {"attention", "attention_varlen", "layer_norm", "linear_act", "silu_and_mul"}
    assert known <= set(OPS)
    for name in sorted(set(CONTRACTS) - set(OPS)):
        assert not any(op._function is not None for op in families.get(name, ())), name


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(("name", "case"), cases())
def test_checkpoint(name, case, device):
    with tiercel.use_backend("ref" if device == "cpu" else "auto"):
        arguments = CONTRACTS[name].make(case, device, 7)
        expected = gradients(name, arguments, None)
        assert any(grad is not None for grad in expected.values())
        for use_reentrant in (False, True):
            found = gradients(name, arguments, use_reentrant)
            for argument, grad in expected.items():
                assert (grad is None) == (found[argument] is None), argument
                if grad is not None:  # on a GPU some sums are in the order in which parts come
                    bound = 0.0 if device == "cpu" else 0.05
                    torch.testing.assert_close(
                        found[argument], grad, rtol=bound, atol=bound, equal_nan=True
                    )
