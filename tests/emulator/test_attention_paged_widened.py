# SPDX-License-Identifier: Apache-2.0
"""paged_attention on the emulator: float8 caches copied to 16 bits before tiles read them."""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running
from support.paged import assert_close, make, wide
from support.paged_emulator import arguments, run

import tiercel

pytestmark = pytest.mark.torch

LENGTHS = [(150, 210), (0, 40), (130, 130), (1, 1), (0, 0), (200, 700)]


@pytest.fixture(autouse=True)
def one_multiprocessor():
    """So few that even these calls are long enough."""
    with running(multiprocessors=1):
        yield


def make_float8(*args, **options):
    q, k, v, *rest = make(*args, **options)
    return (q, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)), *rest)


def plan(given, **options):
    return kernels.paged_attention_plan(*arguments(given, **options))


def check(given, sinks=None, **options):
    assert plan(given, **options)["widen"].startswith("paged_widen<")
    out, lse = run(given, sinks, **options)
    truth = tiercel.ref.paged_attention(*wide(given), sinks=sinks, **options, return_lse=True)
    assert_close(out / 2, lse, truth[0] / 2, truth[1])


SCALES = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([2.0])}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"softcap": 5.0}])
def test_against_float64(d, dtype, options):
    given = make_float8(LENGTHS, d=d, dtype=dtype, around=(2, 3))
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 2.0]), **SCALES, **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 16, 64, 256])
def test_pages(page, layout):
    check(make_float8(LENGTHS, d=128, page=page, layout=layout), **SCALES)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_bits_are_those_of_a_cache_of_16_bits(d, seed):
    given = make_float8([(150, 210), (70, 1300)], d=d, page=64, seed=seed)
    narrow = (given[0], *(x.to(torch.bfloat16) for x in given[1:3]), *given[3:])
    assert plan(given)["widen"] != "none" and plan(narrow)["widen"] == "none"
    for result, expected in zip(run(given), run(narrow), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_number_is_widened_exactly(dtype):
    """One key a sequence: the result is its value."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    q, k, v, *rest = make_float8([(1, 1)] * 129 + [(130, 0)] * 4, (2, 2), dtype=dtype)
    table, used = rest[0], rest[1]
    for i in range(129):
        v[table[i, 0], 0] = numbers[(torch.arange(128) + 2 * i) % 254].view(2, 64)
    given = (q, k, v, *rest)
    assert plan(given)["widen"] != "none" and used[:129].eq(1).all()
    out, _ = run(given)
    expected = torch.stack([v[table[i, 0], 0] for i in range(129)]).to(dtype)
    assert torch.equal(out[:129], expected) and (out[129:] == 0).all()


def test_heads_one_after_the_other():
    """Heads take turns if the copies of all of them would be too large."""
    q, k, v, table, *rest = make_float8([(150, 210), (20, 300)], d=128, page=256)
    room = torch.full((2, 1100), -1, dtype=torch.int32)
    room[:, : table.shape[1]] = table
    given = (q, k, v, room, *rest)
    whole = plan((q, k, v, table, *rest))
    assert whole["grid"] == 1 and plan(given)["widen"] == whole["widen"]
    assert whole["workspace"] < plan(given)["workspace"] < 1 << 27
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 2.0]), **SCALES)


def test_more_keys_than_the_table_has_room_for():
    """And fewer than none: as many as there is room for, and none."""
    given = list(make_float8([(150, 300), (20, 160), (1, 9)], d=128))
    columns = given[3].shape[1]
    given[3] = given[3].clamp(0, len(given[1]) - 1)
    expected = given.copy()
    given[4] = torch.tensor([2**31 - 1, 160, -5], dtype=torch.int32)
    expected[4] = torch.tensor([16 * columns, 160, 0], dtype=torch.int32)
    for result, other in zip(run(given), run(expected), strict=True):
        assert torch.equal(result, other)


def test_a_bound_of_the_keys():
    values = list(arguments(make_float8([(150, 210), (20, 148)], d=128, page=256)))
    without = kernels.paged_attention_plan(*values)["workspace"]
    values[-4] = 210
    with_bound = kernels.paged_attention_plan(*values)["workspace"]
    assert with_bound < without
    kernels.paged_attention(*values, torch.full((with_bound,), torch.nan))
    other = run(make_float8([(150, 210), (20, 148)], d=128, page=256))
    assert torch.equal(values[10], other[0]) and torch.equal(values[11], other[1])


@pytest.mark.parametrize("seed", [0, 1])
def test_any_order_of_warps(seed):
    with running(lazy=True, seed=seed, multiprocessors=1):
        check(make_float8([(140, 300), (40, 200)], d=128), **SCALES)


def test_few_rows_widen_what_they_read():
    given = make_float8([(150, 3000)], d=128)
    assert plan(given)["widen"] != "none"
    assert plan(given, window=(100, 0))["widen"] == "none"
    with running(multiprocessors=132):
        assert plan(given)["widen"] == "none"
