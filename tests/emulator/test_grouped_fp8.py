# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm with float8 operands and scales of blocks on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels, options, sm90

from tiercel.ops.moe import reference as ref

pytestmark = pytest.mark.torch

# Values of `expected_rows` that choose tiles of 64 rows and of 128.
FEW, MANY = 1, 100
BOTH = pytest.mark.parametrize("expected", [FEW, MANY])


def values(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn)


def scales(*shape, seed):
    """From 2^-6 to 2, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.rand(*shape, generator=generator) * 7 - 6)


def up(size):
    return -(-size // 128)


def weights(groups, n, k):
    return values(groups, n, k, seed=2), scales(groups, up(n), up(k), seed=3)


def bounds(sizes, first=0, dtype=torch.int32):
    return (torch.tensor([0, *sizes]).cumsum(0) + first).to(dtype)


def wide(x, w, x_scale, w_scale, offsets=None, counts=None):
    """The result, and the sums of the products' magnitudes."""
    given = {"counts": counts, "x_scale": x_scale, "w_scale": w_scale}
    due = ref.grouped_gemm(x.double(), w.double(), offsets, **given)
    terms = ref.grouped_gemm(x.double().abs(), w.double().abs(), offsets, **given)
    return due, terms


def assert_close(got, due, terms):
    """One rounding to bfloat16, and what sums in float32 lose of their terms."""
    assert got.dtype == torch.bfloat16
    allowed = 1.01 * 2**-8 * due.abs() + 2**-18 * terms
    assert ((got.double() - due).abs() <= allowed).all()


def check(sizes, rows, n, k, expected, first=0, index=torch.int32):
    x, x_scale = values(rows, k, seed=1), scales(rows, up(k), seed=4)
    w, w_scale = weights(len(sizes), n, k)
    offsets = bounds(sizes, first, index)
    got = sm90("grouped_gemm_fp8")(x, w, x_scale, w_scale, offsets, expected, None)
    assert_close(got, *wide(x, w, x_scale, w_scale, offsets))


GROUPS = [
    ([40, 0, 30], 0, 70),
    ([300, 5], 3, 400),
    ([0], 0, 9),
    ([64, 128, 1, 127, 65], 0, 385),
    ([1] * 70, 2, 75),
    ([0, 0, 200, 0], 0, 200),
]


@pytest.mark.parametrize(("sizes", "first", "rows"), GROUPS)
@BOTH
def test_groups(sizes, first, rows, expected):
    check(sizes, rows, 72, 272, expected, first)


@pytest.mark.parametrize(("n", "k"), [(8, 16), (392, 128), (24, 656), (264, 144), (136, 1040)])
@BOTH
def test_small_and_odd_sizes(n, k, expected):
    check([70, 3], 80, n, k, expected, first=4, index=torch.int64)


@pytest.mark.parametrize("lazy", [False, True])
@BOTH
def test_no_order_of_copies_and_warps_matters(lazy, expected):
    with options(lazy=lazy, seed=3):
        check([150, 0, 33], 183, 200, 1424, expected)


@BOTH
def test_the_most_groups(expected):
    check([1, 0, 3, 0] * 128, 512, 8, 16, expected)


@BOTH
def test_persistent_blocks_take_several_tiles(expected):
    with options(multiprocessors=3):
        check([150, 10, 33], 193, 520, 400, expected)


def test_nothing_to_multiply():
    """Rows outside of all groups are zeros, whatever their values and scales are."""
    x, w = values(70, 144, seed=1), values(0, 72, 144, seed=2)
    nan = torch.full((70, 2), torch.nan)
    none = torch.zeros(1, dtype=torch.int32)
    got = sm90("grouped_gemm_fp8")(x, w, nan, torch.zeros(0, 1, 2), none, 0, None)
    assert got.shape == (70, 72) and not got.any()
    w, w_scale = weights(2, 72, 144)
    one = torch.tensor([5, 5, 5])
    got = sm90("grouped_gemm_fp8")(x, w, nan, w_scale, one, 0, None)
    assert not got.any()
    got = sm90("grouped_gemm_fp8")(x[:0], w, nan[:0], w_scale, one, 0, None)
    assert got.shape == (0, 72)


@BOTH
def test_another_group_does_not_matter(expected):
    """The tile of a group's last rows reads the next group's, whose values may be anything."""
    x, x_scale = values(90, 144, seed=1), scales(90, 2, seed=4)
    w, w_scale = weights(1, 72, 144)
    offsets = bounds([40])
    due = wide(x, w, x_scale, w_scale, offsets)
    x.view(torch.uint8)[40:], x_scale[40:] = 0x7F, torch.inf  # NaN
    got = sm90("grouped_gemm_fp8")(x, w, x_scale, w_scale, offsets, expected, None)
    assert_close(got, *due)


def test_special_values_stay_in_their_rows():
    x, x_scale = values(9, 272, seed=1), scales(9, 3, seed=4)
    w, w_scale = weights(1, 72, 272)
    x.view(torch.uint8)[2, 5] = 0x7F  # NaN
    x_scale[4, 1], x_scale[6] = torch.inf, 0.0
    got = sm90("grouped_gemm_fp8")(x, w, x_scale, w_scale, bounds([9]), 0, None)
    assert got[2].isnan().all() and not got[4].isfinite().any() and not got[6].any()
    assert got[[0, 1, 3, 5, 7, 8]].isfinite().all()


def test_layouts():
    """Rows at a distance, and scales in columns, as DeepGEMM has them."""
    x = values(60, 288, seed=1)[:, :272]
    x_scale = scales(3, 60, seed=4).t()
    w = values(2, 72, 288, seed=2)[:, :, :272]
    w_scale = scales(2, 1, 3, seed=3)
    offsets = bounds([20, 40])
    got = sm90("grouped_gemm_fp8")(x, w, x_scale, w_scale, offsets, 0, None)
    assert_close(got, *wide(x, w, x_scale, w_scale, offsets))


def check_masked(counts, capacity, n, k, expected, columns=False, index=torch.int32):
    groups = len(counts)
    x, x_scale = values(groups, capacity, k, seed=1), scales(groups, capacity, up(k), seed=4)
    if columns:
        x_scale = x_scale.mT.contiguous().mT
    w, w_scale = weights(groups, n, k)
    used = torch.tensor(counts).clamp(0, capacity)
    unused = torch.arange(capacity) >= used[:, None]
    due, terms = wide(x, w, x_scale, w_scale, counts=used)
    x.view(torch.uint8)[unused] = 0x7F  # NaN
    x_scale[unused] = torch.nan
    given = (x, w, x_scale, w_scale, torch.tensor(counts, dtype=index), expected, None)
    got = sm90("grouped_gemm_masked")(*given)
    assert_close(got[~unused], due[~unused], terms[~unused])
    return got[unused]


@pytest.mark.parametrize(
    ("counts", "capacity"),
    [([3, 0, 70], 70), ([1], 1), ([128, 129, 64, 0], 136), ([0, 0], 65), ([5] * 9, 40)],
)
@pytest.mark.parametrize("columns", [False, True])
@BOTH
def test_counts(counts, capacity, columns, expected):
    check_masked(counts, capacity, 136, 272, expected, columns)


@BOTH
def test_counts_that_are_none(expected):
    check_masked([-3, 2**40, 7, -(2**33)], 66, 72, 144, expected, index=torch.int64)


@BOTH
def test_the_tiles_are_chosen_by_the_capacity(expected):
    check_masked([40, 3], 48 * expected, 72, 144, 0)


def test_rows_beyond_a_count_are_not_written():
    """The memory of a result begins as what it was."""
    x, x_scale = values(2, 70, 144, seed=1), scales(2, 70, 2, seed=4)
    w, w_scale = weights(2, 72, 144)
    counts = torch.tensor([3, 66], dtype=torch.int32)
    due, terms = wide(x, w, x_scale, w_scale, counts=counts)
    unused = torch.arange(70) >= counts[:, None]
    for expected in (FEW, MANY):
        out = torch.full((2, 70, 72), 7.0, dtype=torch.bfloat16)
        kernels.grouped_gemm_fp8(x, w, counts, x_scale, w_scale, out, expected)
        assert (out[unused] == 7).all()
        assert_close(out[~unused], due[~unused], terms[~unused])


@BOTH
def test_the_short_adder_of_the_tensor_cores(expected):
    """Promoting each 128 of K keeps what its adders lose within that of 128 products."""
    x, x_scale = values(40, 2048, seed=1), scales(40, 16, seed=4)
    w, w_scale = weights(1, 72, 2048)
    offsets = bounds([40])
    due, terms = wide(x, w, x_scale, w_scale, offsets)
    with options(short_fp8_adder=True):
        got = sm90("grouped_gemm_fp8")(x, w, x_scale, w_scale, offsets, expected, None)
    assert ((got.double() - due).abs() <= 1.01 * 2**-8 * due.abs() + 2**-11 * terms).all()
