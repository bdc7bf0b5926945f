# SPDX-License-Identifier: Apache-2.0
"""paged_attention on the emulator with prefixes of keys that all queries of a sequence see."""

import pytest
import torch
from support.emulator import kernels
from support.paged import make
from support.paged_emulator import arguments, check, run

import tiercel

pytestmark = pytest.mark.torch

LENGTHS = [(40, 110), (3, 3), (20, 148), (1, 77), (0, 9), (130, 130), (150, 300)]
# Before the new tokens, within them, beyond the sequence, none, and numbers that are no length.
PREFIX = torch.tensor([60, 2, 2**31 - 1, 0, 5, -(2**31), 200], dtype=torch.int32)


def plan(given, **options):
    return kernels.paged_attention_plan(*arguments(given, **options))["kernel"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window": (-1, 3), "causal": False}, {"softcap": 5.0}])
def test_against_float64(d, dtype, options):
    given = make(LENGTHS, d=d, dtype=dtype, around=(2, 3))
    assert "_window" in plan(given, prefix=PREFIX, **options)
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 2.0]), prefix=PREFIX, **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}])
def test_wide_heads(options):
    given = make([(70, 130), (3, 3), (1, 77)], d=264)
    check(given, prefix=torch.tensor([100, 2, 9], dtype=torch.int32), **options)


def test_float8_caches():
    q, k, v, *rest = make([(70, 130), (33, 33)], d=64)
    given = (q, *(x.to(torch.float8_e4m3fn) for x in (k, v)), *rest)
    check(given, prefix=torch.tensor([100, 20], dtype=torch.int32))


@pytest.mark.parametrize("options", [{}, {"window": (4, 0)}])
def test_few_new_tokens(options):
    given = make([(4, 110), (3, 3), (1, 77), (4, 9)], d=128)
    prefix = torch.tensor([109, 3, 60, 0], dtype=torch.int32)
    assert plan(given, prefix=prefix).startswith("decode_attention<")
    check(given, prefix=prefix, **options)


def test_keys_split_among_blocks():
    """And parts of a fixed size in the batch-invariant mode."""
    given = make([(70, 2300), (33, 33)], (8, 2), d=128)
    prefix = torch.tensor([2290, 30], dtype=torch.int32)
    assert kernels.paged_attention_plan(*arguments(given, prefix=prefix))["parts"] > 1
    check(given, prefix=prefix)
    with tiercel.batch_invariant():
        check(given, prefix=prefix)


def test_the_whole_sequence_is_no_mask():
    given = make([(150, 210), (70, 70)], d=64)
    prefix = given[4].clone()
    for one, other in zip(run(given, prefix=prefix), run(given, causal=False), strict=True):
        assert torch.equal(one, other)


def test_a_prefix_of_none_is_the_mask_alone():
    given = make([(150, 210), (70, 70)], d=64)
    options = {"window": (-1, 3), "causal": False}
    prefix = torch.zeros(4, dtype=torch.int32)[::2]
    for one, other in zip(run(given, prefix=prefix, **options), run(given, **options), strict=True):
        assert torch.equal(one, other)
