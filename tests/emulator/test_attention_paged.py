# SPDX-License-Identifier: Apache-2.0
"""paged_attention on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running
from support.paged import assert_close, make, wide

import tiercel

pytestmark = pytest.mark.torch

MIXED = [(1, 77), (150, 210), (0, 40), (3, 3), (1, 1), (20, 148), (0, 0)]


def run(given, sinks=None, causal=True, window=None, softcap=None):
    q, k, v, table, seqused, starts, _ = given
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
    options = (causal, window, None, softcap)
    kernels.paged_attention(q, k, v, table, seqused, starts, sinks, out, lse, *options)
    return out, lse


def check(given, sinks=None, **options):
    out, lse = run(given, sinks, **options)
    truth = tiercel.ref.paged_attention(*wide(given), sinks=sinks, return_lse=True, **options)
    assert_close(out, lse, *truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window": (40, 5), "causal": False}, {"softcap": 5.0}])
def test_mixed(d, dtype, options):
    check(make(MIXED, d=d, dtype=dtype), **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 2, 16, 64, 128, 256])
def test_pages(page, layout):
    check(make([(70, 300), (1, 256), (2, 17)], page=page, layout=layout))


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (8, 1), (64, 1), (48, 1), (7, 7)])
def test_groups(heads):
    check(make([(30, 40), (1, 130)], heads, around=(3, 5)))


@pytest.mark.parametrize("window", [(0, 0), (15, 0), (16, 0), (127, 128), (300, -1), (-1, 4)])
def test_windows_at_the_edges_of_pages(window):
    check(make([(20, 300), (130, 256), (1, 16), (1, 17)]), window=window, causal=False)
    check(make([(20, 300), (1, 129)]), window=window)


def test_more_queries_than_keys():
    check(make([(40, 7), (3, 0), (70, 64)]))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_sinks(softcap):
    sinks = torch.tensor([-torch.inf, 0.0, 5.0, 100.0])
    check(make(MIXED), sinks, softcap=softcap)


def test_rows_in_no_sequence():
    given = make([(5, 40), (0, 9), (1, 1)], around=(150, 7))
    sinks = torch.zeros(4)
    out, lse = run(given, sinks)
    check(given, sinks)
    assert (out[:150] == 0).all() and (lse[:, :150] == -torch.inf).all()
    assert (out[156:] == 0).all() and (lse[:, 156:] == -torch.inf).all()


def test_no_sequence_at_all():
    out, lse = run(make([(0, 0)] * 3, around=(0, 4)))
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps(seed):
    with running(lazy=seed != 2, seed=seed):
        check(make([(140, 300), (1, 200), (1, 5)]))


def test_many_sequences():
    check(make([(i % 3, 3 * i) for i in range(100)], (2, 2)))
