# SPDX-License-Identifier: Apache-2.0
"""cross_entropy's kernels, run by the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels
from support.near import BF16, F16, F32, FLOATS
from torch.nn import functional

IGNORED = -100
# Relative tolerance of a gradient: the rounding of its dtype, or of float32 arithmetic.
STEP = {F32: 2e-5, BF16: 2**-8, F16: 2**-10}
TINY = {F32: 1e-12, BF16: 1e-12, F16: 2**-24}
# p - 1 of a target whose p is near 1: three roundings of p, as PyTorch has them.
AT_TARGET = 3 * 2**-24


def exact(logits, target, weight=None, scale=None, smoothing=0.0, z_loss=0.0, softcap=None):
    """Losses and gradients in float64, by PyTorch."""
    x = logits.double().requires_grad_()
    capped = x if softcap is None else softcap * (x / softcap).tanh()
    weight = None if weight is None else weight.double()
    options = {"ignore_index": IGNORED, "reduction": "none", "label_smoothing": smoothing}
    loss = functional.cross_entropy(capped, target.long(), weight, **options)
    if z_loss:
        loss = loss + z_loss * capped.logsumexp(-1).square() * (target != IGNORED)
    loss = loss * (1.0 if scale is None else scale.double())
    (grad,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach(), grad


def run(
    logits, target, weight=None, scale=None, smoothing=0.0, z_loss=0.0, softcap=None, grad=True
):
    loss = torch.full((len(target),), torch.nan)
    grads = torch.full_like(logits, torch.nan) if grad is True else grad
    kernels.cross_entropy(
        logits, target, weight, scale, loss, grads, IGNORED, smoothing, z_loss, softcap
    )
    return loss, grads


def check(logits, target, *options, grad=True):
    due_loss, due_grad = exact(logits, target, *options)
    loss, grads = run(logits, target, *options, grad=grad)
    torch.testing.assert_close(loss.double(), due_loss, rtol=2e-6, atol=2e-6)
    if grads is None:
        return
    # With smoothing, a probability may cancel against its share of the smoothing.
    smoothing = options[2] if len(options) > 2 else 0.0
    size = due_grad.abs() + 1e-6 * due_grad.abs().amax(-1, keepdim=True)
    size = size + smoothing / logits.shape[1]
    error = (grads.double() - due_grad).abs()
    allowed = STEP[logits.dtype] * size + TINY[logits.dtype]
    allowed += AT_TARGET * (torch.arange(logits.shape[1]) == target[:, None])
    if options[4:] and options[4] is not None:
        allowed += 5e-7  # 1 - tanh**2 where that is near 0, as PyTorch has it
    assert (error <= allowed).all(), (error / allowed).max()


def problem(rows, columns, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(dtype)
    return logits, torch.randint(columns, (rows,), generator=generator)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 2, 3, 8, 100, 1000, 4099, 32000, 50257])
def test_rows(columns, dtype):
    logits, target = problem(5, columns, dtype)
    target[1], target[3], target[4] = IGNORED, 0, columns - 1
    check(logits, target)
    check(logits, target, grad=None)
    check(logits, target.int())
    check(logits, torch.stack([target, target], 1)[:, 1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_options(dtype):
    logits, target = problem(6, 1003, dtype, 1)
    target[2] = IGNORED
    weight, scale = torch.rand(1003) + 0.5, torch.rand(6)
    check(logits, target, weight, scale, 0.0, 1e-3)
    check(logits, target, None, scale[:1].contiguous(), 0.1)
    check(logits, target, None, None, 0.1, 1e-3, 5.0)
    check(logits, target, weight, None, 0.0, 0.0, 30.0)
    check(logits, target, weight, scale, 0.2, 1e-3, 30.0)
    check(logits, target, None, None, 1.0)
    check(logits, target, None, None, 0.0, 0.0, 30.0, grad=None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 3, 7, 100])
def test_small_softcap(columns, dtype):
    """Padding beside a row adds nothing to its sum."""
    logits, target = problem(5, columns, dtype, 8)
    check(logits, target, None, None, 0.0, 0.0, 0.25)
    check(logits, target, torch.rand(columns) + 0.5, None, 0.3, 0.1, 0.25)


@pytest.mark.parametrize("columns", [1000, 5000])
def test_large_softcap(columns):
    """Logits far below it keep their digits."""
    logits, target = problem(5, columns, F32, 9)
    check(logits, target, None, None, 0.0, 0.0, 1e5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [5, 64, 1021])
def test_several_rows_of_warps_in_a_block(columns, dtype):
    """The last block has fewer rows than warps."""
    logits, target = problem(300, columns, dtype, 10)
    target[::7] = IGNORED
    loss, grad = torch.empty(300), torch.empty_like(logits)
    plan = kernels.cross_entropy_plan(
        logits, target, None, None, loss, grad, IGNORED, 0.0, 0.0, None
    )
    assert plan["grid"] == 100 and plan["block"] == 96
    check(logits[:299], target[:299])
    check(logits, target, grad=None)
    due_loss, due = run(logits, target)
    loss, grad = run(logits, target, grad=logits)
    assert torch.equal(loss, due_loss) and torch.equal(grad, due)


@pytest.mark.parametrize("options", [(), (None, None, 0.1)])
def test_large_logits(options):
    """Differences come before sums, so that little cancels."""
    logits, target = problem(4, 3000, F32, 6)
    for shift in (-3e4, 1e4):
        check(logits + shift, target, *options)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "blocks"),
    [
        (150, 40_000, BF16, 2),
        (3, 130_000, BF16, 8),
        (2, 262_144, F16, 8),
        (1, 262_147, F32, 8),
        (1, 442_365, F32, 8),
    ],
)
def test_clusters(rows, columns, dtype, blocks):
    logits, target = problem(rows, columns, dtype, 2)
    weight = torch.rand(columns) + 0.5
    options = (weight if rows < 4 else None, None, 0.1)
    arguments = (torch.empty(rows), torch.empty_like(logits), IGNORED, 0.1, 0.0, None)
    plan = kernels.cross_entropy_plan(logits, target, None, None, *arguments)
    assert plan["blocks_per_row"] == blocks
    check(logits, target, *options)


@pytest.mark.parametrize("dtype", FLOATS)
def test_in_place_and_strided(dtype):
    """The kernel writes nothing between the rows."""
    for columns, gap, begin in ((1000, 0, 0), (1001, 3, 1), (777, 8, 5), (40_001, 1, 3)):
        flat = torch.randn(4 * (columns + gap) + begin, generator=torch.Generator().manual_seed(4))
        flat = flat.to(dtype)
        before = flat.clone()
        logits = flat[begin:].view(4, -1)[:, :columns]
        target = torch.tensor([0, columns - 1, IGNORED, 17])
        due_loss, due = run(logits, target)
        check(logits, target)
        assert torch.equal(flat, before)
        loss, grad = run(logits, target, grad=logits)
        assert torch.equal(loss, due_loss) and torch.equal(grad, due)
        before[begin:].view(4, -1)[:, :columns] = due
        assert torch.equal(flat, before)
        # A gradient that lies otherwise than the logits.
        moved = torch.full((4, columns + 5), 7.0, dtype=dtype)
        run(before[begin:].view(4, -1)[:, :columns], target, grad=moved[:, 3 : 3 + columns])
        assert (moved[:, :3] == 7).all() and (moved[:, 3 + columns :] == 7).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1000, 40_001])
def test_special_values(columns, dtype):
    logits, target = problem(8, columns, dtype, 5)
    logits[0, 5], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 1:] = -torch.inf  # all probability at one
    logits[4] = torch.nan
    target[3], target[5] = 0, IGNORED
    logits[5, 7], logits[6, 4:] = torch.nan, -torch.inf
    target[6] = 9  # has probability 0
    due_loss, due_grad = exact(logits, target)
    loss, grad = run(logits, target)
    assert torch.equal(loss.isnan(), due_loss.isnan())
    assert loss.isnan().tolist() == [True, True, True, False, True, False, False, False]
    assert loss[3] == 0 and not grad[3].any()
    assert loss[5] == 0 and not grad[5].any()  # where PyTorch has NaN
    assert loss[6] == torch.inf
    due_grad[5] = 0
    assert torch.equal(grad.isnan(), due_grad.isnan())
    torch.testing.assert_close(grad[6:].double(), due_grad[6:], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("wrong", [1000, -1, -101, 2**31, 2**40 + 3, -(2**62)])
def test_no_class(wrong):
    logits, target = problem(3, 1000, BF16, 7)
    target[1] = wrong
    loss, grad = run(logits, target, torch.rand(1000), None, 0.1)
    assert loss.isnan().tolist() == [False, True, False]
    assert grad[1].isnan().all() and not grad[[0, 2]].isnan().any()
    target[0] = target[2] = IGNORED
    scale = torch.zeros(1)
    kernels.cross_entropy_mean_scale(target, torch.rand(1000), scale, IGNORED)
    assert scale == 1


def test_every_target_ignored():
    """A mean over nothing is NaN, and its gradient 0, as PyTorch's."""
    logits, _ = problem(3, 100, F32)
    target = torch.full((3,), IGNORED)
    scale = torch.zeros(1)
    kernels.cross_entropy_mean_scale(target, None, scale, IGNORED)
    loss, grad = run(logits, target, None, scale)
    assert scale == torch.inf and loss.sum().isnan() and not grad.any()


def test_scale_of_a_mean():
    for target in (torch.tensor([1, IGNORED, 3, 0, 7]), torch.arange(5000) % 9):
        for weight in (None, torch.rand(9)):
            scale = torch.full((1,), torch.nan)
            kernels.cross_entropy_mean_scale(target, weight, scale, IGNORED)
            kept = target[target != IGNORED]
            sum_ = len(kept) if weight is None else weight.double()[kept].sum()
            torch.testing.assert_close(scale.double().item(), 1 / float(sum_), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rescale(dtype):
    for rows, columns, gap in ((7, 1000, 0), (5, 3, 0), (0, 8, 0), (4, 1001, 2), (2000, 9, 1)):
        grad = torch.randn(rows, columns + gap).to(dtype)
        before = grad.clone()
        for factor in (torch.tensor([0.3]), torch.rand(rows) if rows != 1 else torch.ones(1)):
            due = before.clone()
            due[:, :columns] = (due[:, :columns].float() * factor[:, None]).to(dtype)
            grad.copy_(before)
            kernels.cross_entropy_rescale(grad[:, :columns], factor)
            assert torch.equal(grad, due)


def test_a_factor_of_1_touches_nothing():
    grad = torch.full((3, 40), torch.nan)
    bits = grad.view(torch.int32)
    bits[:, ::2] = 0x7FA00000 | 5  # a signalling NaN, which arithmetic would change
    before = bits.clone()
    kernels.cross_entropy_rescale(grad, torch.ones(1))
    kernels.cross_entropy_rescale(grad, torch.ones(3))
    assert torch.equal(bits, before)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("columns", [1, 8, 77, 264, 2056])
@pytest.mark.parametrize("classes", [1, 3, 40])
def test_what_targets_add(classes, columns, dtype):
    """Rows apart and side by side; many tokens of one target, and targets without any."""
    generator = torch.Generator().manual_seed(classes + columns)
    target = torch.randint(classes, (21,), generator=generator)
    by = torch.randn(21, generator=generator)
    for gap in (0, 8, 1):
        x = torch.randn(21, columns + gap, generator=generator).to(dtype)[:, :columns]
        sums = torch.randn(classes, columns, generator=generator).to(dtype)
        due = sums.double().index_add(0, target, by[:, None].double() * x.double())
        size = sums.double().abs().index_add(0, target, (by[:, None] * x).abs().double())
        places, order = target.int().sort(stable=True)
        kernels.target_rows(sums, x, places, order, by)
        error = (sums.double() - due).abs()
        assert (error <= torch.finfo(dtype).eps / 2 * due.abs() + 2e-6 * size).all()


def test_targets_and_orders_that_hold_anything():
    """The kernel reads and writes nothing outside of its tensors: the emulator looks."""
    sums, x, by = torch.zeros(5, 16, dtype=BF16), torch.ones(6, 16, dtype=BF16), torch.ones(6)
    places = torch.tensor([-(2**31), -1, 0, 4, 5, 2**31 - 1], dtype=torch.int32)
    kernels.target_rows(sums, x, places, torch.tensor([9, -9, 2**62, -(2**62), 0, 1]), by)
    assert sums[:, 0].tolist() == [1, 0, 0, 0, 1]
