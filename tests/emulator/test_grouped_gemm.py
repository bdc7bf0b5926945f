# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm and its gradients (wgmma; groups' sizes on the device) on the emulator, against
float64."""

import pytest
import torch
from support.emulator import kernels, options, sm90

from tiercel.ops.moe import reference as ref

pytestmark = pytest.mark.torch

PLAIN, OF_X, OF_WEIGHT = range(3)


def random(*shape, seed, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def bounds(sizes, first=0, dtype=torch.int32):
    return (torch.tensor([0, *sizes]).cumsum(0) + first).to(dtype)


def assert_rounded(got, due):
    """One rounding to the result's type, and what float32 sums lose."""
    unit = torch.finfo(got.dtype).eps / 2
    allowed = 1.02 * unit * due.abs() + 1e-5 * (1 + due.abs().max() if due.numel() else 1)
    assert ((got.double() - due).abs() <= allowed).all()


def check(kind, sizes, rows, n, k, first=0, dtype=torch.bfloat16, index=torch.int32):
    offsets = bounds(sizes, first, index)
    x = random(rows, k, seed=1, dtype=dtype)
    grad = random(rows, n, seed=2, dtype=dtype)
    w = random(len(sizes), n, k, seed=3, dtype=dtype, scale=k**-0.5)
    if kind == PLAIN:
        (a, b), due = (x, w), ref.grouped_gemm(x.double(), w.double(), offsets)
    elif kind == OF_X:
        (a, b), due = (grad, w), ref.grouped_gemm_backward_x(grad.double(), w.double(), offsets)
    else:
        (a, b) = (grad, x)
        due = ref.grouped_gemm_backward_weight(grad.double(), x.double(), offsets)
    out = torch.full(due.shape, torch.nan, dtype=dtype)
    kernels.grouped_gemm(a, b, offsets, out, kind)
    assert_rounded(out, due)


GROUPS = [
    ([40, 0, 30], 0, 70),
    ([300, 5], 3, 400),
    ([0], 0, 9),
    ([64, 128, 1, 127, 65], 0, 385),
    ([1] * 70, 2, 75),
]


@pytest.mark.parametrize(("sizes", "first", "rows"), GROUPS)
@pytest.mark.parametrize("kind", [PLAIN, OF_X, OF_WEIGHT])
def test_groups(kind, sizes, first, rows):
    check(kind, sizes, rows, 72, 136, first)


@pytest.mark.parametrize(("n", "k"), [(8, 8), (320, 64), (24, 520)])
@pytest.mark.parametrize("kind", [PLAIN, OF_X, OF_WEIGHT])
def test_small_and_odd_sizes(kind, n, k):
    check(kind, [70, 3], 80, n, k, first=4, dtype=torch.float16, index=torch.int64)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kind", [PLAIN, OF_X, OF_WEIGHT])
def test_no_order_of_copies_and_warps_matters(kind, lazy):
    with options(lazy=lazy, seed=3):
        check(kind, [150, 0, 33], 183, 200, 328)


def test_the_most_groups():
    sizes = [1, 0, 3, 0] * 128
    check(PLAIN, sizes, 512, 8, 16)


def test_nothing_to_multiply():
    check(OF_WEIGHT, [0, 0], 0, 72, 136)
    for kind in (PLAIN, OF_X):
        check(kind, [], 70, 72, 136)
        check(kind, [0], 0, 72, 136)


def test_values_of_the_next_group_do_not_matter():
    """A step's last rows are another group's: not even their infinities come in."""
    grad, x = random(90, 72, seed=1), random(90, 136, seed=2)
    due = ref.grouped_gemm_backward_weight(grad.double(), x.double(), bounds([40]))
    grad[40:], x[40:] = torch.inf, torch.nan
    out = torch.full((1, 72, 136), torch.nan, dtype=torch.bfloat16)
    kernels.grouped_gemm(grad, x, bounds([40]), out, OF_WEIGHT)
    assert_rounded(out, due)


def test_operators():
    """Rows of x at a distance, a gradient that is one number for all."""
    x = random(60, 144, seed=1)[:, :136]
    w = random(2, 72, 136, seed=3, scale=0.1)
    offsets = bounds([20, 40])
    grad = random(1, 1, seed=4).expand(60, 72)
    assert_rounded(
        sm90("grouped_gemm")(x, w, offsets, None),
        ref.grouped_gemm(x.double(), w.double(), offsets),
    )
    assert_rounded(
        sm90("grouped_gemm_backward_x")(grad, w, offsets, None),
        ref.grouped_gemm_backward_x(grad.double(), w.double(), offsets),
    )
    assert_rounded(
        sm90("grouped_gemm_backward_weight")(grad, x, offsets, None),
        ref.grouped_gemm_backward_weight(grad.double(), x.double(), offsets),
    )
