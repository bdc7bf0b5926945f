# SPDX-License-Identifier: Apache-2.0
"""The launcher of grouped_gemm with float8 operands: checks and plans, without PyTorch or a GPU."""

import pytest

from tiercel import _C

M, E, C, N, K = 1000, 4, 96, 320, 272
FLOAT8 = "float8_e4m3fn"


def plan(make, masked=False, m=M, e=E, c=C, n=N, k=K, index="int32", expected=0, **changes):
    rows = (e, c) if masked else (m,)
    across, down = -(-k // 128), -(-n // 128)
    arguments = {
        "x": make(*rows, k, dtype=FLOAT8),
        "w": make(e, n, k, dtype=FLOAT8),
        "offsets": make(e if masked else e + 1, dtype=index),
        "x_scale": make(*rows, across, dtype="float32"),
        "w_scale": make(e, down, across, dtype="float32"),
        "out": make(*rows, n, dtype="bfloat16"),
    }
    return _C.grouped_gemm_fp8_plan(*(arguments | changes).values(), expected)


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_plans(make, index):
    made = plan(make, index=index)
    assert made["kernel"] == "grouped_gemm_fp8_blocks_128x256"
    assert made["tiles"] == (M // 128 + E + 2) * 2
    assert made["grid"] == made["tiles"] and made["block"] == 384
    assert plan(make, m=100_000)["grid"] == 132
    few = plan(make, m=190, index=index)
    assert few["kernel"] == "grouped_gemm_fp8_blocks_64x128"
    assert few["tiles"] == (190 // 64 + E + 2) * 3
    assert all(p["dynamic_smem"] <= 232448 for p in (made, few))


def test_plans_of_counts(make):
    made = plan(make, masked=True)
    assert made["kernel"] == "grouped_gemm_fp8_blocks_128x256" and made["tiles"] == E * 2
    few = plan(make, masked=True, c=48)
    assert few["kernel"] == "grouped_gemm_fp8_blocks_64x128" and few["tiles"] == E * 3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("expected", "tile"), [(1, 64), (48, 64), (49, 128), (10**9, 128)])
def test_the_expected_rows_choose_the_tiles(make, masked, expected, tile):
    assert plan(make, masked, expected=expected)["tile_m"] == tile


def test_the_mode_has_one_choice(make):
    """In the batch-invariant mode neither the rows nor what is expected choose."""
    _C.set_batch_invariant(True)
    try:
        made = [plan(make, expected=1), plan(make, m=1), plan(make, masked=True, c=1), plan(make)]
    finally:
        _C.set_batch_invariant(False)
    assert {p["tile_m"] for p in made} == {128}


def test_nothing_to_do(make):
    assert plan(make, m=0)["kernel"] == "none"
    assert plan(make, masked=True, c=0)["kernel"] == "none"
    assert plan(make, masked=True, e=0)["kernel"] == "none"
    assert plan(make, e=0)["kernel"] != "none"  # zeros are to be written


F32, BF16 = "float32", "bfloat16"
WRONG = [
    (False, {"x": ((M,), FLOAT8)}, ValueError, "`x` must have 2 dimensions, got 1"),
    (False, {"x": ((M, K), BF16)}, TypeError, "`x` must have dtype float8_e4m3fn, got bfloat16"),
    (False, {"w": ((E, N, 128), FLOAT8)}, ValueError, r"`w` must have shape \[E, N, K\]"),
    (False, {"w": ((E, N, K), BF16)}, TypeError, "`w` must have dtype float8_e4m3fn"),
    (False, {"offsets": ((E,), "int32")}, ValueError, r"`w` must have shape \[E, N, K\]"),
    (False, {"offsets": ((E + 1,), F32)}, TypeError, "`offsets` must have dtype int32 or"),
    (False, {"x_scale": ((M, 2), F32)}, ValueError, r"`x_scale` must have shape \[M, K / 128\]"),
    (False, {"x_scale": ((M, 3), BF16)}, TypeError, "`x_scale` must have dtype float32"),
    (False, {"w_scale": ((E, 3, 2), F32)}, ValueError, r"`w_scale` must have shape \[E, rows"),
    (False, {"w_scale": ((E, N), F32)}, ValueError, "`w_scale` must have 3 dimensions, got 2"),
    (False, {"w_scale": ((E, 3, 3), BF16)}, TypeError, "`w_scale` must have dtype float32"),
    (False, {"out": ((M, 8), BF16)}, ValueError, r"`out` must have shape \[M, N\]"),
    (False, {"out": ((M, N), "float16")}, TypeError, "`out` must have dtype bfloat16"),
    (True, {"offsets": ((E + 1,), "int32")}, ValueError, r"`counts` must have shape \[E\]"),
    (True, {"offsets": ((E,), F32)}, TypeError, "`counts` must have dtype int32 or int64"),
    (True, {"x_scale": ((E, 3), F32)}, ValueError, r"`x_scale` must have shape \[E, C, K / 128\]"),
    (True, {"w": ((3, N, K), FLOAT8)}, ValueError, r"`w` must have shape \[E, N, K\]"),
    (True, {"out": ((E, N), BF16)}, ValueError, r"`out` must have shape \[E, C, N\]"),
]


@pytest.mark.parametrize(("masked", "changes", "error", "text"), WRONG)
def test_wrong_arguments(make, masked, changes, error, text):
    given = {name: make(*shape, dtype=dtype) for name, (shape, dtype) in changes.items()}
    with pytest.raises(error, match=f"grouped_gemm: {text}"):
        plan(make, masked, **given)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [{"n": 12}, {"k": 24}, {"e": 513}])
def test_what_the_kernels_do_not_take(make, masked, sizes):
    text = "must have multiples of 16 columns, and `w` of 8 rows, and there may be 512 groups"
    with pytest.raises(NotImplementedError, match=text):
        plan(make, masked, **sizes)


def test_layouts(make):
    apart = make(M, K, dtype=FLOAT8, strides=(K + 8, 1))
    with pytest.raises(NotImplementedError, match="`x`"):
        plan(make, x=apart)
    assert plan(make, x=make(M, K, dtype=FLOAT8, strides=(K + 16, 1)))["tile_m"] == 128
    columns = make(M, 3, dtype=F32, strides=(1, M))
    assert plan(make, x_scale=columns)["tile_m"] == 128
    far = make(M, 3, dtype=F32, strides=(2**31, 1))
    with pytest.raises(NotImplementedError, match="`x_scale` must have strides below 2"):
        plan(make, x_scale=far)
    with pytest.raises(ValueError, match="`w_scale` must be contiguous"):
        plan(make, w_scale=make(E, 3, 3, dtype=F32, strides=(18, 6, 2)))
    apart = make(E, C, K, dtype=FLOAT8, strides=((C + 1) * K, K, 1))
    with pytest.raises(NotImplementedError, match="`x` must have groups one after the other"):
        plan(make, masked=True, x=apart)
