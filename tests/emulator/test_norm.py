# SPDX-License-Identifier: Apache-2.0
"""The norms' kernels, run by the emulator, against the reference in float64.

The shapes are small, and chosen to reach each kernel that a plan can choose.
"""

import os

import pytest
import torch
from support.emulator import kernels, options, sm90
from support.near import BF16, F16, F32, FLOATS, RELATIVE, ROWS, check, close, normal, reference


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ROWS)
def test_norm(shape, dtype):
    x, residual = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    weight, bias = normal(shape[1], dtype=dtype), normal(shape[1], dtype=dtype)
    for name in ("rms_norm", "layer_norm"):
        check(name, x, None, None, 1e-5, None, scale=8.0)
        if shape[1] > 1:
            check(f"add_{name}", x, residual, weight, bias, 1e-5, None, scale=24.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 1000), (2, 16_400), (1600, 1024)])
def test_norm_of_plain_calls(shape, dtype):
    """What most calls are, without one parameter or the other: a row a warp, a block, a cluster."""
    rows, columns = shape
    x = normal(rows, columns // (2 if dtype == F32 and rows > 1000 else 1), dtype=dtype)
    weight, bias = normal(x.shape[1], dtype=dtype), normal(x.shape[1], dtype=dtype)
    check("rms_norm", x, weight, None, 1e-5, None, scale=24.0)
    check("layer_norm", x, weight, None, 1e-5, None, scale=24.0)
    if rows < 1000:
        check("layer_norm", x, weight, bias, 1e-5, None, scale=24.0)
        check("layer_norm", x, None, bias, 1e-5, None, scale=24.0)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("columns", "all_rows"),
    [(504, (2, 9)), (1000, (2, 9, 14, 20, 30, 40, 60)), (4104, (1, 4, 5, 7, 9, 14))],
)
def test_norm_by_vectors_a_multiprocessor(columns, all_rows, dtype):
    """Each shape that plain calls have (tests/norm/test_norm_plan.py)."""
    weight, bias = normal(columns, dtype=dtype), normal(columns, dtype=dtype)
    with options(multiprocessors=2):
        for rows in all_rows:
            x, residual = normal(rows, columns, dtype=dtype), normal(rows, columns, dtype=dtype)
            check("rms_norm", x, weight, None, 1e-5, None, scale=24.0)
            check("layer_norm", x, weight, bias, 1e-5, None, scale=24.0)
            check("add_rms_norm", x, residual, weight, None, 1e-5, None, scale=24.0)


@pytest.mark.parametrize("columns", [252, 508])
def test_many_rows_of_float32_have_a_warp_each(columns):
    x, weight, bias = normal(60, columns), normal(columns), normal(columns)
    with options(multiprocessors=2):
        check("rms_norm", x, weight, None, 1e-5, None, scale=24.0)
        check("layer_norm", x, weight, bias, 1e-5, None, scale=24.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [60, 64, 128, 256])
def test_short_rows_two_at_a_time(columns, dtype):
    """A lane has two rows, which are many rows apart."""
    x, residual = normal(70, columns, dtype=dtype), normal(70, columns, dtype=dtype)
    weight, bias = normal(columns, dtype=dtype), normal(columns, dtype=dtype)
    for name in ("rms_norm", "layer_norm"):
        check(f"add_{name}", x, residual, weight, bias, 1e-5, None, scale=24.0)
    check("rms_norm", x, weight, None, 1e-5, None, scale=24.0)
    check("layer_norm", x, weight, bias, 1e-5, None, scale=24.0)


@pytest.mark.parametrize("columns", [1000, 16_400, 33_000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_norm_far_from_zero(columns, dtype):
    """One pass, and yet the variance does not cancel: not of a row far from zero, nor where the
    elements that threads measure from are far from the others."""
    x = normal(3, columns, dtype=dtype)
    x[1] += 1000.0 if dtype == F32 else 8.0
    x[2, ::8] = 100.0
    result = sm90("layer_norm")(x, None, None, 1e-5, None)
    exact = reference("layer_norm", x, None, None, 1e-5, None)
    torch.testing.assert_close(
        result.double(), exact.double(), rtol=2 * torch.finfo(dtype).eps, atol=2e-4
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape",
    [
        *((5, 33), (700, 64), (3, 1000), (900, 768), (70, 4096), (600, 4096), (2, 9001)),
        *((3, 16_400), (70, 17_000), (256, 9000)),
    ],
)
def test_norm_backward(shape, dtype):
    """Of 600 rows blocks have whole tiles, and share what is left; of 70 long ones clusters have
    several, one after the other. 128 blocks divide 256 long ones among them, two by two."""
    check_norm_backward(shape, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((9, 17_000), F32), ((9, 16_384), F16), ((800, 768), BF16)]
    + [((803, columns), F16) for columns in (512, 1000)]
    + [(shape, BF16) for shape in ((9, 17_000), (515, 3072), (8192, 128), (21, 9000))],
)
def test_norm_backward_on_few_multiprocessors(shape, dtype):
    """A cluster has more tiles than there is room for sums of; the others are many rows here, where
    a row has one warp many more than that has stages."""
    with options(multiprocessors=8):
        check_norm_backward(shape, dtype)


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(n, BF16) for n in (512, 1024, 1536, 2048, 5120, 8192, 16_384, 32_768, 65_536)]
    + [(n, F16) for n in (768, 2560, 4096)]
    + [(1024, F32), (16_384, F32)],
)
def test_norm_backward_of_many_lengths(columns, dtype):
    """Of most an H100 has another shape; of 39 rows the last tile of some is not whole."""
    with options(multiprocessors=2):
        for rows in (39, 32):
            check_norm_backward((rows, columns), dtype)


@pytest.mark.parametrize("multiprocessors", [2, 132])
@pytest.mark.parametrize("columns", [1024, 4096, 16_384])
def test_norm_backward_knows_the_memory(columns, multiprocessors):
    """Where launches above take place, too: they have an H100's shapes."""
    x, weight = normal(1000, columns, dtype=BF16), normal(columns, dtype=BF16)
    arguments = (x, weight, x, None, x, None, None, None, 1e-5)
    with options(multiprocessors=multiprocessors):
        got, h100, h200 = (
            kernels.rms_norm_backward_plan(*arguments, *device)
            for device in ((), (multiprocessors, 3352), (multiprocessors, 4916))
        )
    assert h100 != h200
    assert got == (h100 if os.environ["TIERCEL_EMULATOR_GPU"] == "H100" else h200)


@pytest.mark.parametrize("columns", [320, 520, 768, 1000, 4096])
def test_norm_backward_of_any_weight(columns):
    """In float32, none, and one that is not on 16 bytes."""
    wide = normal(columns, dtype=F32)
    with options(multiprocessors=2):
        check_norm_backward((39, columns), BF16, wide)
        check_norm_backward((39, columns), BF16, None)
        check_norm_backward((39, columns), BF16, normal(columns + 1, dtype=BF16)[1:])
        check_norm_backward((39, columns), F16, normal(columns + 1, dtype=F32)[1:])


@pytest.mark.parametrize("columns", [96, 100, 768, 4096])
def test_sums_that_were_read_are_discarded(columns):
    """Whole lines of them, if the workspace begins at one; after that they read as NaN."""
    x, grad = normal(40, columns, dtype=BF16), normal(40, columns, dtype=BF16)
    weight, grad_x = normal(columns, dtype=BF16), torch.empty_like(x)
    sums = [torch.empty_like(weight) for _ in range(2)]
    arguments = (x, weight, grad, None, grad_x)
    due = reference("layer_norm_backward", x, weight, grad, None, True, True, BF16, 1e-5, None)
    with options(multiprocessors=2):
        parts = kernels.layer_norm_backward_plan(*arguments, None, None, None, 1e-5)["parts"]
        room = torch.zeros(2 * parts * columns + 32 + 4)
        begin = -room.data_ptr() % 128 // 4
        for skipped in (0, 4):
            workspace = room[begin + skipped :][: 2 * parts * columns].view(2, parts, columns)
            kernels.layer_norm_backward(*arguments, *sums, workspace, 1e-5)
            discarded = columns % 32 == 0 and skipped == 0
            assert workspace.isnan().all() if discarded else workspace.isfinite().all()
            close((grad_x, *sums), due, scale=50.0)


def check_norm_backward(shape, dtype, *other_weight):
    x, grad = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    weight = other_weight[0] if other_weight else normal(shape[1], dtype=dtype)
    wanted, parameter = weight is not None, dtype if weight is None else weight.dtype
    for name in ("rms_norm", "layer_norm"):
        arguments = (x, weight, grad, None, wanted, name == "layer_norm", parameter, 1e-5, None)
        result = sm90(f"{name}_backward")(*arguments)
        exact = reference(f"{name}_backward", *arguments)
        assert all(one.isfinite().all() for one in result if one is not None)
        close(result[:1], exact[:1], scale=24.0)
        close(result[1:], exact[1:], scale=8.0 * shape[0] ** 0.5)


@pytest.mark.parametrize("columns", [1000, 4096, 20_000])
def test_layer_norm_backward_far_from_zero(columns):
    """Distances are measured from one of the row's own values, wherever the mean is; of the three
    that are looked at one is an outlier."""
    x, grad, weight = normal(3, columns), normal(3, columns), normal(columns)
    x += 1000.0
    x[:, 0] = torch.tensor([-1000.0, 0.0, 1.0e4])
    arguments = (x, weight, grad, None, True, True, F32, 1e-5, None)
    result = sm90("layer_norm_backward")(*arguments)
    exact = reference("layer_norm_backward", *arguments)
    for one, due in zip(result, exact, strict=True):
        assert (one.double() - due).abs().max() <= 2e-4 * due.abs().max()


@pytest.mark.parametrize("dtype", FLOATS)
def test_norm_backward_of_one_column(dtype):
    """What is due is a small difference, or none, of terms of this size."""
    x, grad = normal(131, 1, dtype=dtype), normal(131, 1, dtype=dtype)
    weight = normal(1, dtype=dtype)
    for name in ("rms_norm", "layer_norm"):
        arguments = (x, weight, grad, None, True, name == "layer_norm", dtype, 1e-5, None)
        result = sm90(f"{name}_backward")(*arguments)
        exact = reference(f"{name}_backward", *arguments)
        square = x.double().square() if name == "rms_norm" else 0.0 * x.double()
        terms = (square + 1e-5).rsqrt() * (grad.double() * weight.double()).abs()
        allowed = RELATIVE[dtype] * exact[0].abs() + 1e-6 * terms + 2.0**-24
        assert ((result[0].double() - exact[0]).abs() <= allowed).all()
        close(result[1:], exact[1:], scale=30.0)
