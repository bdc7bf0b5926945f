# SPDX-License-Identifier: Apache-2.0
"""Decoder layers in training: additions in the norms' kernels."""

import copy
import functools
import types

import pytest
import torch
import transformers
from support.tiny_models import make, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiercel
import tiercel.integrations.transformers as door
from tiercel.integrations.transformers import layers

pytestmark = pytest.mark.torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _few_rows_are_enough(monkeypatch):
    monkeypatch.setattr(layers, "_LEAST_ROWS", 1)


def count_norms(monkeypatch):
    """The gradients of which a kernel adds what comes past the norm."""
    added = []
    apply = layers._Norm.apply
    monkeypatch.setattr(layers._Norm, "apply", lambda *a: added.append(1) or apply(*a))
    return added


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize("checkpoints", [None, True, False])
def test_a_model(name, checkpoints, device, monkeypatch):
    ours = make(name, device=device).train()
    wide, usual = copy.deepcopy(ours).float(), copy.deepcopy(ours)
    assert len(door.apply(ours).replaced["decoder layer"]) == 2
    if checkpoints is not None:
        ours.gradient_checkpointing_enable({"use_reentrant": checkpoints})
    added, attention = count_norms(monkeypatch), ours.model.layers[0].self_attn
    runs: list[int] = []
    attention.register_forward_hook(lambda *_: runs.append(1))
    ids = tokens(device=device)
    for model in (ours, usual, wide):
        model(ids, labels=ids, use_cache=False).loss.backward()
    assert len(runs) == (1 if checkpoints is None else 2)
    # A layer that runs again computes the same: a mixture may not choose other experts.
    # The layers' own forward runs if it is what makes the checkpoint, not their call.
    base = transformers.modeling_layers.GradientCheckpointingLayer
    by_call = "__call__" in vars(base)
    assert len(added) == (2 if checkpoints is None else 4 if by_call else 0)
    # A GPU's sums for the 16 weights of a norm have another order than in the usual model.
    most = 1.25 if device == "cpu" else 1.5
    for mine, theirs, right in zip(*(m.parameters() for m in (ours, usual, wide)), strict=True):
        errors = [(p.grad.float() - right.grad).norm() for p in (mine, theirs)]
        assert errors[0] <= most * errors[1] + 2e-3 * right.grad.norm()


def one_layer(name="Llama"):
    model = make(name).train()
    plain = copy.deepcopy(model)
    door.apply(model)
    x = torch.randn(2, 5, model.config.hidden_size).bfloat16().requires_grad_()
    at = plain.model.rotary_emb(x, torch.arange(5)[None])
    return model.model.layers[0], plain.model.layers[0], x, {"position_embeddings": at}


def test_gradients_can_be_differentiated_again():
    x = torch.randn(4, 8, requires_grad=True)
    weight = nn.Parameter(torch.rand(8) + 0.5)

    def ours(x):
        return layers._Norm.apply(x, weight, 1e-6)

    def plain(x):
        return tiercel.ref.rms_norm(x, weight, eps=1e-6), x

    found = []
    for function in (ours, plain):
        normed, past = function(x)
        loss = normed.pow(3).sum() + past.pow(3).sum()
        first = torch.autograd.grad(loss, (x, weight), create_graph=True)
        loss = sum(t.square().sum() for t in first)
        found.append((*first, *torch.autograd.grad(loss, (x, weight))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_what_keeps_the_layer_s_own_forward(monkeypatch):
    ours, _, x, more = one_layer()
    added = count_norms(monkeypatch)
    with torch.no_grad():
        ours.eval()(x, **more)
    ours.train()(x.detach(), **more)
    with torch.autocast("cpu", torch.bfloat16):
        ours(x, **more)
    handle = ours.input_layernorm.register_forward_hook(lambda *a: None)
    ours(x, **more)
    assert not added
    handle.remove()
    ours(x, **more)
    assert len(added) == 1


def test_hooks_and_wrappers_of_norms_are_called():
    ours, _, x, more = one_layer()
    norm, calls = ours.input_layernorm, []
    handle = norm.register_full_backward_pre_hook(lambda *a: calls.append("gradient"))
    ours(x, **more).sum().backward()
    assert calls == ["gradient"]
    handle.remove()
    before = norm.forward

    @functools.wraps(before)
    def wrapper(self, x):
        calls.append("forward")
        return before(x)

    norm.forward = types.MethodType(wrapper, norm)
    ours(x, **more)
    assert calls == ["gradient", "forward"]


def test_arguments_that_the_caller_leaves_out(monkeypatch):
    """Qwen3's attention has no default for the mask; its layers have."""
    ours, _, x, more = one_layer("Qwen3")
    added = count_norms(monkeypatch)
    due = type(ours).forward(ours, x, **more)
    torch.testing.assert_close(ours(x, **more), due, rtol=2**-5, atol=2**-5)
    assert len(added) == 1


@pytest.mark.parametrize("trained", [True, False])
def test_layers_of_one_reentrant_checkpoint_run_alike(trained, monkeypatch):
    """Its first pass makes no graph, so that the second layer's input wants no gradient then."""
    model = make("Llama").train()
    door.apply(model)
    model.requires_grad_(trained)
    x = torch.randn(2, 5, model.config.hidden_size).bfloat16().requires_grad_()
    at = model.model.rotary_emb(x, torch.arange(5)[None])
    results = []

    def both(x):
        for layer in model.model.layers:
            x = layer(x, position_embeddings=at)
        results.append(x.detach())
        return x

    added = count_norms(monkeypatch)
    checkpoint(both, x, use_reentrant=True).sum().backward()
    assert len(added) == 4
    assert torch.equal(*results)


class Scaled(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return 0.5 * super().forward(hidden_states, **kwargs)


class Drops(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return nn.functional.dropout(super().forward(hidden_states, **kwargs), 0.1, self.training)


class Checkpoints(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    """Makes the checkpoint in forward, as layers do since transformers 5.24."""

    @functools.wraps(transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward)
    def forward(self, hidden_states, **kwargs):
        run = functools.partial(super().forward, **kwargs)
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(run, hidden_states)
        return run(hidden_states)


def test_a_forward_that_makes_the_checkpoint_itself(monkeypatch):
    model = make("Llama").train()
    layer = model.model.layers[0]
    layer.__class__ = Checkpoints
    assert "model.layers.0" in door.apply(model).replaced["decoder layer"]
    x = torch.randn(2, 5, model.config.hidden_size).bfloat16().requires_grad_()
    at = model.model.rotary_emb(x, torch.arange(5)[None])
    added, made = count_norms(monkeypatch), []
    layer.forward(x, position_embeddings=at)
    assert len(added) == 1
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = lambda run, *a: made.append(1) or run(*a)
    layer.forward(x, position_embeddings=at)
    assert made and len(added) == 1


class Keeps(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    """Does not tell attention all that it is told."""

    def forward(self, hidden_states, secret=None, **kwargs):
        return super().forward(hidden_states, **kwargs)


class Chooses(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    """Tells attention something else."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return super().forward(hidden_states, attention_mask=None, **kwargs)


@pytest.mark.parametrize("kind", [Scaled, Drops, Keeps, Chooses])
def test_layers_that_compute_something_else(kind):
    model = make("Llama")
    for layer in model.model.layers:
        layer.__class__ = kind
    assert "decoder layer" not in door.apply(model).replaced


def test_a_layer_with_a_forward_of_its_own():
    model = make("Llama")
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    report = door.apply(model)
    assert report.replaced["decoder layer"] == ["model.layers.0"]
    assert report.kept["model.layers.1"] == "LlamaDecoderLayer: its forward is replaced already"
