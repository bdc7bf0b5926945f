# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm with float8 operands on an H100 or H200, against float64."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

FEW, MANY = 1, 100  # expected rows: tiles of 64 rows and of 128
BOTH = pytest.mark.parametrize("expected", [FEW, MANY])


def operands(rows, groups, n, k, seed=0):
    """Rows, matrices and their scales."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape):
        drawn = torch.randn(*shape, device="cuda", generator=generator)
        return drawn.to(torch.float8_e4m3fn)

    def scales(*shape):
        return torch.rand(*shape, device="cuda", generator=generator) + 0.1

    across, down = -(-k // 128), -(-n // 128)
    return (
        normal(*rows, k),
        normal(groups, n, k),
        scales(*rows, across),
        scales(groups, down, across),
    )


def truth(x, w, x_scale, w_scale, offsets=None, counts=None):
    """In float64: the result, and the sums of the products' magnitudes."""
    given = {"counts": counts, "x_scale": x_scale, "w_scale": w_scale}
    return [
        tiercel.ref.grouped_gemm(*(change(t.double()) for t in (x, w)), offsets, **given)
        for change in (torch.Tensor.clone, torch.Tensor.abs)
    ]


def assert_close(got, due, terms):
    """One rounding; and the tensor cores' adders, which keep 13 bits."""
    assert got.dtype == torch.bfloat16
    assert ((got.double() - due).abs() <= 1.01 * 2**-8 * due.abs() + 2**-11 * terms).all()


def bounds(sizes, first=0):
    return torch.tensor([0, *sizes], device="cuda").cumsum(0).int() + first


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("rows", "sizes", "first"),
    [(1, [1], 0), (300, [100, 0, 200], 0), (900, [1, 500, 3], 77), (1024, [16] * 64, 0)],
)
@BOTH
def test_groups(rows, sizes, first, expected):
    x, w, x_scale, w_scale = operands((rows,), len(sizes), 264, 656)
    offsets = bounds(sizes, first)
    scales = {"x_scale": x_scale, "w_scale": w_scale, "expected_rows": expected}
    got = tiercel.grouped_gemm(x, w, offsets, **scales)
    assert_close(got, *truth(x, w, x_scale, w_scale, offsets))


@pytest.mark.parametrize("k", [16, 4096, 7168])
@BOTH
def test_long_sums(k, expected):
    x, w, x_scale, w_scale = operands((700,), 5, 520, k)
    offsets = bounds([0, 300, 130, 1, 269])
    scales = {"x_scale": x_scale, "w_scale": w_scale, "expected_rows": expected}
    got = tiercel.grouped_gemm(x, w, offsets, **scales)
    assert_close(got, *truth(x, w, x_scale, w_scale, offsets))


@pytest.mark.sanitize
@pytest.mark.parametrize("columns", [False, True])
@BOTH
def test_counts(columns, expected):
    x, w, x_scale, w_scale = operands((6, 200), 6, 264, 656)
    counts = torch.tensor([200, 0, 1, 129, 64, 65], device="cuda", dtype=torch.int32)
    used = torch.arange(200, device="cuda") < counts[:, None]
    due, terms = truth(x, w, x_scale, w_scale, counts=counts)
    x.view(torch.uint8)[~used] = 0x7F  # NaN
    if columns:
        x_scale = x_scale.mT.contiguous().mT
    scales = {"x_scale": x_scale, "w_scale": w_scale, "expected_rows": expected}
    got = tiercel.grouped_gemm(x, w, None, counts=counts, **scales)
    assert_close(got[used], due[used], terms[used])


def test_rows_and_groups_do_not_depend_on_others():
    """A group alone has the bits that it has among others."""
    x, w, x_scale, w_scale = operands((1000,), 3, 264, 2064)
    scales = {"x_scale": x_scale, "w_scale": w_scale}
    whole = tiercel.grouped_gemm(x, w, bounds([300, 500, 200]), **scales)
    alone = tiercel.grouped_gemm(
        x[310:400], w[1:2], bounds([90]), x_scale=x_scale[310:400], w_scale=w_scale[1:2]
    )
    assert torch.equal(whole[310:400], alone)


@BOTH
def test_captured(expected):
    """A graph's next replay has other sizes, and other counts."""
    x, w, x_scale, w_scale = operands((4, 160), 4, 256, 512)
    flat = x.flatten(0, 1), w
    counts = torch.tensor([3, 160, 0, 70], device="cuda", dtype=torch.int32)
    offsets = bounds([100, 0, 500, 40])
    scales = {"w_scale": w_scale, "expected_rows": expected}

    def step():
        rows = tiercel.grouped_gemm(*flat, offsets, x_scale=x_scale.flatten(0, 1), **scales)
        return rows, tiercel.grouped_gemm(x, w, None, counts=counts, x_scale=x_scale, **scales)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for numbers, sizes in (([3, 160, 0, 70], [100, 0, 500, 40]), ([0, 9, 90, 1], [1, 2, 0, 9])):
        counts.copy_(torch.tensor(numbers))
        offsets.copy_(bounds(sizes))
        due = step()
        for result in results:
            result.fill_(7)
        graph.replay()
        used = torch.arange(160, device="cuda") < counts[:, None]
        assert torch.equal(results[0], due[0])
        assert torch.equal(results[1][used], due[1][used])
        assert (results[1][~used] == 7).all()
