# SPDX-License-Identifier: Apache-2.0
"""Whole models on Tiercel against the eager model in float32: no further from it than the eager
model in bfloat16."""

import warnings

import pytest
import torch
from support.tiny_models import MODELS, distance, make, tokens

import tiercel
import tiercel.integrations.transformers as door

pytestmark = pytest.mark.torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NEXT = {  # of `apply`: the same bounds
    "attention": lambda model: model.set_attn_implementation("tiercel"),
    "apply": door.apply,
}


def padded(side, length=20):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, slice(0, 5) if side == "left" else slice(-6, None)] = 0
    return mask


def packed(length=20):
    return torch.cat([torch.arange(7), torch.arange(length - 7)])[None].expand(2, -1)


CASES = {
    "plain": {},
    "no cache": {"use_cache": False},
    "left": {"attention_mask": padded("left")},
    "right": {"attention_mask": padded("right")},
    "packed": {"position_ids": packed(), "use_cache": False},
}


@pytest.fixture
def loud():
    """Fails where sdpa or eager attention stands in."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "attn_implementation", tiercel.FallbackWarning)
        yield


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", NEXT)
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, how, device, loud):
    right, usual, ours = make(name, torch.float32), make(name), make(name)
    for model in (right, usual, ours):
        model.to(device)
    NEXT[how](ours)
    ids = tokens(device=device)
    for case, given in CASES.items():
        given = {
            key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in given.items()
        }
        real = given.get("attention_mask", torch.ones_like(ids)).bool()
        with torch.no_grad():
            logits = [model(ids, **given).logits for model in (right, usual, ours)]
        bound = distance(logits[1], logits[0], real)
        assert distance(logits[2], logits[0], real) < 1.15 * bound + 1e-3, case


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", NEXT)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", ["plain", "left", "packed"])
def test_gradients(name, how, case, device):
    if case != "plain" and name not in ("Llama", "GptOss"):
        pytest.skip("as the others")
    check_gradients(name, how, case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Gemma2", "Gemma3"])
def test_gradients_of_heads_of_256(name, device, loud):
    """Gemma's heads, with a cap and with windows."""
    heads = {"head_dim": 256, "query_pre_attn_scalar": 256}
    check_gradients(name, "attention", "plain", device, **heads)


def check_gradients(name, how, case, device, **changes):
    ids, given = tokens(device=device), {"use_cache": False, **CASES[case]}
    given = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    real = given.get("attention_mask", torch.ones_like(ids)).bool()
    real[:, 1:] &= real[:, :-1].clone()  # padding foretells nothing
    labels = ids.masked_fill(~real, -100)
    found = {}
    for key, dtype in (
        ("right", torch.float32),
        ("usual", torch.bfloat16),
        ("ours", torch.bfloat16),
    ):
        model = make(name, dtype, device=device, **changes)
        if key == "ours":
            NEXT[how](model)
        model(ids, labels=labels, **given).loss.backward()
        found[key] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(found["ours"]) == set(found["right"])
    flat = {key: torch.cat([g.flatten().float() for g in x.values()]) for key, x in found.items()}
    bound = distance(flat["usual"], flat["right"])
    assert distance(flat["ours"], flat["right"]) < 1.2 * bound + 2e-3
    for name, grad in found["right"].items():  # also a small one is right
        assert distance(found["ours"][name], grad) < 0.15, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_greedy(name, cache, device, loud):
    """Each is the float32 model's best after those before it, or as good up to rounding."""
    ids, mask = tokens(device=device), padded("left").to(device)
    ours = make(name, device=device)
    door.apply(ours)
    more = {"cache_implementation": cache, "disable_compile": True} if cache else {}
    new = 14  # beyond the sliding windows
    out = ours.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **more)
    assert out.shape == (2, 20 + new)
    right = make(name, torch.float32, device=device)
    whole = torch.cat([mask, mask.new_ones(2, new)], 1)
    position = (whole.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = right(out, attention_mask=whole, position_ids=position).logits[:, 19:-1]
    chosen = logits.gather(2, out[:, 20:, None])[..., 0]
    assert ((logits.amax(2) - chosen) / logits.std(2)).max() < 0.1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    grads = []
    for checkpoint in (False, True):
        model = make("Llama").train()
        door.apply(model)
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(tokens(), labels=tokens(), **CASES["packed"]).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for ours, right in zip(*grads, strict=True):
        torch.testing.assert_close(ours, right)


def test_sequences_described_as_for_flash_attention(loud):
    model, ids = make("Llama", attention="tiercel"), tokens(1)
    starts = torch.tensor([0, 7, 20], dtype=torch.int32)
    given = {"position_ids": packed()[:1], "use_cache": False}
    described = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    described |= {"max_length_q": 13, "max_length_k": 13}
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, **given, **described).logits, model(ids, **given).logits, rtol=0, atol=0
        )


def test_one_token_with_gradients_over_a_cache():
    """decode_attention has no gradient: sdpa stands in."""
    model = make("Llama", attention="tiercel")
    past = model(tokens(), use_cache=True).past_key_values
    with pytest.warns(tiercel.FallbackWarning, match="gradients"):
        model(tokens()[:, :1], past_key_values=past).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.any()


def test_attention_weights_are_the_models_own():
    model = make("Llama", attention="tiercel")
    eager = make("Llama")
    with pytest.warns(tiercel.FallbackWarning, match="output_attentions"):
        ours = model(tokens(), output_attentions=True).attentions
    right = eager(tokens(), output_attentions=True).attentions
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b)
