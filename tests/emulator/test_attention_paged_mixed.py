# SPDX-License-Identifier: Apache-2.0
"""paged_attention on the emulator: float8 caches, decoding sequences beside chunks of prompts."""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running
from support.paged import assert_close, make, wide, with_room
from support.paged_emulator import arguments, run

import tiercel

pytestmark = pytest.mark.torch

# With 16 query heads a key head, decoding sequences have one new token, a tile 8, and keys of
# sequences with 33 new tokens or more are copied.
LENGTHS = [(1, 300), (40, 200), (1, 40), (9, 150), (0, 0), (1, 1), (0, 9), (33, 33), (2, 260)]
SCALES = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([2.0])}


def make_float8(lengths=LENGTHS, heads=(32, 2), keys=32768, **options):
    q, k, v, *rest = make(lengths, heads, **options)
    narrow = (x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v))
    return with_room((q, *narrow, *rest), keys)


def plan(given, **options):
    return kernels.paged_attention_plan(*arguments(given, **options))


def check(given, sinks=None, **options):
    assert plan(given, **options)["decode"].startswith("decode_attention<")
    out, lse = run(given, sinks, **options)
    truth = tiercel.ref.paged_attention(*wide(given), sinks=sinks, **options, return_lse=True)
    assert_close(out / 2, lse, truth[0] / 2, truth[1])


@pytest.mark.parametrize(
    ("d", "dtype", "options"),
    [
        (64, torch.bfloat16, {}),
        (128, torch.bfloat16, {"causal": False}),
        (80, torch.float16, {}),
        (64, torch.float16, {"softcap": 5.0}),
    ],
)
def test_against_float64(d, dtype, options):
    given = make_float8(d=d, dtype=dtype, around=(2, 3))
    assert plan(given, **options)["widen"] != "none"
    sinks = torch.linspace(-3, 5, 32)
    sinks[3] = -torch.inf
    check(given, sinks, **SCALES, **options)


@pytest.mark.parametrize(("page", "layout"), [(1, "NHD"), (64, "HND"), (256, "NHD")])
def test_pages(page, layout):
    check(make_float8(page=page, layout=layout), **SCALES)


def test_a_window():
    """Nothing is copied."""
    given = make_float8()
    assert plan(given, window=(70, 0))["widen"] == "none"
    check(given, window=(70, 0))


def test_parts():
    given = make_float8([(1, 70)] * 24 + [(40, 900)], keys=8192)
    assert plan(given)["parts"] > 1 and plan(given)["widen"] != "none"
    check(given, torch.linspace(-3, 5, 32), **SCALES)


def test_one_multiprocessor():
    """A block has tiles of both kinds, one after the other."""
    with running(multiprocessors=1):
        check(make_float8(), **SCALES)


def test_no_long_chunk():
    """The host expects one, since `max_seqlen_q` may be more than any sequence has."""
    given = make_float8([(1, 60)] * 6 + [(9, 90), (0, 4)])
    check((*given[:-1], 64), **SCALES)
    only = make_float8([(1, 60)] * 7)
    check((*only[:-1], 64), **SCALES)


def test_more_sequences_than_threads():
    lengths = [(1, 1)] * 1100
    lengths[7] = lengths[1050] = (40, 80)
    check(make_float8(lengths, keys=256), **SCALES)


def test_more_keys_than_the_table_has_room_for():
    """And fewer than none: as many as there is room for, and none."""
    given = list(make_float8(keys=512))
    given[3] = given[3].clamp(0, len(given[1]) - 1)
    q, k, v, table, used, starts, most = given
    table = table.repeat(1, 1)
    given = [q, k, v, table[:, :20], used.clone(), starts, most]
    for i, keys in ((1, 2**31 - 1), (3, -5)):
        given[4][i] = keys
    values = arguments(given)
    floats = kernels.paged_attention_plan(*values)["workspace"]
    kernels.paged_attention(*values, torch.full((floats,), torch.nan))
    given[4][1], given[4][3] = 320, 0
    expected = run(given)
    assert torch.equal(values[10], expected[0]) and torch.equal(values[11], expected[1])


def test_a_bound_of_the_keys():
    given = make_float8()
    values = list(arguments(given))
    without = kernels.paged_attention_plan(*values)["workspace"]
    values[-4] = 28000
    bound = kernels.paged_attention_plan(*values)
    assert bound["workspace"] < without and bound["decode"] != "none"
    kernels.paged_attention(*values, torch.full((bound["workspace"],), torch.nan))
    assert_close(*values[10:12], *tiercel.ref.paged_attention(*wide(given), return_lse=True))


@pytest.mark.parametrize("seed", [0, 1])
def test_any_order_of_warps(seed):
    with running(lazy=True, seed=seed, multiprocessors=2):
        check(make_float8(LENGTHS[1:], keys=65536), **SCALES)


def test_one_program_where_that_is_faster():
    assert plan(make_float8(keys=1024))["decode"] == "none"
    assert plan(make_float8([(40, 200)] * 3))["decode"] == "none"
    assert plan(make(LENGTHS, (32, 2)))["decode"] == "none"
