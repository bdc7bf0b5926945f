# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm on an H100 or H200, against float64."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]


def check(rows, sizes, columns, k, dtype=torch.bfloat16, first=0):
    x = torch.randn(rows, k, device="cuda").to(dtype)
    w = (torch.randn(len(sizes), columns, k, device="cuda") * k**-0.5).to(dtype)
    offsets = torch.tensor([0, *sizes], dtype=torch.int32, device="cuda").cumsum(0).int() + first
    got = tiercel.grouped_gemm(x, w, offsets)
    due = tiercel.ref.grouped_gemm(x.double(), w.double(), offsets)
    half = torch.finfo(dtype).eps / 2
    assert ((got.double() - due).abs() <= 1.02 * half * due.abs() + 5e-5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "sizes", "first"),
    [(1, [1], 0), (300, [100, 0, 200], 0), (900, [1, 500, 3], 77), (4096, [64] * 64, 0)],
)
def test_sizes(rows, sizes, first, dtype):
    check(rows, sizes, 264, 520, dtype, first)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "sizes", "first"),
    [(1, [1], 0), (300, [100, 0, 200], 0), (900, [1, 500, 3], 77), (4096, [64] * 64, 0)],
)
def test_gradients(rows, sizes, first, dtype):
    x = torch.randn(rows, 520, device="cuda").to(dtype).requires_grad_()
    w = (torch.randn(len(sizes), 264, 520, device="cuda") * 520**-0.5).to(dtype).requires_grad_()
    offsets = torch.tensor([0, *sizes], dtype=torch.int32, device="cuda").cumsum(0).int() + first
    grad = torch.randn(rows, 264, device="cuda").to(dtype)
    tiercel.grouped_gemm(x, w, offsets).backward(grad)
    half = torch.finfo(dtype).eps / 2
    of = tiercel.ref.moe
    wide = [t.detach().double() for t in (x, w, grad)]
    for got, due in (
        (x.grad, of.grouped_gemm_backward_x(wide[2], wide[1], offsets)),
        (w.grad, of.grouped_gemm_backward_weight(wide[2], wide[0], offsets)),
    ):
        allowed = 1.02 * half * due.abs() + 1e-5 * (1 + due.abs().max())
        assert ((got.double() - due).abs() <= allowed).all()


def test_nothing_to_multiply():
    offsets = torch.zeros(3, dtype=torch.int32, device="cuda")
    x = torch.zeros(0, 64, device="cuda").bfloat16().requires_grad_()
    w = torch.ones(2, 32, 64, device="cuda").bfloat16().requires_grad_()
    tiercel.grouped_gemm(x, w, offsets).sum().backward()
    assert x.grad.shape == (0, 64) and not w.grad.any()
    none = torch.ones(70, 64, device="cuda").bfloat16()
    result = tiercel.grouped_gemm(none, w.detach()[:0], offsets[:1])
    assert result.shape == (70, 32) and not result.any()


def test_captured_with_gradients():
    x = torch.randn(500, 256, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(3, 128, 256, device="cuda").bfloat16().requires_grad_()
    offsets = torch.tensor([0, 100, 100, 500], device="cuda")
    grad = torch.randn(500, 128, device="cuda").bfloat16()

    def step():
        return torch.autograd.grad(tiercel.grouped_gemm(x, w, offsets), (x, w), grad)

    due = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for result in results:
        result.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, due, strict=True))


def test_captured():
    x = torch.randn(500, 256, device="cuda").bfloat16()
    w = torch.randn(3, 128, 256, device="cuda").bfloat16()
    offsets = torch.tensor([0, 100, 100, 500], device="cuda")
    due = tiercel.grouped_gemm(x, w, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = tiercel.grouped_gemm(x, w, offsets)
    result.zero_()
    graph.replay()
    assert torch.equal(result, due)
