# SPDX-License-Identifier: Apache-2.0
"""torch.compile of whole models on Tiercel, without a graph break."""

import warnings

import pytest
import torch
import transformers
from support.tiny_models import distance, make, tokens

import tiercel
import tiercel.integrations.transformers as door

pytestmark = pytest.mark.torch

# On a CPU the graphs are what is tested, not the code made of them.
PLACES = [("cpu", "aot_eager"), pytest.param(("cuda", "inductor"), marks=pytest.mark.gpu)]
MASK = torch.ones(2, 20, dtype=torch.long)
MASK[0, :5] = 0
POSITIONS = torch.cat([torch.arange(7), torch.arange(13)])[None].expand(2, -1)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compare(model, place, where=..., **given):
    device, backend = place
    ids = tokens(device=device)
    given = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in given.items()}
    with torch.no_grad():
        right = model(ids, **given).logits
        ours = torch.compile(model, backend=backend, fullgraph=True)(ids, **given).logits
    assert distance(ours, right, where) < 2e-2  # rotary embedding is the model's in a graph


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_prompts(name, place):
    model = make(name, device=place[0])
    door.apply(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "attn_implementation", tiercel.FallbackWarning)
        compare(model, place)
        compare(model, place, use_cache=False)
        compare(model, place, MASK.bool(), attention_mask=MASK, use_cache=False)


def test_packed_sequences_of_a_graph():
    """The graph does not know how many there are: sdpa, or the caller says where they begin."""
    model = make("Llama")
    door.apply(model)
    given = {"position_ids": POSITIONS, "use_cache": False}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(tiercel.FallbackWarning, match="cu_seq_lens_q"):
        ours = compiled(tokens(), **given).logits
    assert distance(ours, model(tokens(), **given).logits) < 0.02
    starts = torch.tensor([0, 7, 20, 27, 40], dtype=torch.int32)
    described = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "attn_implementation", tiercel.FallbackWarning)
        compare(model, PLACES[0], **given, **described, max_length_q=13, max_length_k=13)


def test_a_padding_mask_with_holes_fails():
    model = make("Llama", attention="tiercel")
    holes = MASK.clone()
    holes[0, 9] = 0
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="must have its ones side by side"):
        compiled(tokens(), attention_mask=holes, use_cache=False)


@pytest.mark.parametrize("gradients", [False, True])
def test_what_the_compiler_joins(gradients):
    """Norms and activations of a graph are ours only where it has gradients."""
    model = make("Llama")
    door.apply(model)
    called = set()

    def backend(graph, inputs):
        called.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with torch.set_grad_enabled(gradients):
        torch.compile(model, backend=backend)(tokens())
    ours = {name for name in ("rms_norm", "silu_and_mul") if any(name in c for c in called)}
    assert ours == ({"rms_norm", "silu_and_mul"} if gradients else set())
    assert any("attention" in c and "tiercel" in c for c in called)


def test_norms_of_the_batch_invariant_mode_are_ours():
    model = make("Llama")
    door.apply(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), tiercel.batch_invariant(), pytest.raises(RuntimeError, match="rms_norm"):
        compiled(tokens())  # on a CPU, where the mode has no kernels


def test_gradients():
    model = make("Llama")
    door.apply(model)
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        run(tokens(), labels=tokens(), use_cache=False).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert distance(found[1], found[0]) < 0.02


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_training_steps(place):
    """The loss without logits, with experts; other lengths make one more graph, other numbers of
    items none."""
    device, backend = place
    experts_only = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    model = make("DeepseekV3", device=device, **experts_only).train()
    door.apply(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for length, items in ((20, 30), (13, 31), (17, 5)):
        ids = tokens(length=length, device=device)
        given = {"labels": ids, "use_cache": False}
        given["num_items_in_batch"] = torch.tensor(items, device=device)
        found = []
        for run in (model, compiled):
            model.zero_grad()
            outputs = run(ids, **given)
            assert outputs.logits is None
            outputs.loss.backward()
            gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
            found.append((outputs.loss.detach(), gradients))
        (loss, gradients), (our_loss, our_gradients) = found
        torch.testing.assert_close(our_loss, loss, rtol=1e-2, atol=0)
        assert distance(our_gradients, gradients) < 0.03
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_generate_with_a_static_cache(name, place):
    """Masks are made outside of the compiled forward, which is compiled once."""
    device, backend = place
    model = make(name, attention="tiercel", device=device)
    options = {
        "attention_mask": MASK.to(device),
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": "static",
    }
    right = model.generate(tokens(device=device), disable_compile=True, **options)
    # A CPU's generate does not compile by itself.
    model._valid_auto_compile_criteria = lambda *_, **__: True
    mode = {"mode": "reduce-overhead"} if device == "cuda" else {"mode": None}
    compiling = transformers.CompileConfig(backend=backend, fullgraph=True, **mode)
    torch._dynamo.utils.counters.clear()
    ours = model.generate(tokens(device=device), compile_config=compiling, **options)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == (1 if name == "Llama" else 2)  # sliding caches have two ways to grow
    if device == "cpu":
        assert torch.equal(ours, right)
