# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy with entropies on an H100 or H200, against float64."""

import pytest
import torch
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]


def problem(rows, hidden, classes, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, hidden, device="cuda", generator=generator).to(dtype)
    weight = torch.randn(classes, hidden, device="cuda", generator=generator) * hidden**-0.5
    target = torch.randint(classes, (rows,), device="cuda", generator=generator)
    target[1::7] = -100
    return x, 3 * weight.to(dtype), target


def exact(x, weight, target):
    log_p = functional.linear(x, weight).log_softmax(-1)
    loss = functional.nll_loss(log_p, target, reduction="none")
    return loss, -(log_p.exp() * log_p).sum(-1) * (target != -100)


def step(function, x, weight, target, both, dtype=None):
    """Both results, and the gradients of a sum of them or of the entropies alone."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, weight)]
    loss, entropy = function(*leaves, target)
    by = torch.linspace(-1, 2, len(target), device="cuda").to(loss.dtype)
    total = (entropy * by).sum() + (loss.sum() if both else 0)
    return (loss.detach(), entropy.detach(), *torch.autograd.grad(total, leaves))


def ours(x, weight, target):
    return tiercel.linear_cross_entropy(x, weight, target, reduction="none", return_entropy=True)


def of_torch(x, weight, target):
    return exact(x.float(), weight.float(), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    ("rows", "hidden", "classes"), [(300, 64, 1000), (128, 128, 5003), (513, 256, 32000)]
)
def test_entropies_and_gradients(rows, hidden, classes, both, dtype):
    x, weight, target = problem(rows, hidden, classes, dtype)
    due = step(exact, x, weight, target, both, torch.float64)
    found = step(ours, x, weight, target, both)
    unit = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-3  # tensor cores' float32
    for got, exactly in zip(found, due, strict=True):
        distance = (got.double() - exactly).norm() / exactly.norm()
        # In 16 bits logits are rounded before the terms of an entropy cancel.
        assert distance <= 3 * unit, distance


def test_a_large_vocabulary():
    x, weight, target = problem(2000, 512, 128256)
    loss, entropy = ours(x, weight, target)
    due = exact(x.double()[:64], weight.double(), target[:64])
    torch.testing.assert_close(loss[:64].double(), due[0], rtol=2**-8, atol=2**-5)
    torch.testing.assert_close(entropy[:64].double(), due[1], rtol=2**-8, atol=2**-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sums_have_the_same_gradients_as_without(reduction):
    x, weight, target = problem(700, 128, 5003)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    plain = tiercel.linear_cross_entropy(*leaves, target, reduction=reduction)
    loss, entropy = tiercel.linear_cross_entropy(
        *leaves, target, reduction=reduction, return_entropy=True
    )
    assert torch.equal(plain, loss) and not entropy.requires_grad
    for one, other in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(plain, leaves), strict=True
    ):
        assert torch.equal(one, other)


def test_a_graph():
    x, weight, target = problem(256, 128, 5003)
    step(ours, x, weight, target, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(ours, x, weight, target, True)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for got, due in zip(found, step(ours, x, weight, target, True), strict=True):
        torch.testing.assert_close(got, due, rtol=1e-3, atol=1e-3)


def test_memory():
    """No more than without: nothing of the size of the logits is added."""
    x, weight, target = problem(16384, 1024, 32000)
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    def peak(**options):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found = tiercel.linear_cross_entropy(*leaves, target, **options)
        (found[0] if isinstance(found, tuple) else found).backward()
        leaves[0].grad = leaves[1].grad = None
        return torch.cuda.max_memory_allocated()

    peak()
    assert peak(return_entropy=True) <= peak() + (1 << 20)
