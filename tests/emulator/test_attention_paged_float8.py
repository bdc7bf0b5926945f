# SPDX-License-Identifier: Apache-2.0
"""paged_attention on the emulator over float8 caches of any head dimension, and of float8 queries.

All slots of the caches behind a sequence's last key, and all unused pages, are NaN.
"""

import pytest
import torch
from support.emulator import kernels
from support.emulator import options as running
from support.paged import make, random_trees
from support.paged_emulator import arguments, check, run

import tiercel

pytestmark = pytest.mark.torch

FLOAT8 = torch.float8_e4m3fn
MIXED = [(1, 77), (40, 110), (0, 40), (3, 3), (1, 1), (0, 0), (20, 148)]
SCALES = {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([2.0, 0.5])}


def make_float8(lengths, *args, d, queries=None, **options):
    """Rows of the caches are apart by a multiple of 16 bytes."""
    room = -(-d // 16) * 16
    q, k, v, *rest = make(lengths, *args, d=room, **options)
    q, k, v = (x[..., :d] for x in (q, k.to(FLOAT8), v.to(FLOAT8)))
    assert k.float().isnan().any()
    return q if queries is None else q.nan_to_num().to(queries), k, v, *rest


def plan(given, **options):
    return kernels.paged_attention_plan(*arguments(given, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("lengths", [[(1, 77), (3, 20), (0, 5)], [(150, 210), (33, 33)]])
def test_nan_behind_every_length(lengths, d, dtype):
    check(make_float8(lengths, d=d, dtype=dtype), **SCALES)


@pytest.mark.parametrize("d", [64, 256])
def test_nan_behind_every_length_of_copies(d):
    given = make_float8([(150, 210), (1, 300), (0, 40), (200, 700)], d=d)
    with running(multiprocessors=1):
        assert plan(given)["widen"] != "none"
        check(given, **SCALES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [264, 384, 512])
@pytest.mark.parametrize("options", [{}, {"window": (40, 5), "causal": False}, {"softcap": 5.0}])
def test_wide_heads(d, dtype, options):
    given = make_float8(MIXED, d=d, dtype=dtype)
    assert "float8=true" in plan(given)["kernel"]
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 2.0]), **SCALES, **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 8, 64])
def test_pages_of_wide_heads(page, layout):
    check(make_float8([(20, 70), (1, 130)], d=504, page=page, layout=layout))


def test_trees_of_wide_heads():
    given = make_float8([(7, 20), (1, 70), (20, 5)], d=264, around=(2, 3))
    check(given, tree_mask=random_trees(given), **SCALES)


def test_each_number_is_widened_exactly_in_wide_heads():
    """One key a sequence: the result is its value."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F].view(FLOAT8)
    q, k, v, *rest = make_float8([(1, 1)] * 4, (1, 1), d=512)
    for i in range(4):
        v[rest[0][i, 0], 0, 0] = numbers[(torch.arange(512) + 64 * i) % 254]
    out, _ = run((q, k, v, *rest))
    expected = torch.stack([v[rest[0][i, 0], 0] for i in range(4)]).to(q.dtype)
    assert torch.equal(out, expected)


def bits_of_16_bits(given, **options):
    """Checks that the results are those of a cache that holds the same numbers in 16 bits."""
    narrow = (given[0], *(x.to(given[0].dtype) for x in given[1:3]), *given[3:])
    for one, other in zip(run(given, **options), run(narrow, **options), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_256_columns(page, multiprocessors):
    given = make_float8([(150, 210), (0, 40), (70, 300)], d=256, page=page)
    with running(multiprocessors=multiprocessors):
        got = plan(given)
        assert got["kernel"] == "attention_paged_bf16_d256_window_float8"
        assert (got["widen"] != "none") == (multiprocessors == 1)
        check(given, **SCALES)
        bits_of_16_bits(given)


@pytest.mark.parametrize("d", [144, 240])
@pytest.mark.parametrize("options", [{"window": (100, 0)}, {"causal": False}, {"softcap": 5.0}])
def test_masks_of_256_columns(d, options):
    check(make_float8([(150, 210), (20, 148)], d=d), **SCALES, **options)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_256_columns_in_any_order_of_warps(seed, multiprocessors):
    with running(lazy=True, seed=seed, multiprocessors=multiprocessors):
        check(make_float8([(70, 300), (40, 200)], d=256), **SCALES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [8, 72, 200])
@pytest.mark.parametrize("options", [{}, {"window": (100, 0)}, {"softcap": 5.0}])
def test_head_dimensions_that_are_no_multiple_of_16(d, dtype, options):
    """All keys are copied, also for decoding and with a window."""
    given = make_float8([(150, 210), (0, 40), (1, 77), (0, 0), (3, 0)], d=d, dtype=dtype)
    assert plan(given, **options)["widen"] != "none"
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 2.0]), **SCALES, **options)
    bits_of_16_bits(given, **options)


@pytest.mark.parametrize("d", [64, 256])
def test_a_chunk_has_the_bits_of_decoding_in_the_batch_invariant_mode(d):
    q, k, v, table, used, starts, _ = given = make_float8([(70, 300), (33, 40)], d=d)
    one_by_one = torch.zeros_like(q)
    with tiercel.batch_invariant():
        whole = run(given, **SCALES)
        assert plan(given)["kernel"].startswith("decode_attention<")
        check(given, **SCALES)
        for row in (0, 17, 69, 70, 102):
            b = int(row >= 70)
            seen = used[b] - (starts[b + 1] - 1 - row)
            alone = (q[row : row + 1], k, v, table[b : b + 1], seen[None], torch.tensor([0, 1]))
            alone = (*alone[:5], alone[5].int(), 1)
            one_by_one[row] = run(alone, **SCALES)[0][0]
            assert torch.equal(one_by_one[row], whole[0][row])


@pytest.mark.parametrize("d", [72, 264])
def test_other_head_dimensions_in_the_batch_invariant_mode(d):
    given = make_float8([(70, 300), (1, 40)], d=d)
    with tiercel.batch_invariant():
        check(given, **SCALES)
        bits_of_16_bits(given, softcap=5.0)


Q_SCALE = torch.tensor([0.25])


@pytest.mark.parametrize(
    ("lengths", "d", "kernel"),
    [
        ([(1, 77), (3, 20), (0, 5)], 128, "decode_attention<BFloat16, float8=true"),
        ([(150, 210), (33, 33)], 64, "attention_paged_bf16_d64_causal"),
        ([(150, 210), (0, 3)], 200, "attention_paged_bf16_d256_window_float8"),
        ([(20, 70), (1, 9)], 264, "attention_paged_wide<BFloat16, float8=true>"),
    ],
)
@pytest.mark.parametrize("scales", [{}, {"q_scale": Q_SCALE}, {"q_scale": Q_SCALE, **SCALES}])
def test_float8_queries(lengths, d, kernel, scales):
    given = make_float8(lengths, d=d, queries=FLOAT8, around=(2, 1))
    got = plan(given, **scales)
    assert got["convert"] == "paged_queries" and got["kernel"].startswith(kernel)
    check(given, torch.tensor([-torch.inf, 0.0, 5.0, 2.0]), **scales)
    wide = (given[0].bfloat16(), *given[1:])
    scales = {name: scale for name, scale in scales.items() if name != "q_scale"}
    for one, other in zip(run(given, **scales), run(wide, **scales), strict=True):
        assert torch.equal(one, other)


def test_float8_queries_in_rows_apart():
    q, *rest = make_float8([(5, 40), (1, 9)], d=64, queries=FLOAT8)
    check((torch.cat([q, q], 1)[:, :4], *rest), q_scale=Q_SCALE, softcap=3.0)
