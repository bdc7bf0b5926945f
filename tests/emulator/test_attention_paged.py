# SPDX-License-Identifier: Apache-2.0
"""paged_attention on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running
from support.paged import assert_close, make, random_trees, wide, with_room
from support.paged_emulator import arguments, check, run

import tiercel

pytestmark = pytest.mark.torch

MIXED = [(1, 77), (150, 210), (0, 40), (3, 3), (1, 1), (20, 148), (0, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window": (40, 5), "causal": False}, {"softcap": 5.0}])
def test_mixed(d, dtype, options):
    check(make(MIXED, d=d, dtype=dtype), **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 2, 16, 64, 128, 256])
def test_pages(page, layout):
    check(make([(70, 300), (1, 256), (2, 17)], page=page, layout=layout))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("page", [8, 32, 64])
def test_pages_that_lanes_copy_and_others(page, d):
    check(make([(70, 300), (1, 256), (2, 17)], page=page, d=d))


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (8, 1), (64, 1), (48, 1), (7, 7)])
def test_groups(heads):
    check(make([(30, 40), (1, 130)], heads, around=(3, 5)))


@pytest.mark.parametrize("window", [(0, 0), (15, 0), (16, 0), (127, 128), (300, -1), (-1, 4)])
def test_windows_at_the_edges_of_pages(window):
    check(make([(20, 300), (130, 256), (1, 16), (1, 17)]), window=window, causal=False)
    check(make([(20, 300), (1, 129)]), window=window)


# Sequences whose last tile has rows for one warpgroup alone, over several blocks of keys.
ONE_WARPGROUP = [(1, 700), (20, 900), (130, 500), (33, 640)]


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window": (300, 5), "causal": False}, {"softcap": 5.0}])
def test_tiles_of_one_warpgroup(d, options):
    check(make(ONE_WARPGROUP, d=d), **options)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiles_of_one_warpgroup_in_any_order_of_warps(seed):
    with running(lazy=seed != 2, seed=seed):
        check(make(ONE_WARPGROUP, (4, 2)))


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


FEW = [(1, 77), (0, 40), (2, 2), (0, 0), (1, 1), (2, 130), (2, 1), (1, 0), (2, 0)]


@pytest.mark.parametrize("options", [{}, {"window": (40, 5), "causal": False}, {"softcap": 5.0}])
@pytest.mark.parametrize("d", [40, 64, 128, 256])
def test_few_new_tokens(d, options):
    given = make(FEW, (6, 2), d=d, around=(3, 5))
    assert kernels.paged_attention_plan(*arguments(given))["kernel"].startswith("decode_attention<")
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 100.0, 1.0, -3.0]), **options)
    check(given, **options)


DRAFTS = [(8, 77), (0, 40), (5, 5), (8, 300), (7, 3), (1, 0), (8, 2500)]


@pytest.mark.parametrize("options", [{}, {"window": (40, 5), "causal": False}, {"softcap": 5.0}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_drafts(dtype, options):
    """Tiles of 32 rows, whole and shared."""
    given = with_room(make(DRAFTS, (8, 2), d=128, dtype=dtype, around=(3, 5)))
    assert "tiles=4" in kernels.paged_attention_plan(*arguments(given))["kernel"]
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 100.0, 1.0, -3.0, 2.0, 0.5]), **options)
    check(given, **options)


def test_few_new_tokens_of_many_keys():
    """Shared by blocks: by a cluster, or spread, with a second kernel or without."""
    sinks = torch.ones(8)
    check(make([(1, 900), (0, 300), (2, 1500)], (8, 4)), sinks)
    check(make([(1, 20 * i) for i in range(40)], (8, 4), around=(1, 1)), sinks)
    check(make([(2, 3000)], (8, 1), page=1), sinks)


def test_more_new_tokens_than_said():
    """Rows beyond are zeros, and nothing beside them is written."""
    *given, _ = make([(4, 40), (1, 9)])
    out, lse = run((*given, 1))
    assert (out[1:4] == 0).all() and (lse[:, 1:4] == -torch.inf).all()
    assert not out.isnan().any()


@pytest.mark.parametrize("d", [64, 128])
def test_float8_cache(d):
    q, k, v, *rest = make(FEW, (6, 2), d=d, around=(0, 2))
    scales = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([2.0])}
    given = (q, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)), *rest)
    out, lse = run(given, **scales)
    truth = tiercel.ref.paged_attention(*wide(given), **scales, return_lse=True)
    assert_close(out / 2, lse, truth[0] / 2, truth[1])


FLOAT8 = [(1, 77), (150, 210), (0, 40), (3, 3), (1, 1), (20, 148), (0, 0), (70, 400)]


def check_float8(lengths, heads=(6, 2), d=128, dtype=torch.bfloat16, page=16, sinks=None, **rest):
    q, k, v, *others = make(lengths, heads, d=d, page=page, dtype=dtype, around=(2, 3))
    given = (q, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)), *others)
    assert kernels.paged_attention_plan(*arguments(given))["kernel"].startswith("attention_paged")
    out, lse = run(given, sinks, **rest)
    truth = tiercel.ref.paged_attention(*wide(given), sinks=sinks, **rest, return_lse=True)
    assert_close(out / 2, lse, truth[0] / 2, truth[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [16, 64, 80, 128])
@pytest.mark.parametrize("options", [{}, {"window": (40, 5), "causal": False}, {"softcap": 5.0}])
def test_float8_cache_of_many_new_tokens(d, dtype, options):
    scales = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([2.0, 0.25])}
    check_float8(FLOAT8, d=d, dtype=dtype, **scales, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128])
def test_each_float8_number_is_widened_exactly(d, dtype):
    """Any bytes, NaN too: a cache of the same numbers in 16 bits gives the same results."""
    q, k, v, *others = make([(70, 300), (40, 70)], (6, 2), d=d, dtype=dtype)
    q, table = q / 1024, others[0]
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randint(0, 256, x.shape, generator=generator, dtype=torch.uint8) for x in (k, v))
    k, v = (x - (x & 0x7F == 0x7F).byte() for x in (k, v))
    for nans in (False, True):
        if nans:
            k[table[1, 2], 3, :, 5], v[table[0, 0], ::7, :, d - 1] = 0x7F, 0xFF
        stored = [x.view(torch.float8_e4m3fn) for x in (k, v)]
        out, _ = run((q, *stored, *others))
        same, _ = run((q, *(x.to(dtype) for x in stored), *others))
        assert same.isnan().any() == nans and not same.isnan().all()
        torch.testing.assert_close(out, same, rtol=0, atol=0, equal_nan=True)


def test_tiles_of_one_warpgroup_over_a_float8_cache():
    check_float8(ONE_WARPGROUP)


@pytest.mark.parametrize("page", [1, 2, 64, 256])
@pytest.mark.parametrize("heads", [(2, 2), (32, 1)])
def test_pages_of_a_float8_cache(page, heads):
    scales = {"k_scale": torch.tensor(0.5), "sinks": torch.ones(heads[0])}
    check_float8([(70, 300), (100, 256), (33, 33)], heads, page=page, **scales)


def test_keys_of_a_float8_cache_split_among_blocks():
    scales = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([2.0, 0.25])}
    check_float8([(70, 1300), (0, 3), (1, 700), (33, 33), (2, 1)], (4, 2), **scales)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps_over_a_float8_cache(seed):
    with running(lazy=seed != 2, seed=seed):
        check_float8([(140, 300), (40, 200), (1, 5)], (4, 2))


LONG = [(70, 1300), (0, 3), (1, 700), (33, 33), (2, 1)]


@pytest.mark.parametrize("d", [40, 64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window": (600, 5), "causal": False}, {"softcap": 5.0}])
def test_keys_split_among_blocks(d, options):
    given = make(LONG, d=d, around=(3, 2))
    assert kernels.paged_attention_plan(*arguments(given))["parts"] > 1
    check(given, **options)
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 100.0]), **options)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps(seed):
    with running(lazy=seed != 2, seed=seed):
        check(make([(140, 300), (1, 200), (1, 5)]))


def test_many_sequences():
    check(make([(i % 3, 3 * i) for i in range(100)], (2, 2)))


# New tokens and keys: chains and trees, with fewer keys than new tokens too.
TREES = [(1, 77), (7, 70), (0, 40), (64, 190), (5, 5), (20, 9), (0, 0), (33, 300), (64, 64)]


@pytest.mark.parametrize("options", [{}, {"window": (40, 0)}, {"window": (2, 0)}, {"softcap": 5.0}])
@pytest.mark.parametrize("d", [40, 64, 128, 256])
def test_trees(d, options):
    given = make(TREES, (6, 2), d=d, around=(3, 5))
    sinks = torch.tensor([-torch.inf, 0.0, 5.0, 100.0, 1.0, -3.0])
    check(given, sinks, tree_mask=random_trees(given), **options)


def test_trees_of_few_tokens():
    """Sequences that have a cluster each, and sequences that all blocks share."""
    for lengths in ([(8, 3000)], [(i % 8, 20 * i) for i in range(40)], [(7, 1500), (2, 900)]):
        given = make(lengths, (4, 1), page=1)
        check(given, tree_mask=random_trees(given))


@pytest.mark.parametrize("d", [64, 128])
def test_a_chain_is_causal(d):
    given = make([(1, 77), (64, 90), (9, 300), (5, 3)], (4, 2), d=d)
    chain = torch.cat([(2 << torch.arange(n)) - 1 for n in (1, 64, 9, 5)])
    check(given, tree_mask=chain)
    out, lse = run(given, tree_mask=chain, window=(20, 0))
    truth = tiercel.ref.paged_attention(*wide(given), window=(20, 0), return_lse=True)
    assert_close(out, lse, *truth)


def test_trees_over_a_float8_cache():
    q, k, v, *rest = make(TREES, (6, 2), d=128, around=(0, 2))
    given = (q, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)), *rest)
    options = {"tree_mask": random_trees(given), "window": (100, 0)}
    options |= {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([2.0])}
    out, lse = run(given, **options)
    truth = tiercel.ref.paged_attention(*wide(given), **options, return_lse=True)
    assert_close(out / 2, lse, truth[0] / 2, truth[1])


@pytest.mark.parametrize("d", [64, 128])
def test_any_words(d):
    """Bits of later tokens, and of none; a stride."""
    given = make(TREES, (4, 2), d=d)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**63), 2**63 - 1, (len(given[0]), 2), generator=generator)[:, 0]
    words[::7] = 0
    for window in (None, (30, 0), (0, 0)):
        check(given, tree_mask=words, window=window)


@pytest.mark.parametrize("d", [64, 128])
def test_trees_in_any_order_of_warps(d):
    given = make([(40, 300), (1, 200), (30, 31)], d=d)
    with running(lazy=False, seed=2):
        check(given, tree_mask=random_trees(given))


@pytest.mark.parametrize("page", [1, 16, 256])
@pytest.mark.parametrize("d", [72, 128])
def test_trees_in_tiles(d, page):
    """Tiles that the new tokens of a sequence fill, and parts of a tile's keys."""
    sinks = torch.tensor([-torch.inf, 0.0, 5.0, 100.0, 1.0, -3.0, 2.0, 0.5])
    for lengths in (TREES, [(64, 900), (9, 2)]):
        given = make(lengths, (8, 1), d=d, page=page, around=(2, 1))
        plan = kernels.paged_attention_plan(*arguments(given, tree_mask=random_trees(given)))
        assert plan["kernel"].endswith("_tree") and plan["queries"] == 16
        assert plan["parts"] > 1 or lengths == TREES
        check(given, sinks, tree_mask=random_trees(given))
        check(given, tree_mask=random_trees(given, seed=9))
