# SPDX-License-Identifier: Apache-2.0
"""The entropy of rows and its gradient in cross_entropy's kernels, run by the emulator, against
float64."""

import pytest
import torch
from support.emulator import kernels
from support.near import BF16, F16, F32, FLOATS
from torch.nn import functional

IGNORED = -100
STEP = {F32: 2e-5, BF16: 2**-8, F16: 2**-10}
TINY = {F32: 1e-12, BF16: 1e-12, F16: 2**-24}


def exact(logits, target, by, weight=None, scale=None, z_loss=0.0, softcap=None):
    """Losses, entropies and the gradient of both in float64, by PyTorch."""
    x = logits.double().requires_grad_()
    capped = x if softcap is None else softcap * (x / softcap).tanh()
    weight = None if weight is None else weight.double()
    options = {"ignore_index": IGNORED, "reduction": "none"}
    kept = target != IGNORED
    loss = functional.cross_entropy(capped, target.long(), weight, **options)
    loss = (loss + z_loss * capped.logsumexp(-1).square() * kept) * (
        1.0 if scale is None else scale.double()
    )
    log_p = capped.log_softmax(-1)
    terms = torch.where(log_p.exp() > 0, log_p.exp() * log_p.clamp(min=-1e30), 0.0)
    entropy = -terms.sum(-1) * kept
    total = loss.sum() + (0.0 if by is None else (entropy * by.double()).sum())
    (grad,) = torch.autograd.grad(total, x)
    return loss.detach(), entropy.detach(), grad


def run(logits, target, by, weight=None, scale=None, z_loss=0.0, softcap=None, grad=True):
    loss, entropy = (torch.full((len(target),), torch.nan) for _ in range(2))
    grads = torch.full_like(logits, torch.nan) if grad is True else grad
    given = (logits, target, weight, scale, loss, grads, IGNORED, 0.0, z_loss, softcap)
    kernels.cross_entropy_and_entropy(*given, entropy, by)
    return loss, entropy, grads


def check(logits, target, by, *options, grad=True):
    due_loss, due_entropy, due_grad = exact(logits, target, by, *options)
    loss, entropy, grads = run(logits, target, by, *options, grad=grad)
    torch.testing.assert_close(loss.double(), due_loss, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(entropy.double(), due_entropy, rtol=3e-6, atol=3e-6)
    if grads is None:
        return
    # The two parts of an element may cancel.
    by_itself = exact(logits, target, None, *options)[2]
    size = torch.maximum(due_grad.abs(), by_itself.abs())
    size = size + 1e-6 * due_grad.abs().amax(-1, keepdim=True)
    allowed = STEP[logits.dtype] * size + TINY[logits.dtype]
    allowed += 3 * 2**-24 * (torch.arange(logits.shape[1]) == target[:, None])
    softcap = options[3] if options[3:] else None
    # log p and the entropy cancel in places; both are float32 of about 8, or of the capped logits.
    capped = logits.double()
    capped = capped if softcap is None else softcap * (capped / softcap).tanh()
    of_entropy = 0.0 if by is None else by.double().abs()[:, None]
    allowed += 4e-6 * (softcap or 1.0) * capped.softmax(-1) * of_entropy
    if softcap is not None:
        allowed += 5e-7  # 1 - tanh**2 where that is near 0
    error = (grads.double() - due_grad).abs()
    assert (error <= allowed).all(), (error / allowed).max()


def problem(rows, columns, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(dtype)
    target = torch.randint(columns, (rows,), generator=generator)
    return logits, target, torch.randn(rows, generator=generator)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 2, 8, 100, 1000, 4099, 32000])
def test_rows(columns, dtype):
    logits, target, by = problem(5, columns, dtype)
    target[1], target[3], target[4] = IGNORED, 0, columns - 1
    check(logits, target, by)
    check(logits, target, by, grad=None)
    check(logits, target, None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [100, 5003])
def test_options(columns, dtype):
    logits, target, by = problem(6, columns, dtype, 1)
    target[2] = IGNORED
    weight, scale = torch.rand(columns) + 0.5, torch.rand(6)
    check(logits, target, by, weight, scale, 1e-3)
    check(logits, target, by, None, scale[:1].contiguous(), 0.0, 5.0)
    check(logits, target, by, None, torch.zeros(6))


@pytest.mark.parametrize(("rows", "columns", "blocks"), [(150, 40_000, 2), (3, 130_000, 8)])
def test_clusters(rows, columns, blocks):
    logits, target, by = problem(rows, columns, BF16, 2)
    arguments = (torch.empty(rows), torch.empty_like(logits), IGNORED, 0.0, 0.0, None)
    given = (logits, target, None, None, *arguments, torch.empty(rows), by)
    assert kernels.cross_entropy_and_entropy_plan(*given)["blocks_per_row"] == blocks
    check(logits, target, by)


@pytest.mark.parametrize("columns", [1000, 5000])
def test_the_same_losses_and_gradients_as_without(columns):
    logits, target, _ = problem(5, columns, BF16, 3)
    loss, grad = torch.empty(5), torch.empty_like(logits)
    options = (IGNORED, 0.0, 1e-3, None)
    kernels.cross_entropy(logits, target, None, None, loss, grad, *options)
    got_loss, _, got_grad = run(logits, target, None, None, None, 1e-3)
    assert torch.equal(got_loss, loss) and torch.equal(got_grad, grad)


@pytest.mark.parametrize("shift", [-3e4, 1e4])
def test_large_logits(shift):
    logits, target, by = problem(4, 3000, F32, 6)
    check(logits + shift, target, by)


@pytest.mark.parametrize("columns", [64, 5000])
def test_few_possible_classes(columns):
    """Probabilities of 0, one alone, and equal ones; and rising rows, whose maximum moves on."""
    logits = torch.full((4, columns), -torch.inf)
    logits[0, 3] = 2.0
    logits[1, :8] = -5.0
    logits[2] = 0.0
    logits[3] = torch.linspace(-200, 200, columns)
    target, by = torch.tensor([3, 1, 0, columns - 1]), torch.tensor([1.0, -2.0, 3.0, 4.0])
    _, entropy, grad = run(logits, target, by)
    due = exact(logits[2:], target[2:], by[2:])
    torch.testing.assert_close(entropy[2:].double(), due[1], rtol=3e-6, atol=3e-6)
    assert entropy[0] == 0 and abs(entropy[1] - torch.tensor(8.0).log()) < 1e-6
    assert not grad.isnan().any() and not grad[0].any()
    assert (grad[1, 8:] == 0).all() and abs(grad[1, 0] - 1 / 8) < 1e-6
    torch.testing.assert_close(grad[2:].double(), due[2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("columns", [64, 5000])
def test_rows_that_are_not_numbers_stay_alone(columns):
    logits, target, by = problem(3, columns, BF16, 5)
    logits[1, 5] = torch.nan
    _, entropy, grad = run(logits, target, by)
    assert entropy.isnan().tolist() == [False, True, False]
    assert grad.isnan().any(-1).tolist() == [False, True, False]


def test_in_place():
    logits, target, by = problem(3, 5000, BF16, 5)
    loss, entropy, grad = run(logits.clone(), target, by)
    again = run(logits, target, by, grad=logits)
    assert all(torch.equal(a, b) for a, b in zip((loss, entropy, grad), again, strict=True))
