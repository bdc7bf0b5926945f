# SPDX-License-Identifier: Apache-2.0
"""mla_sparse_attention on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running
from support.mla import SCALE, VALUES, assert_sparse, make_sparse, narrowed_rows, sparse_results

from tiercel import ref

pytestmark = pytest.mark.torch

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def run(inputs, scale=SCALE, out=None, kv_scale=None):
    new, lse = sparse_results(inputs[0])
    out = new if out is None else out
    given = (*inputs, kv_scale, out, lse, scale, VALUES)
    needed = kernels.mla_sparse_attention(*given, None)
    if needed:
        workspace = torch.full((needed,), torch.nan)
        assert kernels.mla_sparse_attention(*given, workspace) == 0
    return out, lse


def check(inputs, scale=SCALE, multiprocessors=0, **more):
    with running(multiprocessors=multiprocessors, **more):
        out, lse = run(inputs, scale)
    assert_sparse(inputs, out, lse, scale)


@pytest.mark.parametrize("entries", [1, 64, 65, 128, 200, 300])
@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
def test_lists(entries, multiprocessors):
    check(make_sparse(3, entries, heads=8), multiprocessors=multiprocessors)


@pytest.mark.parametrize("heads", [1, 16, 64, 65, 128])
def test_heads(heads):
    check(make_sparse(2, 150, heads), multiprocessors=3)


@pytest.mark.parametrize("page", [1, 16, 256])
def test_pages(page):
    check(make_sparse(2, 140, 8, page=page), multiprocessors=1)


@pytest.mark.parametrize("kind", [FP8, torch.uint8])
@pytest.mark.parametrize("multiprocessors", [1, 4])
def test_float8(kind, multiprocessors):
    """Packed rows are rounded to bfloat16 once more, behind their scales."""
    q, cache, indices = make_sparse(3, 200, 8)
    stored, kv_scale = narrowed_rows(cache, kind)
    inputs = q, stored, indices
    with running(multiprocessors=multiprocessors):
        out, lse = run(inputs, kv_scale=kv_scale)
    if kind == torch.uint8:
        truth = ref.mla_sparse_attention(q.double(), stored, indices, scale=SCALE)
        error = out.double() - truth
        assert not error.isnan().any() and error.abs().max() <= 0.05
        return
    assert_sparse(inputs, out, lse, kv_scale=kv_scale)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps(seed):
    check(make_sparse(2, 300, 16), multiprocessors=3, lazy=seed != 2, seed=seed)


def test_nothing_and_none():
    out, lse = run(make_sparse(0, 64))
    assert out.numel() == 0 and lse.numel() == 0
    for entries in (0, 130):
        q, cache, indices = make_sparse(2, entries, 4)
        out, lse = run((q, cache, torch.full_like(indices, -1)))
        assert not out.any() and (lse == -torch.inf).all()
    q, cache, indices = make_sparse(2, 130, 4)
    out, lse = run((q, cache[:0], indices))
    assert not out.any() and (lse == -torch.inf).all()


def test_none_up_to_the_last_entry():
    q, cache, indices = make_sparse(2, 300, 4)
    real = indices[indices >= 0][0]
    indices.fill_(-1)
    indices[:, -1] = real
    check((q, cache, indices), multiprocessors=2)


def test_strides():
    q, cache, indices = make_sparse(3, 140, 8)
    wide = torch.cat([q, q], 2)[..., 576:]
    apart = torch.stack([indices] * 3, -1)[..., 1]
    inputs = (wide, torch.cat([cache, cache], 2)[..., 576:], apart)
    out = torch.full((3, 8, 1024), torch.nan, dtype=BF16)
    _, lse = run(inputs, out=out[..., 256:768])
    assert_sparse(inputs, out[..., 256:768], lse)
    assert out[..., :256].isnan().all() and out[..., 768:].isnan().all()


@pytest.mark.parametrize("value", [100.0, -100.0])
def test_equal_scores_however_large(value):
    inputs = make_sparse(1, 200, heads=4)
    inputs[0].fill_(64.0), inputs[1].fill_(value)
    check(inputs, 1.0, multiprocessors=2)
