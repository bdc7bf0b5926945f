# SPDX-License-Identifier: Apache-2.0
"""Token embeddings in training: the table's gradient, with a share of the output layer's."""

import copy

import pytest
import torch
from support.tiny_models import make, tokens
from torch import nn

import tiercel.integrations.transformers as door
from tiercel.integrations.transformers import embedding
from tiercel.ops.loss import linear as linear_loss

pytestmark = pytest.mark.torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def replaced(count=50, width=64, padding=None, device="cpu", dtype=torch.bfloat16):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(count, width, padding, device=device, dtype=dtype))
    assert door.apply(module).replaced == {"embedding": ["0"]}
    return module[0]


def exact(ids, grad, count, padding=None, more=None):
    due = torch.zeros(count, grad.shape[-1], dtype=torch.float64, device=grad.device)
    due.index_add_(0, ids.flatten(), grad.double().flatten(0, -2))
    if padding is not None:
        due[padding] = 0
    return due if more is None else due + more.double()


def assert_rounded_once(got, due):
    torch.testing.assert_close(got.double(), due, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient(device, padding, dtype):
    module = replaced(padding=padding, device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (4, 70), generator=generator)
    ids[0] = 3  # often
    grad = torch.randn(4, 70, 64, generator=generator).to(device, dtype)
    ids = ids.to(device)
    rows = module(ids)
    assert torch.equal(rows, nn.functional.embedding(ids, module.weight, padding))
    rows.backward(grad)
    assert module.weight.grad.dtype == dtype
    assert_rounded_once(module.weight.grad, exact(ids, grad, 50, padding))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["one number", "turned"])
def test_gradients_in_other_layouts(device, kind, monkeypatch):
    """The kernel takes rows with neighbouring elements; PyTorch hands out others."""
    steps = []
    add = linear_loss.add_targets

    def noted(sums, x, *more):
        steps.append(x.stride(1))
        add(sums, x, *more)

    monkeypatch.setattr(linear_loss, "add_targets", noted)
    module = replaced(device=device)
    ids = torch.arange(12, device=device)[None] % 5
    rows = module(ids)
    if kind == "one number":
        grad = torch.ones(1, 12, 64, device=device)
        rows.sum().backward()
    else:
        grad = torch.randn(1, 64, 12, device=device).bfloat16().transpose(1, 2)
        rows.backward(grad)
    assert_rounded_once(module.weight.grad, exact(ids, grad, 50))
    assert steps == ([1] if device == "cpu" else [])


@pytest.mark.parametrize("device", DEVICES)
def test_several_gradients_at_once(device):
    module = replaced(device=device, padding=3)
    ids = torch.arange(12, device=device)[None] % 5
    grads = torch.randn(4, 1, 12, 64, device=device).bfloat16()
    found = torch.autograd.grad(module(ids), module.weight, grads, is_grads_batched=True)[0]
    for got, grad in zip(found, grads, strict=True):
        torch.testing.assert_close(got.double(), exact(ids, grad, 50, 3), rtol=2**-6, atol=2**-5)


def test_a_model_without_an_embedding():
    model = make("Llama", tie_word_embeddings=False).train()
    x = model.model.embed_tokens(tokens()).detach()
    model.model.embed_tokens = None
    door.apply(model)
    model(inputs_embeds=x, labels=tokens(), use_cache=False).loss.backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", [False, True])
def test_a_shared_weight_has_both_gradients(device, kept, monkeypatch):
    """The output layer's comes first, and that of the rows is added to it."""
    made = []
    new_zeros = torch.Tensor.new_zeros

    def noted(self, *size, **options):
        made.append(size)
        return new_zeros(self, *size, **options)

    monkeypatch.setattr(torch.Tensor, "new_zeros", noted)
    model = make("Llama", tie_word_embeddings=True, device=device).train()
    twin = copy.deepcopy(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    door.apply(model)
    ids = tokens(device=device)
    table = tuple(model.lm_head.weight.shape)
    loss = model(ids, labels=ids, use_cache=False).loss
    if kept:
        (first,) = torch.autograd.grad(loss, [model.lm_head.weight], retain_graph=True)
        (found,) = torch.autograd.grad(loss, [model.lm_head.weight])
        assert torch.equal(first, found)
    else:
        loss.backward()
        found = model.lm_head.weight.grad
    assert table not in made
    wide = twin.float()
    wide(ids, labels=ids, use_cache=False).loss.backward()
    due = wide.lm_head.weight.grad
    assert (found.float() - due).norm() < 0.03 * due.norm()
    assert embedding._lent.loan is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_training_step_never_waits(name):
    model = make(name, device="cuda").train()
    door.apply(model)
    ids = tokens(device="cuda")
    model(ids, labels=ids, use_cache=False).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(ids, labels=ids, use_cache=False).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_graph_of_a_whole_step(name):
    model = make(name, device="cuda").train()
    door.apply(model)
    ids = tokens(device="cuda")

    def step():
        loss = model(ids, labels=ids, use_cache=False).loss
        return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    ids.copy_(ids.roll(5, 1))
    graph.replay()
    for got, due in zip(found, step(), strict=True):
        assert (got.float() - due.float()).norm() <= 0.02 * due.float().norm()


def test_without_a_shared_weight_and_without_a_loss():
    model = make("Llama", tie_word_embeddings=False).train()
    door.apply(model)
    ids = tokens()
    model(ids, labels=ids, use_cache=False).loss.backward()
    rows = model.model.embed_tokens.weight.grad
    assert rows is not None and rows is not model.lm_head.weight.grad
    model.zero_grad()
    model(ids, use_cache=False).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad is not None


def test_gradients_can_be_differentiated_again():
    module = replaced()
    ids = torch.arange(6)
    x = module(ids)
    (first,) = torch.autograd.grad((x * x).sum(), [module.weight], create_graph=True)
    first.sum().backward()
    due = torch.zeros(50, 64)
    due[:6] = 2
    assert torch.equal(module.weight.grad.float(), due)


@pytest.mark.parametrize("option", ["max_norm", "sparse", "scale_grad_by_freq"])
def test_options_that_stay(option):
    module = nn.Sequential(nn.Embedding(5, 8, **{option: 1.0 if option == "max_norm" else True}))
    report = door.apply(module)
    assert report.kept["0"].startswith("Embedding: it has an option") and not report.replaced
