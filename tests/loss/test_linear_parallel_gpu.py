# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy with the vocabulary split over two GPUs, against float64."""

import pytest
from support.ranks import ON_TWO_GPUS, run_two_ranks

pytestmark = [pytest.mark.torch, *ON_TWO_GPUS]

PROGRAM = """
import sys
import torch
from torch import distributed as dist
import tiercel

rank, ranks = int(sys.argv[1]), 2
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=ranks)
ROWS, HIDDEN, CLASSES = 700, 512, 8192
own = slice(rank * CLASSES // ranks, (rank + 1) * CLASSES // ranks)
torch.manual_seed(0)
x = torch.randn(ROWS, HIDDEN).cuda().bfloat16().requires_grad_()
weight = (torch.randn(CLASSES, HIDDEN) / 16).cuda().bfloat16()
target = torch.randint(CLASSES, (ROWS,)).cuda()
target[3] = -100
exact = [t.detach().double().requires_grad_() for t in (x, weight)]
due = tiercel.ref.linear_cross_entropy(*exact, target, z_loss=1e-3)
due_x, due_weight = torch.autograd.grad(due, exact)

mine = weight[own].clone().requires_grad_()
loss = tiercel.linear_cross_entropy(x, mine, target, z_loss=1e-3, group=dist.group.WORLD)
torch.testing.assert_close(loss.double(), due, rtol=1e-4, atol=1e-4)
for grad, expected in zip(torch.autograd.grad(loss, (x, mine)), (due_x, due_weight[own])):
    error = (grad.double() - expected).norm() / expected.norm()
    assert error <= 0.01, error.item()
dist.destroy_process_group()
"""


def test_two_gpus(tmp_path):
    run_two_ranks(PROGRAM, tmp_path / "meeting")
