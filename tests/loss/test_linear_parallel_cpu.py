# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy with the vocabulary split over two processes, against the whole one."""

import pytest
import torch
from support.ranks import run_two_ranks

import tiercel

pytestmark = pytest.mark.torch

PROGRAM = """
import itertools, sys
import torch
from torch import distributed as dist
from torch.nn import functional
import tiercel
from tiercel.ops.loss import chunks

torch.set_num_threads(1)
rank, ranks = int(sys.argv[1]), 2
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=ranks)
tiercel.set_backend(name="ref")
chunks._ROW_BYTES, chunks._TILE, chunks._LEAST_ROWS, chunks._LEAST_MEMORY = 8, 4, 1000, 1
ROWS, HIDDEN, CLASSES = 21, 12, 38
own = slice(rank * CLASSES // 2, (rank + 1) * CLASSES // 2)
torch.manual_seed(0)
x, weight = torch.randn(ROWS, HIDDEN), torch.randn(CLASSES, HIDDEN) / 2
bias, scale = torch.randn(CLASSES), torch.rand(ROWS) + 0.5
target = torch.randint(CLASSES, (ROWS,))
target[3], target[8] = -100, CLASSES - 1
group = dist.group.WORLD

def split(x, weight, bias, target=target, **options):
    mine = weight[own].detach().clone().requires_grad_(weight.requires_grad)
    of_bias = None if bias is None else bias[own].detach().clone().requires_grad_()
    loss = tiercel.linear_cross_entropy(x, mine, target, of_bias, group=group, **options)
    return loss, [t for t in (x, mine, of_bias) if t is not None]

def cut(grads):
    return [grads[0], *(grad[own] for grad in grads[1:])]

for reduction, with_bias, (z_loss, softcap, scaled, ignored) in itertools.product(
    ("mean", "sum", "none"),
    (False, True),
    (
        (0.0, None, False, -100),
        (1e-2, 4.0, True, -100),
        (1e-2, None, False, 5),
        (0.0, 4.0, True, 30),
    ),
):
    options = {"reduction": reduction, "z_loss": z_loss, "softcap": softcap}
    options |= {"scale": scale if scaled else None, "ignore_index": ignored}
    given = torch.where(target == -100, ignored, target)
    whole = [t.clone().requires_grad_() for t in ((x, weight, bias) if with_bias else (x, weight))]
    due = tiercel.ref.linear_cross_entropy(
        whole[0], whole[1], given, whole[2] if with_bias else None, **options
    )
    upstream = torch.linspace(0.5, 2, due.numel()).view(due.shape)
    due_grads = cut(torch.autograd.grad(due, whole, upstream))
    loss, leaves = split(x.clone().requires_grad_(), whole[1], bias if with_bias else None,
                         given, **options)
    torch.testing.assert_close(loss, due, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(loss, leaves, upstream)
    torch.testing.assert_close(list(grads), due_grads, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        plain, _ = split(x, weight, bias if with_bias else None, given, **options)
    torch.testing.assert_close(plain, loss.detach())

mine = weight[own]
module = tiercel.nn.LinearCrossEntropy(z_loss=1e-2, group=group)
due = tiercel.ref.linear_cross_entropy(x, weight, target, z_loss=1e-2)
torch.testing.assert_close(module(x, mine, target), due, rtol=1e-5, atol=1e-5)

# Sums in bfloat16, and a target that is no class.
halves = [t.bfloat16().requires_grad_() for t in (x, weight)]
due = torch.autograd.grad(tiercel.linear_cross_entropy(*halves, target), halves)
loss, leaves = split(*halves, None)
for grad, exact in zip(torch.autograd.grad(loss, leaves), cut(due)):
    assert (grad - exact).float().norm() <= 0.01 * exact.float().norm()
wrong = target.clone()
wrong[1] = CLASSES
loss, leaves = split(x.clone().requires_grad_(), weight, None, wrong, reduction="none")
assert loss.isnan().nonzero().tolist() == [[1]]
(grad,) = torch.autograd.grad(loss.sum(), leaves[:1])
assert grad.isnan().any(1).nonzero().tolist() == [[1]]
empty, _ = split(x[:0], weight, None, target[:0])
assert empty.isnan()
dist.destroy_process_group()
"""


def test_two_ranks(tmp_path):
    run_two_ranks(PROGRAM, tmp_path / "meeting")


@pytest.mark.parametrize("option", [{"label_smoothing": 0.1}, {"class_weight": torch.ones(6)}])
def test_what_a_group_does_not_have(option):
    x, weight, target = torch.randn(4, 8), torch.randn(6, 8), torch.zeros(4, dtype=torch.long)
    (name,) = option
    with pytest.raises(NotImplementedError, match=f"^linear_cross_entropy: `{name}` is not"):
        tiercel.linear_cross_entropy(x, weight, target, group=object(), **option)
    with pytest.raises(ValueError, match="^linear_cross_entropy: `target` must have shape"):
        tiercel.linear_cross_entropy(x, weight, target[:3], group=object(), **option)
