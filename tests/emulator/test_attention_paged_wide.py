# SPDX-License-Identifier: Apache-2.0
"""paged_attention's kernel for head dimensions above 256 on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running
from support.paged import assert_close, make, random_trees, wide
from support.paged_emulator import arguments, check, run

import tiercel

pytestmark = pytest.mark.torch

MIXED = [(1, 77), (40, 110), (0, 40), (3, 3), (1, 1), (20, 148), (0, 0)]
PROMPTS = [(70, 130), (33, 33), (65, 70)]


def plan(given, **options):
    return kernels.paged_attention_plan(*arguments(given, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [264, 384, 512])
@pytest.mark.parametrize("options", [{}, {"window": (40, 5), "causal": False}, {"softcap": 5.0}])
def test_mixed(d, dtype, options):
    given = make(MIXED, d=d, dtype=dtype)
    assert plan(given)["kernel"].startswith("attention_paged_wide<")
    check(given, **options)


@pytest.mark.parametrize("options", [{}, {"window": (20, 0)}])
@pytest.mark.parametrize("d", [320, 512])
def test_several_tiles_of_a_sequence(d, options):
    given = make(PROMPTS, (8, 2), d=d, around=(2, 1))
    assert plan(given)["queries"] == 16
    check(given, **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 4, 8, 32, 64, 256])
def test_pages(page, layout):
    """Pages of fewer than 8 keys are copied row by row."""
    given = make([(20, 70), (1, 66), (18, 17)], (8, 2), d=512, page=page, layout=layout)
    check(given)
    check(make([(1, 150), (2, 3)], (8, 2), d=504, page=page, layout=layout))


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (64, 1), (48, 1), (3, 3)])
def test_groups(heads):
    check(make([(6, 40), (1, 130)], heads, d=512, around=(3, 5)))


@pytest.mark.parametrize("window", [(0, 0), (15, 0), (63, 64), (100, -1), (-1, 4)])
def test_windows(window):
    check(make([(20, 200), (9, 128), (1, 64), (1, 65)], d=512), window=window, causal=False)
    check(make([(5, 200), (1, 129)], d=512), window=window)


def test_more_queries_than_keys():
    check(make([(40, 7), (3, 0), (20, 19)], d=512))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_sinks(softcap):
    sinks = torch.tensor([-torch.inf, 0.0, 5.0, 100.0])
    check(make(MIXED, d=512), sinks, softcap=softcap)


def test_rows_in_no_sequence():
    given = make([(5, 40), (0, 9), (1, 1)], d=512, around=(30, 7))
    sinks = torch.zeros(4)
    out, lse = run(given, sinks)
    check(given, sinks)
    assert (out[:30] == 0).all() and (lse[:, :30] == -torch.inf).all()
    assert (out[36:] == 0).all() and (lse[:, 36:] == -torch.inf).all()


def test_no_sequence_at_all():
    out, lse = run(make([(0, 0)] * 3, d=512, around=(0, 4)))
    assert (out == 0).all() and (lse == -torch.inf).all()


LONG = [(20, 700), (0, 3), (1, 400), (33, 33), (2, 1)]


@pytest.mark.parametrize("d", [264, 512])
@pytest.mark.parametrize("options", [{}, {"window": (300, 5), "causal": False}, {"softcap": 5.0}])
def test_keys_split_among_blocks(d, options):
    given = make(LONG, d=d, around=(3, 2))
    assert plan(given)["parts"] > 1
    check(given, **options)
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 100.0]), **options)


TREES = [(1, 77), (40, 110), (0, 40), (3, 3), (64, 64), (9, 4), (2, 1), (64, 700), (7, 640)]


@pytest.mark.parametrize("options", [{}, {"window": (40, 0)}, {"window": (2, 0)}, {"softcap": 5.0}])
@pytest.mark.parametrize("d", [264, 512])
def test_trees(d, options):
    """Tiles in which rows of a tree stop at any new token, in parts and whole."""
    given = make(TREES, (6, 2), d=d, around=(3, 5))
    assert plan(given, **options)["parts"] > 1 or "window" in options
    sinks = torch.tensor([-torch.inf, 0.0, 5.0, 100.0, 1.0, -3.0])
    check(given, sinks, tree_mask=random_trees(given), **options)
    many = make([(i % 9, i) for i in range(70)], (2, 2), d=d)
    assert plan(many, **options)["parts"] == 1
    check(many, tree_mask=random_trees(many), **options)


def test_any_words_of_trees():
    """Bits of later tokens, and of none; a stride."""
    given = make(TREES, (4, 2), d=384)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**63), 2**63 - 1, (len(given[0]), 2), generator=generator)[:, 0]
    words[::7] = 0
    for window in (None, (30, 0), (0, 0)):
        check(given, tree_mask=words, window=window)


def test_a_chain_is_causal():
    given = make([(1, 77), (64, 90), (9, 300)], (4, 2), d=512)
    chain = torch.cat([(2 << torch.arange(n)) - 1 for n in (1, 64, 9)])
    for options in ({}, {"window": (20, 0)}):
        truth = tiercel.ref.paged_attention(*wide(given), return_lse=True, **options)
        assert_close(*run(given, tree_mask=chain, **options), *truth)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("lengths", [PROMPTS, [(3, 200), (1, 70)]])
def test_any_order_of_warps(lengths, seed):
    with running(lazy=seed != 2, seed=seed):
        check(make(lengths, (8, 2), d=512))


def test_many_sequences():
    """More tiles than blocks, and more sequences than lanes."""
    check(make([(i % 3, i) for i in range(150)], (2, 2), d=264))


@pytest.mark.parametrize("options", [{}, {"window": (1100, 5), "causal": False}, {"softcap": 5.0}])
def test_parts_of_a_fixed_size(options):
    """The batch-invariant mode; the table has room for more parts than there are."""
    q, k, v, table, *rest = make([(9, 2100), (0, 3), (1, 2048), (2, 2049), (3, 0)], d=264)
    room = torch.full((len(table), 4 * 128), -7, dtype=torch.int32)
    room[:, : table.shape[1]] = table
    given = (q, k, v, room, *rest)
    with tiercel.batch_invariant():
        of = plan(given, **options)
        assert of["parts"] == (4 if not options.get("window") else 2) and of["combine"] != "none"
        check(given, **options)
        check(given, torch.tensor([-torch.inf, 0.0, 5.0, 100.0]), **options)


@pytest.mark.parametrize("options", [{}, {"window": (90, 0)}, {"softcap": 5.0}])
def test_a_rows_bits_do_not_depend_on_the_call(options):
    """A prompt whole, and in chunks beside another sequence."""
    q, k, v, table, _, _, _ = make([(40, 2100), (2, 70)], (8, 2), d=512)

    def rows(first, last, other):
        n = last - first
        ends = torch.tensor([0, n, n + 2]) if other else torch.tensor([0, n])
        given = (torch.cat([q[first:last], q[40:]]) if other else q[first:last], k, v)
        keys = torch.tensor([2060 + last, 70])[: len(ends) - 1].int()
        out, lse = run((*given, table[: len(keys)], keys, ends.int(), n), **options)
        return out[:n], lse[:, :n]

    with tiercel.batch_invariant():
        whole = rows(0, 40, False)
        chunks = [rows(0, 7, True), rows(7, 8, False), rows(8, 40, True)]
    assert torch.equal(torch.cat([out for out, _ in chunks]), whole[0])
    assert torch.equal(torch.cat([lse for _, lse in chunks], 1), whole[1])


# The first key that a sequence's first new token sees is 510 or 441; steps are at most 128 keys.
@pytest.mark.parametrize("new", [1, 70])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_steps_before_a_window_do_not_count(new, d, dtype):
    """Pages may have been given away, and their entries may name none."""
    if dtype.itemsize == 1 and d > 128:
        pytest.skip("float8 caches have heads of up to 128")
    q, k, v, table, *others = make([(new, 700)], (8, 2), d=d, dtype=torch.bfloat16)
    k, v = (x.nan_to_num().to(dtype) for x in (k, v))
    before, _ = run((q, k, v, table, *others), window=(189, 0))
    gone = table[0, : 384 // 16].long()
    for x in (k, v):
        x.view(torch.uint8)[gone] = 0xFF  # NaN in both types
    table[0, : 384 // 16 : 2] = -7
    after, _ = run((q, k, v, table, *others), window=(189, 0))
    assert torch.equal(before, after) and not after.isnan().any()
