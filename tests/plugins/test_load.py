# SPDX-License-Identifier: Apache-2.0
"""``tiercel.load`` where there is no GPU, and on one."""

import pytest
import torch

import tiercel
from tiercel import _C
from tiercel.core import dispatch as _op
from tiercel.core import platform

pytestmark = pytest.mark.torch


@pytest.fixture
def loaded(monkeypatch):
    """Loads by device index, of a GPU that counts as there."""
    seen = []
    for op in _op.registry.values():
        monkeypatch.setattr(op, "load", lambda index, name=op.name: seen.append((name, index)))
    monkeypatch.setattr(platform, "why_not", lambda device: None)
    return seen


def test_operators_and_devices(loaded):
    tiercel.load(device=0)
    tiercel.load(tiercel.topk_softmax, device="cuda:1")
    tiercel.load("topk_softmax", device=torch.device("cuda", 2))
    assert loaded[:-2] == [(name, 0) for name in _op.registry]
    assert loaded[-2:] == [("topk_softmax", 1), ("topk_softmax", 2)]


def test_bad_arguments(loaded):
    with pytest.raises(ValueError, match="tiercel has no operator 'nope'; it has .*topk_softmax"):
        tiercel.load("nope", device=0)
    with pytest.raises(ValueError, match="`device` must be a CUDA device, got cpu"):
        tiercel.load(device="cpu")
    with pytest.raises(ValueError, match="must be a CUDA device's index, got -1"):
        tiercel.load(device=-1)
    with pytest.raises(TypeError, match="must be a torch.device, a str or an int, got bool"):
        tiercel.load(device=True)
    with pytest.raises(ValueError, match="`device` must be a CUDA device: .*nonsense"):
        tiercel.load(device="nonsense")
    assert loaded == []


def test_without_a_driver_it_says_why(run_python):
    code = "import torch, tiercel; tiercel.load(DEVICE)"
    for device in ("device=0", "'topk_softmax', device='cuda:0'"):
        result = run_python(
            code.replace("DEVICE", device), check=False, TIERCEL_LIBCUDA="/no/such/library"
        )
        assert "RuntimeError: tiercel.load: no NVIDIA driver" in result.stderr


def test_the_launcher_checks_the_index():
    with pytest.raises(ValueError, match="a CUDA device's index is expected, got -1"):
        _C.topk_softmax_load(-1)
    with pytest.raises(TypeError):
        _C.topk_softmax_load("0")


@pytest.mark.gpu
def test_on_a_gpu(run_python):
    """In a new process: loaded once, a first call inside a graph capture finds its kernels."""
    code = """
import torch, tiercel
tiercel.load()
tiercel.load(tiercel.topk_softmax, device=0)
scores = torch.randn(4, 64, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    weights, indices = tiercel.topk_softmax(scores, 8, backend="sm90")
graph.replay()
due = tiercel.topk_softmax(scores, 8, backend="ref")
assert torch.equal(indices, due[1])
"""
    run_python(code)
