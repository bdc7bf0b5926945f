# SPDX-License-Identifier: Apache-2.0
"""The launcher of gated_linear with scales of blocks: it needs neither PyTorch nor a GPU."""

import pytest

from tiercel import _C

SILU = 2


def plan(make, m=64, n=2048, k=7168, config=None, activation=SILU, **changes):
    arguments = {
        "x": make(m, k, dtype="float8_e4m3fn"),
        "weight": make(2 * n, k, dtype="float8_e4m3fn"),
        "x_scale": make(m, -(-k // 128), dtype="float32"),
        "weight_scale": make(-(-2 * n // 128), -(-k // 128), dtype="float32"),
        "bias": None,
        "out": make(m, n, dtype="bfloat16"),
    } | changes
    rest = (activation,) if config is None else (activation, config)
    return _C.gated_linear_fp8_plan(*arguments.values(), *rest)


@pytest.mark.parametrize("m", [1, 16, 64, 128, 512, 4096])
def test_any_number_of_rows(make, m):
    got = plan(make, m)
    assert got["kernel"].startswith("gated_linear_blocks_fp8_")
    assert (got["splits"] > 1 or "split_k" in got["kernel"]) == (got["rows"] > 0)
    columns = got["tile_n"] // 2
    tiles = -(-m // (got["rows"] or got["tile_m"])) * -(-2048 // columns)
    assert got["grid"] <= max(132, tiles * got["splits"])


def test_configurations(make):
    for tile_m, tile_n, split_k in ((64, 64, True), (128, 128, False), (128, 256, False)):
        got = plan(make, config=(tile_m, tile_n, False, split_k, 1, 0))
        assert (got["tile_m"], got["tile_n"]) == (tile_m, tile_n)
    with pytest.raises(NotImplementedError, match="no precompiled kernel has it"):
        plan(make, config=(128, 144, False, False, 1, 0))


def test_bad_arguments(make):
    narrow = {"weight": make(2 * 1984, 7168, dtype="float8_e4m3fn")}
    narrow |= {"weight_scale": make(31, 56, dtype="float32")}
    narrow |= {"out": make(64, 1984, dtype="bfloat16")}
    with pytest.raises(NotImplementedError, match="N that is a multiple of 128 with scales"):
        plan(make, **narrow)
    with pytest.raises(ValueError, match=r"`weight_scale` must have shape \[2N / 128, K / 128\]"):
        plan(make, weight_scale=make(16, 56, dtype="float32"))
    with pytest.raises(ValueError, match=r"`x_scale` must have shape \[M, K / 128\]"):
        plan(make, x_scale=make(64, 1, dtype="float32"))
    with pytest.raises(TypeError, match="`x` must have dtype float8_e4m3fn"):
        plan(make, x=make(64, 7168, dtype="bfloat16"))
    with pytest.raises(NotImplementedError, match="gates are silu, gelu and gelu_tanh"):
        plan(make, activation=0)
