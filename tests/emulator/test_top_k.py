# SPDX-License-Identifier: Apache-2.0
"""top_k_indices on the emulator: exactly the reference's."""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running

from tiercel import ref

pytestmark = pytest.mark.torch


def check(logits, k, lengths=None, multiprocessors=0, **more):
    out = torch.full((len(logits), k), -7, dtype=torch.int32)
    with running(multiprocessors=multiprocessors, **more):
        kernels.top_k_indices(logits, lengths, out)
    assert torch.equal(out, ref.top_k_indices(logits, k, lengths))


def draw(rows, columns, seed=3):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("columns", [1, 5, 31, 512, 1000, 5000])
@pytest.mark.parametrize("k", [1, 40, 600])
def test_sizes(columns, k):
    check(draw(2, columns), k)


@pytest.mark.parametrize("multiprocessors", [1, 3, 16, 132])
def test_clusters(multiprocessors):
    check(draw(2, 35_001), 700, multiprocessors=multiprocessors)


def test_parts_that_are_not_kept():
    check(draw(1, 190_001), 100)


@pytest.mark.parametrize("steps", [0.0, 1.0, 4.0])
def test_ties(steps):
    logits = draw(2, 9000).mul(steps).round()
    for k in (1, 100, 8999):
        check(logits, k)


def test_digits():
    """Keys that differ in the last bits alone, and in each digit."""
    bits = torch.arange(6000, dtype=torch.int32)[torch.randperm(6000)]
    near = (bits + 0x3F800000).view(torch.float32)
    far = (bits * 178_000).view(torch.float32).nan_to_num(1.0)
    least = bits.view(torch.float32)  # all of them have the first digit of 0
    most = (bits + 0x60000000).view(torch.float32)
    logits = torch.stack([near, -near, far, -far, least, -least, most, -most])
    for k in (1, 33, 2048):
        check(logits, k)


def test_values_that_are_no_numbers():
    logits = draw(4, 700)
    logits[0, 5:200] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 100:300] = torch.nan
    logits[3, :50], logits[3, 50:90] = torch.inf, -torch.nan
    logits[3, 90:300:2], logits[3, 91:300:2] = 0.0, -0.0
    for k in (1, 100, 250, 600, 800):
        check(logits, k)


def test_lengths():
    lengths = torch.tensor([0, 1, 63, 700, 4000, 5000, 9999, -4], dtype=torch.int32)
    check(draw(8, 5000), 64, lengths)
    check(draw(8, 5000), 64, torch.stack([lengths] * 2, 1)[:, 0], multiprocessors=8)


def test_rows_anywhere():
    wide = draw(3, 2100)
    check(wide[:, 3:1500], 50)
    check(wide[:, 4:1500], 50)
    check(wide[:1].expand(3, -1), 50)


@pytest.mark.parametrize("seed", [0, 1])
def test_any_order_of_warps(seed):
    check(draw(1, 20_000).mul(8).round(), 900, lazy=True, seed=seed)


# Lengths of which few enough elements are chosen that rows are sampled.
@pytest.mark.parametrize("multiprocessors", [1, 4, 132])
@pytest.mark.parametrize("k", [1, 100, 2048])
def test_long_rows(k, multiprocessors):
    check(draw(4, 36_000), k, multiprocessors=multiprocessors)


def test_a_cluster_of_long_parts():
    check(draw(1, 140_003)[:, :140_001], 2048, multiprocessors=1)


@pytest.mark.parametrize("steps", [0.0, 1.0, 40.0])
def test_ties_of_long_rows(steps):
    check(draw(4, 33_000).mul(steps).round(), 2000, multiprocessors=2)


def sampled(columns):
    """The elements that top_k_sampled reads first."""
    return torch.arange(columns) // 4 % 8 == 0


@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_samples_that_mislead(multiprocessors):
    """Large elements that are all sampled: too few reach the bound. None sampled: too many do. In
    one place: a part has all."""
    columns = 36_000
    logits = draw(4, columns)
    logits[0, torch.nonzero(sampled(columns))[:1500, 0]] += 20
    logits[1, ~sampled(columns)] += 20
    logits[2, 20_000:24_000] += 20
    logits[3] = torch.arange(columns)
    for k in (1000, 2048):
        check(logits, k, multiprocessors=multiprocessors)


def test_long_rows_of_values_that_are_no_numbers():
    logits = draw(5, 34_001)
    logits[0, 1000:] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 100:9000], logits[2, 9000:18_000] = torch.nan, torch.inf
    logits[3, ::3], logits[3, 1::3] = torch.nan, -torch.inf
    logits[4] = torch.where(torch.arange(34_001) % 2 == 0, 0.0, -0.0)
    for k in (5, 2000):
        check(torch.nn.functional.pad(logits, (0, 3))[:, :34_001], k, multiprocessors=4)


def test_lengths_of_long_rows():
    lengths = torch.tensor([0, 3, 4097, 20_002, 35_999, -1, 10**6], dtype=torch.int32)
    for multiprocessors in (1, 132):
        check(draw(7, 36_000), 2048, lengths, multiprocessors=multiprocessors)


@pytest.mark.parametrize("seed", [0, 1])
def test_long_rows_in_any_order_of_warps(seed):
    check(draw(4, 33_000).mul(8).round(), 900, lazy=True, seed=seed)
