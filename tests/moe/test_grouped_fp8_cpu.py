# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm with float8 operands and scales of blocks, with PyTorch and without a GPU."""

import pytest
import torch

import tiercel
from tiercel.core import index_checks
from tiercel.core.op import ops
from tiercel.core.spec import Call

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def data(rows=20, groups=4, columns=136, k=272):
    """Rows and matrices with their scales, and what they stand for."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn)
    w = torch.randn(groups, columns, k, generator=generator).to(torch.float8_e4m3fn)
    x_scale = torch.rand(rows, -(-k // 128), generator=generator) + 0.1
    w_scale = torch.rand(groups, -(-columns // 128), -(-k // 128), generator=generator) + 0.1
    wide_x, wide_w = x.double(), w.double()
    for column in range(k):
        wide_x[:, column] *= x_scale[:, column // 128]
        wide_w[:, :, column] *= w_scale[:, torch.arange(columns) // 128, column // 128]
    return (x, w, x_scale, w_scale), wide_x, wide_w


@pytest.mark.parametrize("offsets", [[0, 3, 3, 11, 20], [2, 2, 9, 10, 15], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_by_the_definition(offsets, dtype):
    (x, w, x_scale, w_scale), wide_x, wide_w = data()
    offsets = torch.tensor(offsets, dtype=dtype)
    got = tiercel.grouped_gemm(x, w, offsets, x_scale=x_scale, w_scale=w_scale)
    due = torch.zeros(20, 136, dtype=torch.float64)
    for row in range(20):
        for group in range(4):
            if offsets[group] <= row < offsets[group + 1]:
                due[row] = wide_w[group] @ wide_x[row]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), due, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [9, -1, 5, 2**31 - 1]])
@pytest.mark.parametrize("expected_rows", [0, 7])
def test_counts_by_the_definition(counts, expected_rows):
    (x, w, x_scale, w_scale), wide_x, wide_w = data()
    got = tiercel.grouped_gemm(
        x.view(4, 5, -1),
        w,
        None,
        counts=torch.tensor(counts),
        x_scale=x_scale.view(4, 5, -1),
        w_scale=w_scale,
        expected_rows=expected_rows,
    )
    assert got.shape == (4, 5, 136)
    for group, count in enumerate(counts):
        used = min(max(count, 0), 5)
        due = wide_x.view(4, 5, -1)[group, :used] @ wide_w[group].T
        torch.testing.assert_close(got[group, :used].double(), due, rtol=2**-8, atol=1e-4)


def test_both_layouts_are_one_function():
    (x, w, x_scale, w_scale), *_ = data()
    offsets = torch.tensor([0, 5, 10, 15, 20])
    got = tiercel.grouped_gemm(x, w, offsets, x_scale=x_scale, w_scale=w_scale)
    of_each = {"counts": torch.full((4,), 5), "x_scale": x_scale.view(4, 5, -1)}
    masked = tiercel.grouped_gemm(x.view(4, 5, -1), w, None, **of_each, w_scale=w_scale)
    assert torch.equal(masked.view(20, -1), got)


def test_quantised_rows():
    """fp8_quantize makes the scales that it takes."""
    x, w = torch.randn(20, 256).bfloat16(), torch.randn(2, 128, 256).bfloat16() / 16
    rows, x_scale = tiercel.fp8_quantize(x, "1x128")
    matrices, w_scale = tiercel.fp8_quantize(w.view(-1, 256), "128x128")
    got = tiercel.grouped_gemm(
        rows,
        matrices.view(2, 128, 256),
        torch.tensor([0, 8, 20]),
        x_scale=x_scale,
        w_scale=w_scale.view(2, 1, 2),
    )
    due = tiercel.grouped_gemm(x, w, torch.tensor([0, 8, 20]))
    assert (got - due).float().square().mean() < (0.06 * due.float()).square().mean()


WRONG = [
    ({"counts": torch.zeros(4)}, ValueError, "`offsets` must be None where `counts` is given"),
    ({"w_scale": None}, TypeError, "`w_scale` must be a torch.Tensor, got NoneType"),
    ({"x_scale": None}, TypeError, "`x_scale` must be a torch.Tensor, got NoneType"),
    ({"x_scale": torch.ones(20, 2)}, ValueError, r"`x_scale` must have shape .* = \[20, 3\], got"),
    ({"w_scale": torch.ones(4, 2)}, ValueError, r"`w_scale` must have shape .* = \[4, 2, 3\], got"),
    (
        {"w_scale": torch.ones(4, 1, 3)},
        ValueError,
        r"`w_scale` must have shape .* = \[4, 2, 3\], got \[4, 1, 3\]",
    ),
    ({"expected_rows": -1}, ValueError, "`expected_rows` must not be negative, got -1"),
    ({"x": torch.zeros(20, 272).bfloat16()}, TypeError, "`x` must have dtype float8_e4m3fn, got"),
    ({"offsets": None}, TypeError, "`offsets` must be a torch.Tensor, got NoneType"),
]


@pytest.mark.parametrize(("changes", "error", "text"), WRONG)
def test_wrong_arguments(changes, error, text):
    (x, w, x_scale, w_scale), *_ = data()
    given = {"x": x, "w": w, "x_scale": x_scale, "w_scale": w_scale}
    given["offsets"] = torch.tensor([0, 3, 3, 11, 20])
    with pytest.raises(error, match=f"^grouped_gemm: {text}"):
        tiercel.grouped_gemm(**given | changes)


def test_indices_have_rules():
    (x, w, *_), *_ = data()
    x = x.view(4, 5, -1)
    counts = Call(x=x, w=w, counts=torch.tensor([0, 5, 6, 1]))
    with pytest.raises(ValueError, match=r"`counts` must hold numbers from 0 to 5, got 6 at \[2\]"):
        index_checks.check("grouped_gemm", ops["grouped_gemm_masked"]._indices(counts))
    offsets = Call(x=x[0], w=w, offsets=torch.tensor([0, 3, 2, 5, 5]))
    with pytest.raises(ValueError, match="`offsets` must hold numbers that do not decrease"):
        index_checks.check("grouped_gemm", ops["grouped_gemm_fp8"]._indices(offsets))


def test_counts_need_scales():
    x, w = torch.zeros(2, 5, 16).bfloat16(), torch.zeros(2, 8, 16).bfloat16()
    with pytest.raises(TypeError, match="`x_scale` must be a torch.Tensor, got NoneType"):
        tiercel.grouped_gemm(x, w, None, counts=torch.zeros(2, dtype=torch.int32))


def test_there_is_no_gradient():
    (x, w, x_scale, w_scale), *_ = data()
    offsets = torch.tensor([0, 5, 10, 15, 20])
    with pytest.raises(RuntimeError, match="^grouped_gemm: there is no derivative"):
        tiercel.grouped_gemm(x, w, offsets, x_scale=x_scale.requires_grad_(), w_scale=w_scale)
