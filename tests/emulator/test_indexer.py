# SPDX-License-Identifier: Apache-2.0
"""indexer_logits on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running
from support.mla import assert_logits, make_indexer

pytestmark = pytest.mark.torch


def run(inputs, out=None):
    if out is None:
        out = torch.full((len(inputs[0]), len(inputs[1])), torch.nan)
    kernels.indexer_logits(*inputs, out)
    return out


def check(inputs, multiprocessors=0, **more):
    with running(multiprocessors=multiprocessors, **more):
        assert_logits(inputs, run(inputs))


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("tokens", [1, 4, 9])
@pytest.mark.parametrize("keys", [1, 63, 64, 200])
def test_sizes(heads, tokens, keys):
    check(make_indexer(tokens, keys, heads))


@pytest.mark.parametrize("multiprocessors", [1, 2, 132])
def test_parts_of_the_keys(multiprocessors):
    check(make_indexer(3, 1500), multiprocessors)


def test_more_tiles_than_stages():
    check(make_indexer(2, 2100), 1)


def test_bounds():
    q, k, k_scale, weights, _, _ = make_indexer(8, 900)
    starts = torch.tensor([0, 5, -9, 700, 300, 100, 64, 950], dtype=torch.int32)
    ends = torch.tensor([900, 6, 70, 2000, 300, 40, 128, 990], dtype=torch.int32)
    for bounds in ((starts, ends), (None, ends), (starts, None)):
        check((q, k, k_scale, weights, *bounds))
    none = torch.zeros(8, dtype=torch.int32)
    assert (run((q, k, k_scale, weights, None, none)) == -torch.inf).all()
    late = torch.full((8,), 600, dtype=torch.int32)
    check((q, k, k_scale, weights, torch.stack([late] * 2, 1)[:, 0], None), 132)


def test_strides():
    q, k, k_scale, weights, _, _ = make_indexer(3, 130)
    wide = torch.zeros(130, 160, dtype=k.dtype)
    wide[:, 16:144] = k
    out = torch.full((3, 200), torch.nan)
    inputs = (q, wide[:, 16:144], k_scale, torch.cat([weights] * 2, 1)[:, 64:], None, None)
    run(inputs, out[:, 7:137])
    assert_logits(inputs, out[:, 7:137])
    assert out[:, :7].isnan().all() and out[:, 137:].isnan().all()


@pytest.mark.parametrize("seed", [0, 1])
def test_any_order_of_warps(seed):
    check(make_indexer(5, 600), 2, lazy=True, seed=seed)
