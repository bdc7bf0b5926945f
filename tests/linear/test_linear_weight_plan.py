# SPDX-License-Identifier: Apache-2.0
"""The checks and choices of fp8_linear_weight_grad's launcher, without PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

E4M3 = "float8_e4m3fn"


def plan(make, n=64, k=16, tokens=144, add=False, **changes):
    across = -(-tokens // 128)
    given = {
        "grad": make(n, tokens, dtype=E4M3),
        "x": make(k, tokens, dtype=E4M3),
        "grad_scale": make(across, n),
        "x_scale": make(across, k),
        "out": make(n, k),
    }
    return _C.fp8_linear_weight_grad_plan(*(given | changes).values(), add)


def test_every_size_has_a_plan_that_covers_it():
    for n in (1, 64, 129, 2112, 7168):
        for k in (8, 136, 1024, 16384):
            for tokens in (16, 128, 4096):
                got = plan(ExchangeTensor, n, k, tokens)
                height = got["tile_m"] * got["cluster"]
                tiles = -(-got["rows"] // height) * -(-k // got["tile_n"])
                assert got["rows"] == n or (got["rows"] < n and got["rows"] % height == 0)
                assert got["kernel"].startswith(f"linear_weight_fp8_128x{got['tile_n']}")
                assert got["grid"] % got["cluster"] == 0
                assert got["grid"] <= min(132, tiles * got["cluster"])
                assert got["group"] >= 1 and got["block"] == 384
                assert got["dynamic_smem"] <= 227 * 1024


def test_few_tiles_are_narrow_and_many_are_wide():
    assert plan(ExchangeTensor, 1024, 1024, 8192)["tile_n"] == 128
    assert plan(ExchangeTensor, 4096, 4096, 8192)["tile_n"] == 256


def test_rows_that_fill_no_round_have_a_launch_of_their_own():
    """56 x 8 tiles of 128 x 256 take four rounds, the last one for a third of the GPU."""
    got = plan(ExchangeTensor, 7168, 2048, 8192)
    assert (got["tile_n"], got["rows"]) == (256, 6144)
    assert plan(ExchangeTensor, 7168, 2048, 128)["rows"] == 7168  # a launch costs more than that
    assert plan(ExchangeTensor, 4096, 4096, 8192)["rows"] == 4096  # nearly four whole rounds


def test_nothing_to_launch(make):
    for sizes in ((0, 16, 144), (64, 0, 144), (64, 16, 0)):
        assert plan(make, *sizes)["kernel"] == "none"


def test_layouts_that_are_taken(make):
    assert plan(make, grad=make(64, 144, dtype=E4M3, strides=(160, 1)))["grid"] == 1
    assert plan(make, grad_scale=make(2, 64, strides=(1, 2)))["grid"] == 1
    assert plan(make, out=make(64, 16, dtype="bfloat16"))["grid"] == 1
    assert plan(make, add=True)["grid"] == 1
    assert plan(make, tokens=128, x_scale=make(1, 16, strides=(2**40, 1)))["grid"] == 1


BAD = [
    ({"grad": {"dtype": "bfloat16"}}, TypeError, "`grad` must have dtype float8_e4m3fn"),
    ({"x": {"dtype": "bfloat16"}}, TypeError, "`x` must have dtype float8_e4m3fn"),
    ({"x": {"shape": (16, 128)}}, ValueError, "`x` must have shape [K, P] = [16, 144]"),
    ({"out": {"dtype": "float16"}}, TypeError, "`out` must have dtype float32 or bfloat16"),
    ({"out": {"shape": (64, 24)}}, ValueError, "`out` must have shape [N, K] = [64, 16]"),
    ({"out": {"strides": (32, 1)}}, ValueError, "`out` must be contiguous"),
    ({"grad_scale": {"dtype": "float16"}}, TypeError, "`grad_scale` must have dtype float32"),
    (
        {"grad_scale": {"shape": (1, 64)}},
        ValueError,
        "`grad_scale` must have shape [P / 128, N] = [2, 64], got [1, 64]",
    ),
    (
        {"x_scale": {"shape": (16, 2)}},
        ValueError,
        "`x_scale` must have shape [P / 128, K] = [2, 16], got [16, 2]",
    ),
    ({"x": {"device": "cpu"}}, ValueError, "`x` must be on the device of `grad`"),
    ({"grad": {"strides": (150, 1)}}, NotImplementedError, "`grad`"),
    ({"x": {"strides": (1, 16)}}, NotImplementedError, "`x`"),
    ({"x_scale": {"strides": (2**40, 1)}}, NotImplementedError, "must have strides from 0"),
    ({"out": {"address": ADDRESS + 8}}, NotImplementedError, "start at a multiple of 16 bytes"),
]
SHAPES = {
    "grad": (64, 144),
    "x": (16, 144),
    "grad_scale": (2, 64),
    "x_scale": (2, 16),
    "out": (64, 16),
}


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_bad_arguments_are_named(make, changes, error, text):
    made = {}
    for name, options in changes.items():
        default = {"dtype": E4M3} if name in ("grad", "x") else {}
        options = default | options
        made[name] = make(*options.pop("shape", SHAPES[name]), **options)
    with pytest.raises(error) as info:
        plan(make, **made)
    assert str(info.value).startswith("fp8_linear_weight_grad: ") and text in str(info.value)


def test_sizes_that_are_not_taken(make):
    for sizes, text in (((64, 12, 144), "a multiple of 8 rows K"), ((64, 16, 136), "dimension P")):
        with pytest.raises(NotImplementedError) as info:
            plan(make, *sizes)
        assert text in str(info.value)
    with pytest.raises(TypeError, match="`out` must have dtype float32, got bfloat16"):
        plan(make, add=True, out=make(64, 16, dtype="bfloat16"))
