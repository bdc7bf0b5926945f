# SPDX-License-Identifier: Apache-2.0
"""cross_entropy with PyTorch and without a GPU: reference, gradients, public function."""

import itertools

import pytest
import torch
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ("none", "mean", "sum")


def problem(rows=6, classes=37, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, classes, generator=generator)).to(dtype)
    target = torch.randint(classes, (rows,), generator=generator)
    if rows > 2:
        target[2] = -100
    return logits, target, torch.rand(classes, generator=generator) + 0.5


def exact(logits, target, weight=None, *, scale=None, z_loss=0.0, softcap=None, **options):
    """PyTorch's loss in float64, with what it lacks."""
    reduction = options.pop("reduction", "mean")
    ignored = options.get("ignore_index", -100)
    x = logits if softcap is None else softcap * (logits / softcap).tanh()
    weight = None if weight is None else weight.double()
    loss = functional.cross_entropy(x, target.long(), weight, reduction="none", **options)
    loss = loss + z_loss * x.logsumexp(-1).square() * (target != ignored)
    loss = loss if scale is None else loss * scale.double()
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    kept = target[target != ignored]
    return loss.sum() / (len(kept) if weight is None else weight[kept].sum())


def options_of(rows):
    for weighted, smoothing, z_loss, softcap in itertools.product(
        (False, True), (0.0, 0.1), (0.0, 1e-2), (None, 4.0)
    ):
        yield weighted, {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap}
    yield False, {"scale": torch.rand(rows)}
    yield True, {"scale": torch.tensor([0.3])}
    yield False, {"ignore_index": 5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_and_gradient(reduction, dtype):
    logits, target, weight = problem(dtype=dtype)
    target[2] = 5
    eps = torch.finfo(dtype).eps
    for weighted, options in options_of(len(target)):
        given = weight if weighted else None
        for ignored in (False, True):
            target[1] = options.get("ignore_index", -100) if ignored else 7
            results = []
            x, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
            for function, leaf in ((tiercel.cross_entropy, x), (exact, wide)):
                loss = function(leaf, target, given, reduction=reduction, **options)
                upstream = torch.linspace(0.5, 2, 6) if reduction == "none" else torch.tensor(1.5)
                (grad,) = torch.autograd.grad(loss, leaf, upstream.to(loss.dtype))
                results.append((loss.detach(), grad))
            (loss, grad), (due_loss, due_grad) = results
            assert loss.dtype == torch.float32 and grad.dtype == dtype
            torch.testing.assert_close(loss.double(), due_loss, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(grad.double(), due_grad, rtol=2 * eps + 1e-5, atol=2e-6)
            without = tiercel.cross_entropy(logits, target, given, reduction=reduction, **options)
            assert torch.equal(without, loss) and without.grad_fn is None


def test_it_is_pytorchs_function():
    """PyTorch's arguments mean the same here."""
    logits, target, weight = problem()
    target[2] = 5
    for options in (
        {},
        {"ignore_index": 5},
        {"reduction": "sum", "label_smoothing": 0.2},
        {"reduction": "none", "weight": weight, "label_smoothing": 0.2},
        {"weight": weight, "label_smoothing": 0.2},
    ):
        due = functional.cross_entropy(logits, target, **options)
        torch.testing.assert_close(tiercel.cross_entropy(logits, target, **options), due)
    due = functional.cross_entropy(logits, target, weight)
    torch.testing.assert_close(tiercel.cross_entropy(logits, target, weight), due)


def test_float64_reference():
    logits, target, weight = problem()
    wide = logits.double().requires_grad_()
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 4.0}

    def loss(x):
        return tiercel.ref.cross_entropy(x, target, weight.double(), **options)

    assert loss(wide).dtype == torch.float64
    torch.testing.assert_close(loss(wide), exact(wide, target, weight, **options))
    assert torch.autograd.gradcheck(loss, (wide,))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_in_place(reduction):
    logits, target, _ = problem()
    leaf = logits.clone().requires_grad_()
    due_loss = tiercel.cross_entropy(leaf, target, reduction=reduction)
    (due,) = torch.autograd.grad(due_loss.sum(), leaf)
    leaf = logits.clone().requires_grad_()
    x = leaf * 1.0
    loss = tiercel.cross_entropy(x, target, reduction=reduction, inplace=True)
    assert torch.equal(loss, due_loss)
    torch.testing.assert_close(x.detach(), due)
    loss.sum().backward()
    torch.testing.assert_close(leaf.grad, due)
    # Without a gradient nothing is overwritten.
    with torch.no_grad():
        x = logits.clone()
        assert torch.equal(
            tiercel.cross_entropy(x, target, reduction=reduction, inplace=True), due_loss
        )
    assert torch.equal(x, logits)


def test_in_place_and_who_else_needs_the_logits():
    logits, target, _ = problem()
    leaf = logits.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="^cross_entropy: `inplace` must be False for a leaf"):
        tiercel.cross_entropy(leaf, target, inplace=True)
    x = leaf.tanh()  # whose gradient is of its result
    loss = tiercel.cross_entropy(x, target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_backward_twice(inplace):
    """A gradient that is kept is not multiplied twice."""
    logits, target, _ = problem()
    leaf = logits.requires_grad_()
    loss = tiercel.cross_entropy(leaf * 1.0, target, inplace=inplace)
    (first,) = torch.autograd.grad(3 * loss, leaf, retain_graph=True)
    first = first.clone()
    (second,) = torch.autograd.grad(3 * loss, leaf)
    assert torch.equal(first, second)


def test_second_derivatives():
    logits, target, _ = problem()
    leaf = logits.requires_grad_()
    loss = tiercel.cross_entropy(leaf, target)
    with pytest.raises(RuntimeError, match="^cross_entropy: the forward has made the gradient"):
        torch.autograd.grad(loss, leaf, create_graph=True)
    results = []
    for function in (
        lambda x: torch.ops.tiercel.cross_entropy(x, target, label_smoothing=0.1, z_loss=0.01),
        lambda x: exact(x, target, reduction="none", label_smoothing=0.1, z_loss=0.01),
    ):
        x = leaf.detach().double() if results else leaf.detach()
        x.requires_grad_()
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        results.append((first.double(), second.double()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_rows_that_do_not_count():
    logits, target, weight = problem()
    target[:] = -100
    leaf = logits.requires_grad_()
    for given in (None, weight):
        loss = tiercel.cross_entropy(leaf, target, given)
        (grad,) = torch.autograd.grad(loss, leaf)
        assert loss.isnan() and not grad.any()
        assert tiercel.cross_entropy(leaf, target, given, reduction="sum") == 0
    empty = tiercel.cross_entropy(logits[:0], target[:0])
    assert empty.isnan() and tiercel.cross_entropy(logits[:0], target[:0], reduction="sum") == 0
    # Whatever an ignored row holds.
    logits, target, _ = problem()
    logits[2] = torch.nan
    leaf = logits.requires_grad_()
    loss = tiercel.cross_entropy(leaf, target, label_smoothing=0.1)
    (grad,) = torch.autograd.grad(loss, leaf)
    assert loss.isfinite() and not grad[2].any() and grad.isfinite().all()


@pytest.mark.parametrize("wrong", [37, -1, 2**40])
def test_no_class(wrong):
    logits, target, weight = problem()
    target[1] = wrong
    leaf = logits.requires_grad_()
    for given in (None, weight):
        loss = tiercel.cross_entropy(leaf, target, given, reduction="none")
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        assert loss.isnan().tolist() == [False, True, False, False, False, False]
        assert grad.isnan().all(1).tolist() == loss.isnan().tolist()
        assert tiercel.cross_entropy(leaf, target, given).isnan()


def test_weight_and_scale_have_no_gradient():
    logits, target, weight = problem()
    weight, scale = weight.requires_grad_(), torch.rand(6, requires_grad=True)
    leaf = logits.requires_grad_()
    tiercel.cross_entropy(leaf, target, weight, scale=scale).backward()
    assert weight.grad is None and scale.grad is None and leaf.grad is not None


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "`reduction` must be one of 'none', 'mean', 'sum', got 'sums'",
         {"reduction": "sums"}),
        (TypeError, "`inplace` must be a bool, got int", {"inplace": 1}),
        (ValueError, r"`scale` must have shape \[1\] or \[T\] = \[6\], got \[5\]",
         {"scale": torch.ones(5)}),
        (ValueError, r"`scale` must have shape \[1\] or \[T\] = \[6\], got \[6, 1\]",
         {"scale": torch.ones(6, 1)}),
        (ValueError, "`label_smoothing` must be from 0 to 1, got 1.5", {"label_smoothing": 1.5}),
        (ValueError, "`softcap` must be a positive number or None, got 0.0", {"softcap": 0.0}),
        (ValueError, "`softcap` must be a positive number or None, got inf",
         {"softcap": float("inf")}),
        (ValueError, "`logits` must have at least 1 column, got 0",
         {"logits": torch.ones(6, 0)}),
    ],
)  # fmt: skip
def test_bad_arguments(error, text, arguments):
    logits, target, _ = problem()
    for reduction in REDUCTIONS:
        call = {"logits": logits, "target": target, "reduction": reduction} | arguments
        with pytest.raises(error, match=f"^cross_entropy: {text}"):
            tiercel.cross_entropy(**call)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_step(inplace):
    """One graph with the layer in front, for any number of rows."""
    torch._dynamo.reset()
    head = torch.nn.Linear(8, 37)

    def step(x, target):
        return tiercel.cross_entropy(head(x), target, z_loss=1e-3, inplace=inplace)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (6, 9):
        _, target, _ = problem(rows)
        x = torch.randn(rows, 8)
        grads = []
        for function in (step, compiled):
            loss = 2 * function(x, target)
            grads.append(torch.autograd.grad(loss, list(head.parameters())))
        torch.testing.assert_close(*grads)


def test_module():
    logits, target, weight = problem()
    module = tiercel.nn.CrossEntropyLoss(weight, label_smoothing=0.1, z_loss=1e-3, backend="ref")
    due = tiercel.cross_entropy(logits, target, weight, label_smoothing=0.1, z_loss=1e-3)
    assert torch.equal(module(logits, target), due)
    assert list(module.state_dict()) == ["weight"]
    assert repr(module) == "CrossEntropyLoss(label_smoothing=0.1, z_loss=0.001, backend='ref')"
    sums = tiercel.nn.CrossEntropyLoss(reduction="sum", ignore_index=5)
    half = torch.tensor([0.5])
    due = tiercel.cross_entropy(
        logits, target.where(target > 0, 5), ignore_index=5, reduction="sum"
    )
    torch.testing.assert_close(sums(logits, target.where(target > 0, 5), half), due / 2)
