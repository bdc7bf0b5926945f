# SPDX-License-Identifier: Apache-2.0
"""mla_decode on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running
from support.mla import SCALE, VALUES, assert_right, make, narrowed, results

import tiercel
from tiercel import ref

BF16, F16 = torch.bfloat16, torch.float16
RAGGED = [130, 0, 1, 64, 65]


def run(inputs, scale=SCALE, out=None, workspace=None, kv_scale=None):
    new, lse = results(inputs[0])
    out = new if out is None else out
    given = (*inputs, kv_scale, out, lse, scale, VALUES)
    needed = kernels.mla_decode(*given, None)
    if needed:
        workspace = torch.full((needed,), torch.nan) if workspace is None else workspace
        assert kernels.mla_decode(*given, workspace) == 0
    return out, lse


def check(inputs, scale=SCALE, multiprocessors=0, **more):
    with running(multiprocessors=multiprocessors, **more):
        out, lse = run(inputs, scale)
    assert_right(inputs, out, lse, scale)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("multiprocessors", [1, 2, 3, 132])
def test_ragged(dtype, multiprocessors):
    check(make(RAGGED, dtype=dtype), multiprocessors=multiprocessors)


@pytest.mark.parametrize("page", [1, 2, 16, 32, 64, 128, 256])
def test_pages(page):
    check(make([70, 3, 128], heads=8, page=page), multiprocessors=2)


@pytest.mark.parametrize(
    ("queries", "heads"), [(1, 1), (1, 8), (1, 64), (1, 65), (1, 128), (2, 16), (8, 8), (3, 40)]
)
def test_rows(queries, heads):
    """Part of a block, a whole one, several; the last query stands at the last key."""
    check(make([100, 2, 0, 64], queries, heads), multiprocessors=4)


@pytest.mark.parametrize("page", [4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize(("queries", "heads"), [(1, 128), (4, 64)])
def test_pairs_load_for_each_other(page, queries, heads):
    """An odd number of boxes, a half that has none, sequences that several lanes have."""
    for seed in range(2):
        check(make([129, 1, 250, 33, 8], queries, heads, page), multiprocessors=6, seed=seed)


FLOAT8 = [(BF16, torch.float8_e4m3fn), (F16, torch.float8_e4m3fn), (BF16, torch.uint8)]


@pytest.mark.parametrize(("dtype", "kind"), FLOAT8)
@pytest.mark.parametrize(
    ("page", "multiprocessors", "queries"), [(64, 1, 1), (64, 3, 1), (1, 2, 2), (16, 132, 1)]
)
def test_float8(dtype, kind, page, multiprocessors, queries):
    """Packed rows are rounded to bfloat16 once more, behind their scales."""
    inputs, kv_scale = narrowed(make(RAGGED, queries, 8, page, dtype), kind)
    with running(multiprocessors=multiprocessors):
        out, lse = run(inputs, kv_scale=kv_scale)
    more = {} if kv_scale is None else {"kv_scale": kv_scale}
    if kind == torch.uint8:
        error = out.double() - ref.mla_decode(inputs[0].double(), *inputs[1:], scale=SCALE)
        assert not error.isnan().any() and error.abs().max() <= 0.05
        return
    assert_right(inputs, out, lse, **more)


@pytest.mark.parametrize(
    ("lengths", "queries", "multiprocessors"), [([520], 3, 132), ([130, 0, 1, 64, 65], 2, 12)]
)
def test_more_rows_than_blocks_that_combine(lengths, queries, multiprocessors):
    """A block goes through several rows, all groups with one of them or each with its own."""
    check(make(lengths, queries, 128), multiprocessors=multiprocessors)


def test_more_queries_than_keys():
    check(make([3, 7, 8], 8, 4))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps(seed):
    check(make([200, 1, 70], 2, 16), multiprocessors=3, lazy=seed != 2, seed=seed)


@pytest.mark.parametrize(
    ("lengths", "divided"),
    [([256] * 8, False), ([250, 193, 256, 256] * 2, False), ([448] * 2, True), ([640] * 3, True)],
)
def test_equal_lengths(lengths, divided):
    """With 32 steps on 5 lanes, a lane takes 8 steps, not 7, and no sequence is divided. Sequences
    of 7 steps are divided after 4; with sequences of 10, a lane takes 6 steps, an even share."""
    inputs, parts = make(lengths, heads=2), 2 * 5 * 2 * VALUES
    workspace = torch.full((parts + 1000,), torch.nan)
    with running(multiprocessors=5):
        out, lse = run(inputs, workspace=workspace)
    assert_right(inputs, out, lse)
    assert workspace[:parts].isnan().all() != divided


def test_many_sequences():
    check(make([i * 7 % 90 for i in range(70)], heads=2, page=16), multiprocessors=5)


def test_parts_of_a_fixed_size():
    """The batch-invariant mode: parts of 1024 keys. A sequence alone has the same bits."""
    inputs = q, cache, table, lengths = make([1100, 1, 0, 1024], 2, 3)
    with tiercel.batch_invariant():
        out, lse = run(inputs)
        alone = run((q[:1], cache, table[:1], lengths[:1]))
    assert_right(inputs, out, lse)
    assert torch.equal(alone[0][0], out[0]) and torch.equal(alone[1][0], lse[0])


def test_no_sequence_and_no_key():
    out, lse = run(make([], 1, 16))
    assert out.numel() == 0 and lse.numel() == 0
    out, lse = run(make([0, 0, 0]))
    assert not out.any() and (lse == -torch.inf).all()


def test_strides():
    q, cache, table, lengths = make([100, 70], 2, 16, page=32)
    wide = torch.cat([q, q], 3)[..., 576:]
    cache = torch.cat([cache, cache], 2)[..., 576:]
    apart = torch.stack([table] * 3, -1)[..., 1], torch.stack([lengths] * 2, -1)[..., 1]
    inputs = (wide, cache, *apart)
    out = torch.full((2, 2, 16, 1024), torch.nan, dtype=BF16)
    _, lse = run(inputs, out=out[..., 256:768])
    assert_right(inputs, out[..., 256:768], lse)
    assert out[..., :256].isnan().all() and out[..., 768:].isnan().all()


@pytest.mark.parametrize("value", [100.0, -100.0])
def test_equal_scores_however_large(value):
    inputs = make([130], heads=4)
    inputs[0].fill_(64.0), inputs[1].fill_(value)
    check(inputs, 1.0, multiprocessors=2)


def test_nan_in_a_query_stays_in_its_row():
    inputs = make([100, 70], heads=4)
    inputs[0][1, 0, 2, 5] = torch.nan
    with running(multiprocessors=2):
        out, lse = run(inputs)
    assert out[1, 0, 2].isnan().all() and lse[1, 2, 0].isnan()
    out[1, 0, 2], lse[1, 2, 0], inputs[0][1, 0, 2, 5] = 0.0, 0.0, 0.0
    assert not out.isnan().any() and not lse.isnan().any()


def test_a_workspace_serves_again():
    inputs = make([200, 90], heads=4)
    with running(multiprocessors=3):
        workspace = torch.full((1 << 20,), torch.nan)
        first = run(inputs, workspace=workspace)
        again = run(inputs, workspace=workspace)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
