# SPDX-License-Identifier: Apache-2.0
"""attention's checks and its choice of kernel: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

NO_LIMIT = -1


def plan(
    make,
    shape=(2, 300, 8, 128),
    keys=(300, 8),
    *,
    left=NO_LIMIT,
    right=NO_LIMIT,
    scale=0.1,
    softcap=0.0,
    dtype="bfloat16",
    lse=None,
    d_v=None,
    **given,
):
    batch, _, _, d = shape
    d_v = d_v or d
    results, values = (*shape[:3], d_v), (batch, *keys, d_v)
    shapes = {"q": shape, "k": (batch, *keys, d), "v": values, "out": results}
    tensors = [given.get(name) or make(*shape, dtype=dtype) for name, shape in shapes.items()]
    sinks = [given["sinks"]] if "sinks" in given else []
    return _C.attention_plan(*tensors, lse, left, right, scale, softcap, *sinks)


@pytest.mark.parametrize("d", [8, 40, 64, 72, 96, 128, 136, 192, 200, 256])
@pytest.mark.parametrize("right", [NO_LIMIT, 0, 30])
@pytest.mark.parametrize("left", [NO_LIMIT, 0, 100])
def test_every_head_dimension_and_mask_has_a_kernel(d, right, left):
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16")):
        for softcap in (0.0, 30.0):
            for seq in (1, 200, 1024, 1025, 5000):
                options = {"left": left, "right": right, "softcap": softcap, "dtype": dtype}
                got = plan(ExchangeTensor, (2, seq, 4, d), (seq, 2), **options)
                tile = min(
                    t for t in (64, 96, 128, 192, 256) if t >= d and (t != 96 or not softcap)
                )
                assert got["kernel"].startswith(f"attention_{short}_d{tile}_")
                assert got["kernel"].endswith("_capped") == (softcap != 0)
                assert got["dynamic_smem"] <= 232448  # what a block may have on Hopper
                tiles = -(-seq // got["tile_m"]) * 8
                assert got["grid"] == min(tiles, 132)
                assert 1 <= got["band"] <= 8


@pytest.mark.parametrize(
    ("d", "d_v", "dtype", "options", "kernel"),
    [
        (192, 128, "bfloat16", {}, "bf16_d192v128_128x128"),
        (192, 128, "bfloat16", {"right": 0}, "bf16_d192v128_128x128_causal"),
        (136, 8, "bfloat16", {"right": 0}, "bf16_d192v128_128x128_causal"),
        (192, 128, "bfloat16", {"left": 9}, "bf16_d192_128x96_window"),
        (192, 128, "bfloat16", {"softcap": 5.0}, "bf16_d192_128x96_window_capped"),
        (192, 128, "float16", {"right": 0}, "fp16_d192_128x96_causal"),
        (192, 136, "bfloat16", {}, "bf16_d192_128x96"),
        (200, 128, "bfloat16", {}, "bf16_d256_128x64"),
        (128, 192, "bfloat16", {}, "bf16_d192_128x96"),
        (64, 128, "bfloat16", {"right": 0}, "bf16_d96_128x128_causal"),
        (64, 8, "bfloat16", {}, "bf16_d64_192x128"),
    ],
)
def test_values_of_another_head_dimension(d, d_v, dtype, options, kernel):
    got = plan(ExchangeTensor, (2, 300, 8, d), (300, 8), d_v=d_v, dtype=dtype, **options)
    assert got["kernel"] == f"attention_{kernel}"
    assert got["dynamic_smem"] <= 232448


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ({}, "128x128"),
        ({"right": 0}, "128x128_causal"),
        ({"left": 10, "right": 0}, "128x128_window"),
        ({"left": 10}, "128x128_window"),
        ({"right": 10}, "128x128_window"),
        ({"right": 0, "softcap": 5.0}, "128x128_window_capped"),
    ],
)
def test_masks(make, options, ending):
    assert plan(make, **options)["kernel"] == "attention_bf16_d128_" + ending


def test_three_warpgroups_for_long_sequences():
    for seq, tile_m in ((512, 128), (1024, 128), (8192, 192)):
        got = plan(ExchangeTensor, (2, seq, 32, 64), (seq, 32), right=0)
        assert got["tile_m"] == tile_m


def test_which_heads_are_mixed():
    """All of a causal mask's, unless the L2 would not hold the keys of many short sequences."""
    causal = {"right": 0}
    assert plan(ExchangeTensor, (1, 16384, 16, 128), (16384, 16), **causal)["band"] == 16
    assert plan(ExchangeTensor, (32, 512, 16, 128), (512, 16), **causal)["band"] == 66
    assert plan(ExchangeTensor, (16, 1024, 16, 128), (1024, 16), **causal)["band"] == 33
    assert plan(ExchangeTensor, (32, 512, 16, 128), (512, 16))["band"] == 1
    assert plan(ExchangeTensor, (32, 512, 16, 128), (512, 16), left=64, **causal)["band"] == 1


def test_fewer_heads_at_a_time_where_there_are_many_keys():
    """All of these keys and values together would come from memory once for each tile."""
    for shape, band in (((1, 16384, 128, 192), 11), ((1, 8192, 128, 192), 12)):
        assert plan(ExchangeTensor, shape, (shape[1], 128), d_v=128, right=0)["band"] == band
    assert plan(ExchangeTensor, (1, 65536, 16, 128), (65536, 16), right=0)["band"] == 16
    assert plan(ExchangeTensor, (1, 16384, 128, 128), (16384, 8), right=0)["band"] == 128
    assert plan(ExchangeTensor, (4, 4096, 16, 192), (4096, 16), d_v=128, right=0)["band"] == 64


def test_empty_outputs_launch_nothing(make):
    for q in ((0, 5, 2, 64), (2, 0, 2, 64), (2, 5, 0, 64)):
        keys = (7, 0 if q[2] == 0 else 2)
        tensors = {name: make(*q, dtype="bfloat16", address=0) for name in ("q", "out")}
        for name in ("k", "v"):
            tensors[name] = make(q[0], *keys, 64, dtype="bfloat16", address=ADDRESS)
        got = plan(make, q, keys, **tensors)
        assert (got["kernel"], got["grid"]) == ("none", 0)


@pytest.mark.parametrize(
    ("error", "text", "name", "shape", "dtype"),
    [
        (TypeError, "`q` must have dtype bfloat16 or float16, got float32", "q", None, "float32"),
        (TypeError, "`k` must have dtype bfloat16, got float16", "k", None, "float16"),
        (TypeError, "`out` must have dtype bfloat16, got float32", "out", None, "float32"),
        (ValueError, "`q` must have 4 dimensions, got 3", "q", (2, 300, 8), "bfloat16"),
        (
            ValueError,
            r"`v` must have shape \[B, Sk, Hk, Dv\] = \[2, 300, 8, 128\], got \[2, 301, 8, 128\]",
            "v",
            (2, 301, 8, 128),
            "bfloat16",
        ),
        (
            ValueError,
            r"`out` must have shape \[B, Sq, H, Dv\] = \[2, 300, 8, 128\]",
            "out",
            (2, 300, 4, 128),
            "bfloat16",
        ),
    ],
)
def test_wrong_tensors(make, error, text, name, shape, dtype):
    tensor = make(*(shape or (2, 300, 8, 128)), dtype=dtype)
    with pytest.raises(error, match=f"^attention: {text}"):
        plan(make, **{name: tensor})


def test_wrong_heads_and_lse(make):
    with pytest.raises(ValueError, match="`k` must have a number of heads that divides that of"):
        plan(make, keys=(300, 3))
    lse = make(2, 8, 300, dtype="float32")
    assert plan(make, lse=lse)["grid"] > 0
    with pytest.raises(ValueError, match=r"`lse` must have shape \[B, H, Sq\] = \[2, 8, 300\]"):
        plan(make, lse=make(2, 300, 8, dtype="float32"))


@pytest.mark.parametrize(
    ("error", "text", "shape", "more"),
    [
        (TypeError, "`sinks` must have dtype float32, got bfloat16", (8,), {"dtype": "bfloat16"}),
        (ValueError, r"`sinks` must have shape \[H\] = \[8\], got \[9\]", (9,), {}),
        (ValueError, r"`sinks` must have shape \[H\]", (1, 8), {}),
        (ValueError, "`sinks` must be contiguous", (8,), {"strides": (2,)}),
    ],
)
def test_sinks(make, error, text, shape, more):
    assert plan(make, sinks=make(8, dtype="float32")) == plan(make, sinks=None) == plan(make)
    with pytest.raises(error, match=f"^attention: {text}"):
        plan(make, sinks=make(*shape, **{"dtype": "float32", **more}))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (
            "`q` must have a head dimension that is a multiple of 8 up to 256",
            {"shape": (2, 300, 8, 60)},
        ),
        ("`q` must have a head dimension .* got 264", {"shape": (2, 300, 8, 264)}),
        ("`v` must have a head dimension .* up to 256 .* got 60", {"d_v": 60}),
        ("`v` must have a head dimension .* got 264", {"d_v": 264}),
        ("`scale` must be positive", {"scale": -1.0}),
        ("`softcap` must be None or positive", {"softcap": -1.0}),
        ("`k` must have at least one key", {"keys": (0, 8)}),
    ],
)
def test_what_there_is_no_kernel_for(make, text, options):
    with pytest.raises(NotImplementedError, match=f"^attention: {text}"):
        plan(make, **options)


def test_what_the_copy_engine_cannot_do(make):
    shape = (2, 300, 8, 128)
    aside = {"q": make(*shape, dtype="bfloat16", address=ADDRESS + 8)}
    for name, text, tensor in (
        ("q", "start at a multiple of 16 bytes", aside["q"]),
        (
            "k",
            "be contiguous in its last dimension",
            make(*shape, dtype="bfloat16", strides=(300 * 8 * 256, 8 * 256, 256, 2)),
        ),
        (
            "v",
            "have row strides that are multiples of 16 bytes",
            make(*shape, dtype="bfloat16", strides=(300 * 8 * 132, 8 * 132, 132, 1)),
        ),
    ):
        with pytest.raises(NotImplementedError, match=f"^attention: `{name}` must {text}"):
            plan(make, **{name: tensor})
    packed = make(*shape, dtype="bfloat16", strides=(300 * 3072, 3072, 128, 1))
    assert plan(make, k=packed)["grid"] > 0
