# SPDX-License-Identifier: Apache-2.0
"""The launchers of nvfp4_gemv and nvfp4_linear: they need neither PyTorch nor a GPU."""

import json
import math
from pathlib import Path

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

E4M3, E2M1 = "float8_e4m3fn", "float4_e2m1fn_x2"


def outermost_last(make, m, n, batches, dtype, **options):
    """[m, n, l] with batches outermost in memory and n innermost."""
    return make(m, n, batches, dtype=dtype, strides=(n, 1, m * n), **options)


def permuted(make, m, groups, batches, **options):
    down, along = -(-m // 128), -(-groups // 4)
    strides = (16, 4, 512 * along, 1, 512, 512 * along * down)
    return make(32, 4, down, 4, along, batches, dtype=E4M3, strides=strides, **options)


def gemv(make, m=200, k=256, batches=2, **changes):
    groups = k // 16
    arguments = {
        "a": outermost_last(make, m, k // 2, batches, E2M1),
        "b": outermost_last(make, 1, k // 2, batches, E2M1),
        "scale_a": outermost_last(make, m, groups, batches, E4M3, device="cpu"),
        "scale_b": outermost_last(make, 1, groups, batches, E4M3, device="cpu"),
        "scale_a_permuted": permuted(make, m, groups, batches),
        "scale_b_permuted": permuted(make, 1, groups, batches),
        "c": make(m, 1, batches, dtype="float16", strides=(1, m, m)),
    } | changes
    return _C.nvfp4_gemv_plan(*arguments.values())


def test_gemv_sizes():
    for m in (1, 31, 33, 128, 4096, 7168, 100_001):
        for k in (32, 96, 1024, 7168, 16384, 131072):
            for batches in (1, 8):
                got = gemv(ExchangeTensor, m, k, batches)
                assert got["kernel"] == "nvfp4_gemv"
                assert got["block"] % 32 == 0 and got["block"] <= 896
                warps = got["block"] // 32
                assert (
                    warps % got["parts"] == 0 and got["rows_per_block"] == warps // got["parts"] * 4
                )
                assert got["grid"] * got["rows_per_block"] >= m * batches
                assert got["dynamic_smem"] <= 227 * 1024


def test_gemv_fills_the_gpu_once(make):
    got = gemv(make, 7168, 16384, 1)
    assert got["parts"] == 2 and got["block"] == 448  # two blocks a multiprocessor
    assert 132 < got["grid"] <= 264


def test_gemv_empty(make):
    assert gemv(make, 0, 64, 1)["kernel"] == "none"
    assert gemv(make, 4, 64, 0)["kernel"] == "none"
    assert gemv(make, 4, 0, 1)["grid"] >= 1  # zeros are written


BAD_GEMV = [
    (
        "a",
        lambda make: outermost_last(make, 200, 128, 2, "uint8"),
        TypeError,
        "`a` must have dtype float4_e2m1fn_x2, got uint8",
    ),
    (
        "a",
        lambda make: make(200, 128, dtype=E2M1),
        ValueError,
        "`a` must have 3 dimensions, got 2 (shape [200, 128])",
    ),
    (
        "b",
        lambda make: outermost_last(make, 128, 128, 2, E2M1),
        ValueError,
        "`b` must have shape [1, k / 2, l] = [1, 128, 2], got [128, 128, 2]",
    ),
    (
        "c",
        lambda make: make(200, 1, 2, dtype="bfloat16"),
        TypeError,
        "`c` must have dtype float16, got bfloat16",
    ),
    (
        "c",
        lambda make: make(200, 2, dtype="float16"),
        ValueError,
        "`c` must have 3 dimensions, got 2 (shape [200, 2])",
    ),
    (
        "scale_a",
        lambda make: outermost_last(make, 200, 16, 2, E4M3),
        ValueError,
        "`scale_a` must be a CPU tensor, got a tensor on cuda:0",
    ),
    (
        "scale_b",
        lambda make: outermost_last(make, 1, 8, 2, E4M3, device="cpu"),
        ValueError,
        "`scale_b` must have shape [1, k / 16, l] = [1, 16, 2], got [1, 8, 2]",
    ),
    (
        "scale_a_permuted",
        lambda make: permuted(make, 100, 16, 2),
        ValueError,
        "`scale_a_permuted` must have shape [32, 4, ceil(m / 128), 4, ceil(k / 64), l] = "
        "[32, 4, 2, 4, 4, 2], got [32, 4, 1, 4, 4, 2]",
    ),
    (
        "scale_a_permuted",
        lambda make: make(32, 4, 2, 4, 4, 2, dtype=E4M3),
        ValueError,
        "`scale_a_permuted` must have the strides of the permuted layout, "
        "[16, 4, 2048, 1, 512, 4096], got [256, 64, 32, 8, 2, 1]",
    ),
    (
        "scale_b_permuted",
        lambda make: permuted(make, 1, 16, 2, device="cpu"),
        ValueError,
        "`scale_b_permuted` must be on the device of `a`, a tensor on cuda:0, got a CPU tensor",
    ),
    (
        "a",
        lambda make: make(200, 128, 2, dtype=E2M1),
        NotImplementedError,
        "`a` must have neighbouring values along K and rows at multiples of 16 bytes, "
        "got strides [256, 2, 1]",
    ),
    (
        "b",
        lambda make: outermost_last(make, 1, 128, 2, E2M1, address=ADDRESS + 8),
        NotImplementedError,
        "`b` must have neighbouring values along K and rows at multiples of 16 bytes, "
        "got strides [128, 1, 128]",
    ),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), BAD_GEMV)
def test_bad_gemv_arguments_are_named(make, name, value, error, text):
    with pytest.raises(error) as info:
        gemv(make, **{name: value(make)})
    assert str(info.value) == f"nvfp4_gemv: {text}"


def test_gemv_limits(make):
    with pytest.raises(NotImplementedError, match="k must be a multiple of 32, got 48"):
        gemv(make, 4, 48, 1)
    with pytest.raises(NotImplementedError, match="k is supported up to 131072, got 131104"):
        gemv(make, 4, 131104, 1)


def linear(make, tokens=4, features=256, k=512, **changes):
    arguments = {
        "x": make(tokens, k, dtype="bfloat16"),
        "weight": make(features, k // 2, dtype=E2M1),
        "scale": make(features, k // 16, dtype=E4M3),
        "global_scale": None,
        "out": make(tokens, features, dtype="bfloat16"),
    } | changes
    return _C.nvfp4_linear_plan(*arguments.values())


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16])
def test_linear_sizes(tokens):
    for features in (1, 16, 100, 1024, 4096, 7168, 28672):
        for k in (64, 192, 2880, 4096, 7168, 16384, 28672):
            got = linear(ExchangeTensor, tokens, features, k)
            warps = got["block"] // 32
            assert warps % got["parts"] == 0 and got["grid"] % got["cluster"] == 0
            assert got["rows"] % (warps // got["parts"] * 16) == 0
            assert got["grid"] // got["cluster"] * got["rows"] >= features
            assert got["cluster"] * got["parts"] * got["passes"] * 256 >= k
            assert got["block"] <= 896
            assert got["dynamic_smem"] <= 226 * 1024 and got["cluster"] in (1, 2, 4, 8)


def test_linear_empty(make):
    assert linear(make, 0)["kernel"] == "none"
    assert linear(make, 4, 0)["kernel"] == "none"
    assert linear(make, 4, 16, 0)["grid"] >= 1  # zeros are written


BAD_LINEAR = [
    (
        "x",
        lambda make: make(4, 512, dtype="float16"),
        TypeError,
        "`x` must have dtype bfloat16, got float16",
    ),
    (
        "weight",
        lambda make: make(256, 128, dtype=E2M1),
        ValueError,
        "`weight` must have shape [N, K / 2] = [256, 256], got [256, 128]",
    ),
    (
        "scale",
        lambda make: make(256, 16, dtype=E4M3),
        ValueError,
        "`scale` must have shape [N, K / 16] = [256, 32], got [256, 16]",
    ),
    (
        "global_scale",
        lambda make: make(1, dtype="float16"),
        TypeError,
        "`global_scale` must have dtype float32, got float16",
    ),
    (
        "out",
        lambda make: make(4, 256, dtype="bfloat16", strides=(512, 1)),
        ValueError,
        "`out` must be contiguous, got strides [512, 1] for shape [4, 256]",
    ),
    (
        "out",
        lambda make: make(4, 256, dtype="bfloat16", device="cpu"),
        ValueError,
        "`out` must be on the device of `x`, a tensor on cuda:0, got a CPU tensor",
    ),
    (
        "x",
        lambda make: make(4, 512, dtype="bfloat16", strides=(516, 1)),
        NotImplementedError,
        "`x` must have rows of neighbouring elements at multiples of 16 bytes, "
        "got strides [516, 1]",
    ),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), BAD_LINEAR)
def test_bad_linear_arguments_are_named(make, name, value, error, text):
    with pytest.raises(error) as info:
        linear(make, **{name: value(make)})
    assert str(info.value) == f"nvfp4_linear: {text}"


def test_linear_limits(make):
    assert linear(make, 17)["kernel"].startswith("w4_tiles<e2m1, bfloat16")
    with pytest.raises(NotImplementedError, match="K must be a multiple of 64, got 48"):
        linear(make, 4, 16, 48)
    with pytest.raises(ValueError, match="`x` must have a multiple of 16 columns"):
        linear(make, 4, 16, 40)


def test_linear_fills_the_gpu_once(make):
    for tokens in (1, 8, 16):
        got = linear(make, tokens, 7168, 16384)
        assert 112 <= got["grid"] <= 132


SWEEPS = json.loads((Path(__file__).parent / "nvfp4_linear_h200.json").read_text())


def against_the_best(sweep):
    """The choice's time over the best configuration's, by what these took on an H200."""
    got = linear(ExchangeTensor, sweep["T"], sweep["N"], sweep["K"])
    warps = got["block"] // 32
    cut = (2, warps // got["parts"], got["parts"], got["cluster"])
    times = {tuple(row[:4]): row[4] for row in sweep["rows"]}
    return times[cut] / min(times.values())


@pytest.mark.parametrize("sweep", SWEEPS["sweeps"], ids=lambda s: f"T{s['T']}-{s['N']}x{s['K']}")
def test_linear_choice_was_measured_to_be_fast(sweep):
    assert against_the_best(sweep) <= 1.07


def test_linear_choices_are_near_the_best_all_together():
    logs = [math.log(against_the_best(sweep)) for sweep in SWEEPS["sweeps"]]
    assert len(logs) == 35
    assert math.exp(sum(logs) / len(logs)) < 1.01
