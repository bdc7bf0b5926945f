# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm with PyTorch and without a GPU."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def data(rows=20, groups=4, columns=16, k=24, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    w = (torch.randn(groups, columns, k, generator=generator) * k**-0.5).to(dtype)
    return x, w


@pytest.mark.parametrize("offsets", [[0, 3, 3, 11, 20], [2, 2, 9, 10, 15], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_by_the_definition(offsets, dtype):
    x, w = data()
    got = tiercel.grouped_gemm(x, w, torch.tensor(offsets, dtype=dtype))
    due = torch.zeros(20, 16, dtype=torch.float64)
    for row in range(20):
        for group in range(4):
            if offsets[group] <= row < offsets[group + 1]:
                due[row] = w[group].double() @ x[row].double()
    torch.testing.assert_close(got.double(), due, rtol=8e-3, atol=1e-3)


OFFSETS = ([0, 3, 3, 11, 20], [2, 2, 9, 10, 15], [0, 0, 0, 0, 0])


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)])
def test_gradients_by_the_definition(offsets, wants):
    x, w = (t.requires_grad_(wanted) for t, wanted in zip(data(), wants, strict=True))
    grad = torch.randn(20, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    tiercel.grouped_gemm(x, w, torch.tensor(offsets)).backward(grad)
    of_x = torch.zeros(20, 24, dtype=torch.float64)
    of_w = torch.zeros(4, 16, 24, dtype=torch.float64)
    for row in range(20):
        for group in range(4):
            if offsets[group] <= row < offsets[group + 1]:
                of_x[row] = grad[row].double() @ w[group].detach().double()
                of_w[group] += grad[row].double().outer(x[row].detach().double())
    for tensor, due, wanted in ((x, of_x, wants[0]), (w, of_w, wants[1])):
        if wanted:
            torch.testing.assert_close(tensor.grad.double(), due, rtol=8e-3, atol=1e-3)
        else:
            assert tensor.grad is None


def test_gradients_can_be_differentiated_again():
    x, w = (t.requires_grad_() for t in data(dtype=torch.float16))
    offsets = torch.tensor([0, 5, 9, 9, 20])
    result = tiercel.grouped_gemm(x, w, offsets)
    (of_x,) = torch.autograd.grad(result.float().square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(of_x.float().sum(), w)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    rows = torch.cat([wide[0][a:b] @ wide[1][e].T for e, (a, b) in enumerate(PAIRS)])
    (of_x,) = torch.autograd.grad(rows.square().sum(), wide[0], create_graph=True)
    (due,) = torch.autograd.grad(of_x.sum(), wide[1])
    torch.testing.assert_close(again.double(), due, rtol=1e-2, atol=1e-1)


PAIRS = ((0, 5), (5, 9), (9, 9), (9, 20))


def test_a_gradient_without_offsets_is_refused():
    x, _ = data()
    grad, none = torch.zeros(20, 16).bfloat16(), torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="`offsets` must have at least 1 element, got 0"):
        torch.ops.tiercel.grouped_gemm_backward_weight(grad, x, none)
