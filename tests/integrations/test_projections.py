# SPDX-License-Identifier: Apache-2.0
"""Linear layers that share an input in training."""

import copy
import gc
import io
import weakref

import pytest
import torch
from support.tiny_models import make, tokens
from torch import nn

import tiercel.integrations.transformers as door
from tiercel.integrations.transformers import projections

pytestmark = pytest.mark.torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _few_rows_are_enough(monkeypatch):
    monkeypatch.setattr(projections, "_LEAST_ROWS", 1)


class Three(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, n, bias=bias) for n in (96, 32, 32))

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def three(device="cpu", bias=False):
    torch.manual_seed(0)
    plain = Three(bias).to(device, torch.bfloat16)
    ours = copy.deepcopy(plain)
    assert door.apply(ours).replaced == {"linear_act": ["layers.0", "layers.1", "layers.2"]}
    x = torch.randn(2, 40, 64, device=device).bfloat16().requires_grad_()
    grads = [torch.randn(2, 40, n, device=device).bfloat16() for n in (96, 32, 32)]
    return plain, ours, x, grads


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
def test_gradients(device, bias, monkeypatch):
    plain, ours, x, grads = three(device, bias)
    adds = []
    add = torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda *a: adds.append(1) or add(*a))

    def step(model):
        results = model(x * 1)
        found = torch.autograd.grad(results, [x, *model.parameters()], grads)
        return results, found

    results, found = step(ours)
    assert len(adds) == 2  # of three layers
    due_results, due = step(plain)
    wide = copy.deepcopy(plain).double()
    exact = torch.autograd.grad(
        wide(x.double()), [x, *wide.parameters()], [g.double() for g in grads]
    )
    assert all(torch.equal(a, b) for a, b in zip(results, due_results, strict=True))
    for got, usual, right in zip(found, due, exact, strict=True):
        mine, theirs = ((t.double() - right).norm() for t in (got, usual))
        assert mine <= 1.05 * theirs + 1e-6


def test_results_that_nobody_uses():
    plain, ours, x, grads = three()
    for used in ([0], [1], [2], [0, 2]):
        found, due = (
            torch.autograd.grad([model(x * 1)[i] for i in used], x, [grads[i] for i in used])[0]
            for model in (ours, plain)
        )
        torch.testing.assert_close(found, due, rtol=2**-6, atol=2**-6)


def test_no_graph_stays_behind():
    _, ours, x, _ = three()
    h = x * 1
    seen = weakref.ref(h)
    gc.disable()
    try:
        results = ours(h)
        del h
        assert seen() is not None
        del results
        assert seen() is None
    finally:
        gc.enable()


def test_frozen_layers_do_not_keep_their_input():
    _, ours, x, grads = three()
    ours.requires_grad_(False)
    h = x * 1
    seen = weakref.ref(h)
    results = ours(h)
    del h
    assert seen() is None
    (found,) = torch.autograd.grad(results, x, grads)
    due = sum(g.double() @ m.weight.double() for g, m in zip(grads, ours.layers, strict=True))
    torch.testing.assert_close(found.double(), due, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("trained", range(3))
def test_frozen_layers_beside_one_that_is_trained(trained):
    plain, ours, x, grads = three(bias=True)
    found = []
    for model in (ours, plain):
        model.requires_grad_(False)
        model.layers[trained].requires_grad_(True)
        of = [x, *model.layers[trained].parameters()]
        found.append(torch.autograd.grad(model(x * 1), of, grads))
    torch.testing.assert_close(*found, rtol=2**-6, atol=2**-6)


def test_an_input_that_is_written_to_between_layers():
    plain, ours, x, grads = three()
    found = []
    for model in (ours, plain):
        h = x * 1
        unused = model.layers[0](h)
        h.mul_(2)
        result = model.layers[1](h)
        found.append((result, *torch.autograd.grad(result, x, grads[1])))
        del unused
    torch.testing.assert_close(*found, rtol=2**-7, atol=2**-7)


def test_tensors_can_be_saved():
    _, ours, x, _ = three()
    h = x * 1
    result = ours.layers[0](h)
    for tensor in (h, result):
        file = io.BytesIO()
        torch.save(tensor, file)
        assert len(file.getvalue()) < tensor.nbytes + 2048  # nothing else
        file.seek(0)
        assert torch.equal(torch.load(file), tensor)


def test_gradients_can_be_differentiated_again():
    plain, ours, x, grads = three()
    second = []
    for model in (ours, plain):
        (first,) = torch.autograd.grad([t * t for t in model(x * 1)], x, grads, create_graph=True)
        second.append(torch.autograd.grad(first.float().sum(), x)[0])
    torch.testing.assert_close(*second, rtol=2**-4, atol=2**-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("checkpoints", [None, True, False])
def test_a_model(device, checkpoints):
    ours = make("Qwen3", device=device).train()
    wide = copy.deepcopy(ours).float()
    usual = copy.deepcopy(ours)
    door.apply(ours)
    if checkpoints is not None:
        ours.gradient_checkpointing_enable({"use_reentrant": checkpoints})
    ids = tokens(device=device)
    for model in (ours, usual, wide):
        model(ids, labels=ids, use_cache=False).loss.backward()
    for mine, theirs, right in zip(*(m.parameters() for m in (ours, usual, wide)), strict=True):
        errors = [(p.grad.float() - right.grad).norm() for p in (mine, theirs)]
        assert errors[0] <= 1.25 * errors[1] + 1e-3 * right.grad.norm()
