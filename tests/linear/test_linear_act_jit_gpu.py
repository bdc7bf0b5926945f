# SPDX-License-Identifier: Apache-2.0
"""TIERCEL_JIT=1: a variant of linear_act that is not precompiled."""

import pytest
import torch

import tiercel
from tiercel.jit import cute_kernel

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


@pytest.fixture(autouse=True)
def jit(monkeypatch, tmp_path_factory):
    if cute_kernel.dsl_version() is None:
        pytest.skip("nvidia-cutlass-dsl is not installed")
    monkeypatch.setenv("TIERCEL_JIT", "1")
    monkeypatch.setenv("TIERCEL_STRICT", "1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 5, 1000])
def test_right(rows, dtype):
    x = torch.randn(rows, 256, device="cuda", dtype=dtype)
    w = torch.randn(384, 256, device="cuda", dtype=dtype) / 16
    b = torch.randn(384, device="cuda", dtype=dtype)
    for bias in (b, None):
        truth = torch.nn.functional.linear(
            x.double(), w.double(), None if bias is None else bias.double()
        )
        truth = truth.relu().square()
        got = tiercel.linear_act(x, w, bias, activation="relu_squared", backend="sm90")
        torch.testing.assert_close(got.double(), truth, rtol=1e-2, atol=2e-3)
    plan = tiercel.explain(tiercel.linear_act, x, w, b, activation="relu_squared")
    assert plan.backend == "sm90"


def test_in_a_graph_and_with_gradients():
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16) / 16
    out = torch.zeros(64, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiercel.linear_act(x, w, activation="relu_squared", out=out)
    graph.replay()
    truth = (x.double() @ w.double().t()).relu().square()  # ref rounds three times, and squares that
    torch.testing.assert_close(out.double(), truth, rtol=1e-2, atol=2e-3)
    x.requires_grad_()
    tiercel.linear_act(x, w, activation="relu_squared").sum().backward()
    assert x.grad is not None


def test_without_permission(monkeypatch):
    monkeypatch.setenv("TIERCEL_JIT", "0")
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="relu_squared.*TIERCEL_JIT=1 compiles it"):
        tiercel.linear_act(x, w, activation="relu_squared", backend="sm90")
