# SPDX-License-Identifier: Apache-2.0
"""Liger's names: constructors, calls and results; options without a counterpart."""

import itertools
import types

import pytest
import torch
from torch.nn import functional

from tiercel.integrations import liger

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

ROWS, HIDDEN, CLASSES = 9, 16, 31


def problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.randn(CLASSES, HIDDEN, generator=generator)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[3] = -100
    return x, weight, target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("offset", "init", "mode"), [(0.0, "ones", "llama"), (1.0, "zeros", "gemma")]
)
def test_rms_norm(offset, init, mode, dtype):
    module = liger.LigerRMSNorm(HIDDEN, 1e-5, offset, mode, init, in_place=False)
    x = problem()[0].to(dtype)
    due = functional.rms_norm(x.float(), (HIDDEN,), eps=1e-5)
    torch.testing.assert_close(module(x).float(), due, rtol=2**-8, atol=1e-6)
    assert module(x).dtype == dtype
    assert list(module.state_dict()) == ["weight"] and module.weight.shape == (HIDDEN,)
    torch.nn.init.uniform_(module.weight)
    due = due * (module.weight + offset)
    for own in (torch.float32, dtype):
        found = module.to(own)(x).float()
        torch.testing.assert_close(found, due, rtol=2**-6, atol=2**-7)
    module(x).float().square().sum().backward()
    assert module.weight.grad.shape == (HIDDEN,)
    assert "eps=1e-05" in repr(module)


def test_rms_norm_without_a_weight():
    module = liger.LigerRMSNorm(HIDDEN, elementwise_affine=False)
    assert not list(module.parameters())
    x = problem()[0]
    torch.testing.assert_close(module(x), functional.rms_norm(x, (HIDDEN,), eps=1e-6))


def test_rms_norm_refuses():
    with pytest.raises(NotImplementedError, match="LigerRMSNorm: `casting_mode` = 'none' is not"):
        liger.LigerRMSNorm(HIDDEN, casting_mode="none")
    with pytest.raises(ValueError, match="`init_fn` must be 'ones' or 'zeros', got 'twos'"):
        liger.LigerRMSNorm(HIDDEN, init_fn="twos")


@pytest.mark.parametrize("size", [None, 40])
def test_mlp(size):
    config = types.SimpleNamespace(hidden_size=HIDDEN, intermediate_size=24, hidden_act="silu")
    module = liger.LigerSwiGLUMLP(config, size)
    x = problem()[0]
    due = module.down_proj(functional.silu(module.gate_proj(x)) * module.up_proj(x))
    torch.testing.assert_close(module(x), due)
    assert set(module.state_dict()) == {f"{n}_proj.weight" for n in ("gate", "up", "down")}
    assert module.gate_proj.weight.shape == (size or 24, HIDDEN)
    config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="must be 'silu' or 'swish', got 'gelu'"):
        liger.LigerSwiGLUMLP(config)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(reduction):
    x, matrix, target = problem()
    logits = x @ matrix.t()
    weight = torch.rand(CLASSES) + 0.5
    for given, smoothing, softcap in itertools.product((None, weight), (0.0, 0.1), (None, 5.0)):
        capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        due = functional.cross_entropy(
            capped, target, given, reduction=reduction, label_smoothing=smoothing
        )
        options = (given, -100, 0.0, smoothing, reduction, softcap)
        found = liger.LigerCrossEntropyLoss(*options)(logits, target)
        torch.testing.assert_close(found, due)
        found = liger.LigerFusedLinearCrossEntropyLoss(*options)(matrix, x, target)
        torch.testing.assert_close(found, due)
    bias = torch.randn(CLASSES)
    loss = liger.LigerFusedLinearCrossEntropyLoss(
        lse_square_scale=1e-2, reduction=reduction, accum_dtype=torch.float32
    )
    counts = target != -100
    extra = 1e-2 * (logits + bias).logsumexp(-1).square() * counts
    due = functional.cross_entropy(logits + bias, target, reduction=reduction)
    due = due + {"mean": extra.sum() / counts.sum(), "sum": extra.sum(), "none": extra}[reduction]
    torch.testing.assert_close(loss(matrix, x, target, bias), due)


def test_gradients():
    x, matrix, target = problem()
    leaves = [x.requires_grad_(), matrix.requires_grad_()]
    due = torch.autograd.grad(functional.cross_entropy(x @ matrix.t(), target), leaves)
    fused = liger.LigerFusedLinearCrossEntropyLoss()
    torch.testing.assert_close(torch.autograd.grad(fused(matrix, x, target), leaves), due)
    plain = liger.LigerCrossEntropyLoss()
    logits = x @ matrix.t()
    before = logits.detach().clone()
    torch.testing.assert_close(torch.autograd.grad(plain(logits, target), leaves), due)
    assert not torch.equal(logits, before)  # the gradient took their place
    leaf = before.clone().requires_grad_()
    plain(leaf, target).backward()
    assert torch.equal(leaf.detach(), before)


@pytest.mark.parametrize(
    "option",
    [
        "return_z_loss",
        "return_token_accuracy",
        "return_predicted_tokens",
        "use_token_scaling",
    ],
)
def test_losses_refuse(option):
    kinds = [liger.LigerFusedLinearCrossEntropyLoss]
    if option != "use_token_scaling":
        kinds.append(liger.LigerCrossEntropyLoss)
    for kind in kinds:
        with pytest.raises(NotImplementedError, match=f"{kind.__name__}: `{option}` = True is not"):
            kind(**{option: True})


def test_a_weighted_mean_with_a_z_loss_is_refused():
    weight = torch.ones(CLASSES)
    for kind, name in (
        (liger.LigerCrossEntropyLoss, "weight"),
        (liger.LigerFusedLinearCrossEntropyLoss, "ce_weight"),
    ):
        with pytest.raises(NotImplementedError, match=f"`lse_square_scale` with `{name}` is not"):
            kind(weight, lse_square_scale=1e-4)
        kind(weight, lse_square_scale=1e-4, reduction="sum")
