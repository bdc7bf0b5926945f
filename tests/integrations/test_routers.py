# SPDX-License-Identifier: Apache-2.0
"""Routers of mixtures on `topk_softmax`: which ones `apply` replaces, and their results."""

import pytest
import torch
from support.tiny_models import distance, make
from torch import nn

import tiercel.integrations.transformers as door

pytestmark = pytest.mark.torch


class StrangeTopKRouter(nn.Module):
    """Mixtral's, with what may differ."""

    def __init__(self, choose, weigh, k=2):
        super().__init__()
        self.weight, self.top_k, self.hidden_dim = nn.Parameter(torch.randn(6, 16)), k, 16
        self.choose, self.weigh = choose, weigh

    def forward(self, x):
        logits = nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
        experts = self.choose(logits).topk(self.top_k, dim=-1).indices
        return logits, self.weigh(logits, experts), experts


def shares(logits, experts):
    return logits.softmax(-1, dtype=torch.float).gather(1, experts)


@pytest.mark.parametrize(
    ("module", "replaced"),
    [
        (StrangeTopKRouter(lambda x: x, shares), True),
        (StrangeTopKRouter(lambda x: x, lambda x, e: x.gather(1, e).float().softmax(-1)), True),
        (StrangeTopKRouter(lambda x: x, lambda x, e: x.sigmoid().gather(1, e)), True),
        (StrangeTopKRouter(lambda x: -x, shares), False),
        (StrangeTopKRouter(lambda x: x, lambda x, e: 2 * shares(x, e)), False),
        (StrangeTopKRouter(lambda x: x, shares, k=7), False),
    ],
)
def test_routers_are_tried(module, replaced):
    x = torch.randn(4, 16)
    before = module(x) if module.top_k == 2 else None
    report = door.apply(nn.Sequential(module))
    assert ("topk_softmax" in report.replaced) == replaced == ("0" not in report.kept)
    if before is not None:
        for found, due in zip(module(x), before, strict=True):
            torch.testing.assert_close(found, due)


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_routers(name):
    """A router gives the same experts and weights as the model's own, also with gradients."""
    more = {"n_group": 2, "routed_scaling_factor": 2.5} if name == "DeepseekV3" else {}
    model = make(name, num_experts_per_tok=2, **more)
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(5)).bfloat16()

    def results(router):
        router.zero_grad()
        logits, weights, experts = router(x)
        scattered = torch.zeros(logits.shape).scatter(1, experts, weights.float())
        scattered.square().sum().backward()
        return logits, scattered.detach(), router.weight.grad

    before = [results(router) for router in routers]
    report = door.apply(model)
    assert len(report.replaced["topk_softmax"]) == len(routers) > 0
    for router, due in zip(routers, before, strict=True):
        assert "forward" in vars(router)
        for found, expected in zip(results(router), due, strict=True):
            assert distance(found, expected) < 0.01
