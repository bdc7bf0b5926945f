# SPDX-License-Identifier: Apache-2.0
"""use_mxfp4_experts against the model with dequantised experts in float32."""

import pytest
import torch
from support.tiny_models import distance, make, tokens
from support.w4_weights import draw

import tiercel.integrations.transformers as door

pytestmark = pytest.mark.torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EXPERTS, HIDDEN, INNER = 4, 64, 128


def tensors_of(model):
    """Random MXFP4 weights for each layer, which the model gets in its own layout."""
    torch.manual_seed(4)
    found = {}
    for layer, block in enumerate(model.model.layers):
        name = f"model.layers.{layer}.mlp.experts"
        for half, rows, k in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            weights = draw("mxfp4", EXPERTS * rows, k, torch.bfloat16, "cpu")
            scales = (weights.scale % 4) + 121
            values = weights.values.view(-1, k // 32, 32)
            values = values * (scales.double() - weights.scale.double()).exp2()[..., None]
            found[f"{name}.{half}_blocks"] = weights.packed.view(EXPERTS, rows, k // 32, 16)
            found[f"{name}.{half}_scales"] = scales.view(EXPERTS, rows, k // 32)
            parameter = getattr(block.mlp.experts, half)
            with torch.no_grad():
                parameter.copy_(values.view(EXPERTS, rows, k).mT)
    return found


def logits(model):
    with torch.no_grad():
        return model(tokens(device=model.device), use_cache=False).logits


@pytest.mark.parametrize("device", DEVICES)
def test_logits(device):
    right, usual, ours = (
        make("GptOss", dtype, device=device, intermediate_size=INNER)
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
    )
    found = [tensors_of(model) for model in (right, usual, ours)][-1]
    changed = door.use_mxfp4_experts(ours, found)
    assert changed == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert not any(
        "gate_up_proj" in name and "bias" not in name for name, _ in ours.named_parameters()
    )
    expected = logits(right)
    assert distance(logits(ours), expected) < 1.15 * distance(logits(usual), expected)


def test_a_tensor_is_missing():
    model = make("GptOss", intermediate_size=INNER)
    found = tensors_of(model)
    del found["model.layers.1.mlp.experts.down_proj_scales"]
    with pytest.raises(KeyError, match="must have model.layers.1.mlp.experts.down_proj_scales"):
        door.use_mxfp4_experts(model, found)
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (EXPERTS, HIDDEN, 2 * INNER)
