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
