# SPDX-License-Identifier: Apache-2.0
"""A local repository of `tiercel.integrations.kernels`, loaded by Hugging Face's own package."""

import functools
import json

import pytest
import torch
from support.tiny_models import distance, make, tokens
from torch import nn

kernels = pytest.importorskip("kernels")

from tiercel.integrations.kernels import layers, write

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings(r"ignore:\s*No kernel mapping:UserWarning"),
    pytest.mark.filterwarnings("ignore::tiercel.FallbackWarning"),
]
INFERENCE, TRAINING = kernels.Mode.INFERENCE, kernels.Mode.TRAINING
COMPILE = kernels.Mode.TORCH_COMPILE
NAMES = ("RMSNorm", "RMSNormZeroCentered", "SwiGLUMLP", "GeGLUMLP")


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "repository")


@pytest.fixture
def kernelize(folder):
    """kernelize(module, mode): all of our layers, for every mode."""

    def with_ours(module, mode):
        repositories = {
            name: kernels.LocalLayerRepository(folder, layer_name=name) for name in NAMES
        }
        modes = (INFERENCE | COMPILE, TRAINING | COMPILE)
        mapping = {name: {"cpu": dict.fromkeys(modes, r)} for name, r in repositories.items()}
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            return kernels.kernelize(module, mode=mode, device="cpu")

    return with_ours


def test_the_package_loads_the_layers(folder):
    found = kernels.get_local_kernel(folder)
    assert found.layers is layers
    assert kernels.get_local_kernel(folder / "build") is found
    for name in NAMES:
        assert issubclass(getattr(found.layers, name), nn.Module)
    assert write(folder) == folder  # a second time
    for backend in ("cpu", "cuda"):
        metadata = json.loads((folder / f"build/torch-{backend}/metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}


def norms_of(model):
    return [module for module in model.modules() if "RMSNorm" in type(module).__name__]


def named(model):
    """transformers names its layers only for the versions of kernels that it accepts: 5.24 from
    0.18.2 on."""
    for norm in norms_of(model):
        if not hasattr(type(norm), "kernel_layer_name"):
            kernels.use_kernel_forward_from_hub("RMSNorm")(type(norm))
    return model


def replaced(model):
    norms = norms_of(model)
    return bool(norms) and all("forward" in vars(module) for module in norms)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "Phi3"])
def test_norms_of_models(name, kernelize):
    right, usual, ours = make(name, torch.float32), make(name), named(make(name))
    kernelize(ours, INFERENCE)
    assert replaced(ours)
    with torch.no_grad():
        expected = right(tokens()).logits
        found = ours(tokens()).logits
        assert not torch.equal(found, usual(tokens()).logits)
        bound = distance(usual(tokens()).logits, expected)
    assert distance(found, expected) < 1.15 * bound


def test_training_and_compile(kernelize):
    usual, ours = make("Llama", torch.float32), named(make("Llama", torch.float32))
    kernelize(ours, TRAINING | COMPILE)
    assert replaced(ours)
    for model in (usual, ours):
        model(tokens()).logits.square().mean().backward()
    for found, expected in zip(ours.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5)


class Norm(nn.Module):
    """Gemma's."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.rand(24))

    def forward(self, x):
        return nn.functional.rms_norm(x, (24,), self.weight + 1, self.eps)


class Gated(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(24, 40), nn.Linear(24, 40)
        self.down_proj, self.act = nn.Linear(40, 24), act

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("layer", "make_module"),
    [
        ("RMSNormZeroCentered", Norm),
        ("SwiGLUMLP", lambda: Gated(nn.functional.silu)),
        ("GeGLUMLP", lambda: Gated(functools.partial(nn.functional.gelu, approximate="tanh"))),
    ],
)
def test_a_module_of_ones_own(layer, make_module, kernelize):
    module = make_module()
    x = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(0))
    expected = module(x)
    named = type(type(module).__name__, (type(module),), {"forward": type(module).forward})
    kernels.replace_kernel_forward_from_hub(named, layer)
    module.__class__ = named
    kernelize(module, TRAINING)
    assert "forward" in vars(module)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)
