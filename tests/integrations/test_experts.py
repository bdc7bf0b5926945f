# SPDX-License-Identifier: Apache-2.0
"""``experts_implementation="tiercel"`` against the model's own experts in float32."""

import warnings

import pytest
import torch
from support.tiny_models import distance, make, tokens

import tiercel
import tiercel.integrations.transformers as door

pytestmark = pytest.mark.torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def logits(model, **given):
    return model(tokens(device=model.device), use_cache=False, **given).logits


@pytest.fixture
def strict():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "experts_implementation", tiercel.FallbackWarning)
        yield


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
def test_logits(act, device, strict):
    right, usual, ours = (
        make("Qwen3Moe", dtype, device=device, hidden_act=act)
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
    )
    ours.set_experts_implementation("tiercel")
    with torch.no_grad():
        expected = logits(right)
        found = logits(ours)
        assert not torch.equal(found, logits(usual))
        assert distance(found, expected) < 1.15 * distance(logits(usual), expected)


def test_a_compiled_graph_has_the_op(strict):
    model = make("Qwen3Moe")
    model.set_experts_implementation("tiercel")
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        expected = logits(model)
        found = compiled(tokens(), use_cache=False).logits
    torch.testing.assert_close(found, expected)
    (graph,) = graphs
    assert sum("fused_moe" in str(node.target) for node in graph.graph.nodes) == 2


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients(autocast, strict):
    kinds = (torch.float32, torch.float32 if autocast else torch.bfloat16)
    right, usual, ours = (make("Qwen3Moe", dtype) for dtype in (kinds[0], kinds[1], kinds[1]))
    ours.set_experts_implementation("tiercel")
    for model in (right, usual, ours):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and model is not right):
            logits(model).float().square().sum().backward()
    for name, weight in right.named_parameters():
        found, usually = (model.get_parameter(name).grad for model in (ours, usual))
        assert distance(found, weight.grad) < 1.15 * distance(usually, weight.grad) + 1e-3, name


@pytest.mark.parametrize(
    ("name", "dtype", "changes", "why"),
    [
        ("GptOss", torch.bfloat16, {}, "experts with biases"),
        ("Qwen3Moe", torch.float32, {}, "not float32"),
        ("Qwen3Moe", torch.bfloat16, {"hidden_act": "gelu_pytorch_tanh"}, "activation is not"),
    ],
)
def test_others_run_on_grouped_mm(name, dtype, changes, why):
    ours, usual = (make(name, dtype, **changes) for _ in range(2))
    ours.set_experts_implementation("tiercel")
    usual.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        with pytest.warns(tiercel.FallbackWarning, match=f"grouped_mm.*{why}|{why}.*grouped_mm"):
            found = logits(ours)
        assert torch.equal(found, logits(usual))


def test_experts_with_a_norm_of_their_results(monkeypatch):
    """transformers 5.24 has such (Muse Spark): its own implementations call the norm."""
    model = make("Qwen3Moe")
    experts = model.model.layers[0].mlp.experts
    monkeypatch.setattr(experts, "has_post_expert_norm", True, raising=False)
    monkeypatch.setattr(experts, "post_expert_norm", torch.nn.RMSNorm(64), raising=False)
    why = "experts with a norm of their results"
    assert door.apply(model).kept["model.layers.0.mlp.experts"] == why
    with torch.no_grad(), pytest.warns(tiercel.FallbackWarning, match=why):
        logits(model)


def test_apply_and_undo():
    model = make("Qwen3Moe")
    before = model.config._experts_implementation
    report = door.apply(model)
    assert report.replaced["fused_moe"] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert model.config._experts_implementation == "tiercel"
    report.undo()
    assert model.config._experts_implementation == before != "tiercel"

    other = make("Qwen3Moe", hidden_act="gelu_pytorch_tanh")
    report = door.apply(other)
    assert "fused_moe" not in report.replaced
    assert "activation is not" in report.kept["model.layers.0.mlp.experts"]
    assert other.config._experts_implementation == before
