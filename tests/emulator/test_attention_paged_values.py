# SPDX-License-Identifier: Apache-2.0
"""paged_attention on the emulator: values whose head dimension is not that of keys."""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running
from support.paged import make, random_trees
from support.paged_emulator import arguments, check

import tiercel

pytestmark = pytest.mark.torch

LENGTHS = [(1, 77), (40, 110), (0, 40), (3, 3), (1, 1), (70, 130), (0, 0), (2, 1)]
PAIRS = [(192, 128), (128, 64), (64, 128), (40, 8), (8, 256), (136, 72)]


def plan(given, **options):
    return kernels.paged_attention_plan(*arguments(given, **options))


@pytest.mark.parametrize(("d", "d_v"), PAIRS)
@pytest.mark.parametrize("options", [{}, {"window": (30, 5), "causal": False}, {"softcap": 5.0}])
def test_head_dimensions(d, d_v, options):
    given = make(LENGTHS, d=d, d_v=d_v, around=(3, 5))
    tiles = min(x for x in (64, 128, 256) if x >= max(d, d_v))
    assert plan(given, **options)["kernel"].startswith(f"attention_paged_bf16_d{tiles}_")
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 100.0]), **options)


@pytest.mark.parametrize("page", [4, 8, 32, 256])
@pytest.mark.parametrize(("d", "d_v"), PAIRS[:3])
def test_pages(page, d, d_v):
    check(make(LENGTHS, (6, 2), d=d, d_v=d_v, page=page, dtype=torch.float16))


def test_values_in_a_part_of_a_row():
    """Rows of the cache have more columns than the values."""
    q, k, v, *rest = make(LENGTHS, d=128, layout="HND")
    check((q, k, v[..., :72], *rest))
    check((q[..., :40].contiguous(), k[..., :40], v, *rest))


@pytest.mark.parametrize(("d", "d_v"), [(192, 128), (64, 128)])
def test_keys_split_among_blocks(d, d_v):
    given = make([(40, 1300), (1, 900), (0, 3)], d=d, d_v=d_v, around=(1, 2))
    assert plan(given)["parts"] > 1
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 100.0]))


@pytest.mark.parametrize("lengths", [[(1, 900), (1, 30), (1, 1)], [(70, 1500), (9, 20)]])
@pytest.mark.parametrize(("d", "d_v"), [(192, 128), (128, 64)])
def test_the_batch_invariant_mode(d, d_v, lengths):
    given = make(lengths, d=d, d_v=d_v)
    with tiercel.batch_invariant():
        check(given)
        check(given, torch.tensor([-torch.inf, 0.0, 5.0, 100.0]))


def test_trees():
    given = make([(1, 77), (64, 210), (9, 9), (20, 5)], (8, 2), d=128, d_v=64)
    words = random_trees(given)
    assert plan(given, tree_mask=words)["kernel"] == "attention_paged_bf16_d128_causal_tree"
    check(given, tree_mask=words)


def test_blocks_with_several_tiles():
    with running(multiprocessors=2, seed=1):
        check(make(LENGTHS, d=192, d_v=128))
