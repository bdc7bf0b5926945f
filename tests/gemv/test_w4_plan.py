# SPDX-License-Identifier: Apache-2.0
"""The launcher of w4_linear: it needs neither PyTorch nor a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

import tiercel
from tiercel import _C

E4M3 = "float8_e4m3fn"
NVFP4, MXFP4, INT4 = range(3)
NONE, SILU = 0, 2


def w4(make, kind=MXFP4, tokens=64, features=256, k=512, activation=NONE, tiles=(), **changes):
    dtype = changes.pop("dtype", "bfloat16")
    scale = {
        NVFP4: lambda: make(features, k // 16, dtype=E4M3),
        MXFP4: lambda: make(features, k // 32, dtype="uint8"),
        INT4: lambda: make(features, k // 64, dtype=dtype),
    }[kind]()
    arguments = {
        "x": make(tokens, k, dtype=dtype),
        "weight": make(features, k // 2, dtype="uint8"),
        "scale": scale,
        "zero_point": None,
        "global_scale": None,
        "bias": None,
        "x_scale": None,
        "out": make(tokens, features, dtype=dtype),
    } | changes
    return _C.w4_linear_plan(*arguments.values(), kind, activation, *tiles)


@pytest.mark.parametrize("kind", [NVFP4, MXFP4, INT4])
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 64, 200, 1024, 8192])
def test_sizes(kind, tokens):
    for features in (1, 100, 2880, 28672):
        for k in (64, 2880, 4096, 28672):
            got = w4(ExchangeTensor, kind, tokens, features, k, SILU)
            assert 1 <= got["cluster"] <= 8 and got["grid"] % got["cluster"] == 0
            assert got["dynamic_smem"] <= 226 * 1024 and got["block"] <= 896
            if tokens <= 16:
                assert "_linear<tokens=" in got["kernel"]
                continue
            assert got["kernel"].startswith("w4_tiles<int4" if kind == INT4 else "w4_tiles<e2m1")
            tiles = -(-tokens // got["tokens"]) * -(-features // got["rows"])
            whole = tiles - got["tail"]
            assert got["grid"] == whole * got["cluster"]
            assert got["tail"] == 0 or (whole % 132 == 0 and 1 < got["tail_cluster"] <= 8)
            assert got["passes"] * got["cluster"] * 128 >= k


def test_few_tiles_split_k(make):
    assert w4(make, MXFP4, 32, 4096, 4096)["cluster"] > 1
    assert w4(make, MXFP4, 8192, 4096, 4096)["cluster"] == 1
    # 32 clusters of 4 would not run at once.
    assert w4(make, MXFP4, 64, 4096, 4096)["cluster"] == 3


def test_float16(make):
    for tokens in (1, 100):
        for kind in (NVFP4, INT4):
            assert "float16" in w4(make, kind, tokens, dtype="float16")["kernel"]
    with pytest.raises(NotImplementedError, match="MXFP4's scales need the range of bfloat16"):
        w4(make, MXFP4, dtype="float16")


def float8(make, kind=MXFP4, tokens=64, features=256, k=512, **changes):
    arguments = {
        "x": make(tokens, k, dtype=E4M3),
        "x_scale": make(tokens, dtype="float32"),
        "out": make(tokens, features, dtype="bfloat16"),
    }
    return w4(make, kind, tokens, features, k, **arguments | changes)


@pytest.mark.parametrize("kind", [MXFP4, INT4])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 200, 1024, 8192])
def test_float8_sizes(kind, tokens):
    for features in (1, 100, 2880, 28672):
        for k in (64, 2880, 4096, 28672):
            got = float8(ExchangeTensor, kind, tokens, features, k, activation=SILU)
            assert got["dynamic_smem"] <= 224 * 1024 and got["block"] <= 384
            name = "int4, group=32" if kind == INT4 else "e2m1"  # groups of 64
            assert got["kernel"].startswith(f"w4_float8<{name}")
            tiles = -(-tokens // got["tokens"]) * -(-features // got["rows"])
            whole = tiles - got["tail"]
            assert got["grid"] == whole * got["cluster"]
            assert got["tail"] == 0 or (whole % 132 == 0 and 1 < got["tail_cluster"] <= 8)
            assert got["passes"] * got["cluster"] * 128 >= k


def test_float8_kernels(make):
    scale = make(256, 4, dtype="float16")
    assert "group=128" in float8(make, INT4, scale=scale)["kernel"]
    assert float8(make, x_scale=make(dtype="float32"))["grid"] >= 1
    assert float8(make, tiles=((256, 128, 2),))["tokens"] == 256
    with pytest.raises(NotImplementedError, match="there is no such kernel"):
        float8(make, INT4, tiles=((256, 128, 1),))


FLOAT8_BAD = [
    (
        {"x": lambda make: make(64, 512, dtype="bfloat16")},
        TypeError,
        "`x` must have dtype float8_e4m3fn, got bfloat16",
    ),
    (
        {"out": lambda make: make(64, 256, dtype="float16")},
        TypeError,
        "`out` must have dtype bfloat16, got float16",
    ),
    (
        {"x_scale": lambda make: make(64, dtype="bfloat16")},
        TypeError,
        "`x_scale` must have dtype float32, got bfloat16",
    ),
    (
        {"x_scale": lambda make: make(63, dtype="float32")},
        ValueError,
        "`x_scale` must have 1 or T = 64 elements, got shape [63]",
    ),
    (
        {"x_scale": lambda make: make(64, dtype="float32", strides=(2,))},
        ValueError,
        "`x_scale` must be contiguous, got strides [2] for shape [64]",
    ),
    (
        {"x_scale": lambda make: make(64, dtype="float32", device="cpu")},
        ValueError,
        "`x_scale` must be on the device of `x`, a tensor on cuda:0, got a CPU tensor",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), FLOAT8_BAD)
def test_bad_float8_arguments_are_named(make, changes, error, text):
    with pytest.raises(error) as info:
        float8(make, **{name: value(make) for name, value in changes.items()})
    assert str(info.value) == f"w4_linear: {text}"


def test_float8_takes_no_nvfp4(make):
    with pytest.raises(ValueError, match="`format` must be mxfp4 or int4 where `x` is float8"):
        float8(make, NVFP4)


def test_given_kernels(make):
    got = w4(make, INT4, tiles=((128, 128, 4),))
    assert (got["tokens"], got["rows"], got["cluster"]) == (128, 128, 4)
    with pytest.raises(NotImplementedError, match="there is no such kernel"):
        w4(make, INT4, tiles=((80, 128, 1),))


def test_tiles_behind_the_last_wave(make):
    got = w4(make, MXFP4, 1024, 5120, 2880, tiles=((256, 128, 1, 4),))
    assert (got["grid"], got["tail"], got["tail_cluster"]) == (132, 28, 4)
    # 8 blocks for each would not run at once; there is no whole wave; there is no tail.
    for tokens, tiles in ((1024, (256, 128, 1, 8)), (512, (256, 128, 1, 2)), (64, (32, 128, 1, 3))):
        features = 128 * 66 if tokens == 64 else 5120
        with pytest.raises(NotImplementedError, match="there is no such kernel"):
            w4(make, MXFP4, tokens, features, 2880, tiles=(tiles,))


def test_a_plan_in_the_batch_invariant_mode_does_not_depend_on_the_tokens(make):
    def changed(plan):
        first, *others = (plan(tokens) for tokens in (1, 16, 17, 300, 8192))
        return {name for other in others for name in first if other[name] != first[name]}

    half, few = (lambda n: w4(make, INT4, n, dtype="float16")), (lambda n: w4(make, NVFP4, n))
    plans = [few, half, lambda n: float8(make, MXFP4, n), lambda n: float8(make, INT4, n)]
    assert all("kernel" in changed(plan) for plan in plans)
    with tiercel.batch_invariant():
        assert [changed(plan) for plan in plans] == [{"tokens"}, *3 * [{"grid"}]]
        assert few(8192)["tokens"] == 16 and half(1)["tokens"] == 128 and half(1)["tail"] == 0
        with pytest.raises(NotImplementedError, match="`tiles` must be None in the batch-inv"):
            w4(make, tiles=((64, 128, 1),))


def test_empty(make):
    assert w4(make, tokens=0)["kernel"] == "none"
    assert w4(make, features=0)["kernel"] == "none"
    assert w4(make, INT4, k=0, scale=make(256, 0, dtype="bfloat16"))["grid"] >= 1


BAD = [
    (
        {"x": lambda make: make(64, 512, dtype="float32")},
        TypeError,
        "`x` must have dtype bfloat16 or float16, got float32",
    ),
    (
        {"weight": lambda make: make(256, 256, dtype="int8")},
        TypeError,
        "`weight` must have dtype uint8 or float4_e2m1fn_x2, got int8",
    ),
    (
        {"weight": lambda make: make(256, 128, dtype="uint8")},
        ValueError,
        "`weight` must have shape [N, K / 2] = [256, 256], got [256, 128]",
    ),
    (
        {"scale": lambda make: make(256, 16, dtype=E4M3)},
        TypeError,
        "`scale` must have dtype uint8, got float8_e4m3fn",
    ),
    (
        {"scale": lambda make: make(256, 32, dtype="uint8")},
        ValueError,
        "`scale` must have shape [N, K / 32] = [256, 16], got [256, 32]",
    ),
    (
        {"zero_point": lambda make: make(256, 16, dtype="bfloat16")},
        ValueError,
        "`zero_point` is for int4 only",
    ),
    (
        {"global_scale": lambda make: make(2, dtype="float32")},
        ValueError,
        "`global_scale` must have shape [1] = [1], got [2]",
    ),
    (
        {"bias": lambda make: make(256, dtype="float16")},
        TypeError,
        "`bias` must have dtype bfloat16, got float16",
    ),
    (
        {"bias": lambda make: make(256, dtype="bfloat16", device="cpu")},
        ValueError,
        "`bias` must be on the device of `x`, a tensor on cuda:0, got a CPU tensor",
    ),
    (
        {"out": lambda make: make(64, 256, dtype="bfloat16", strides=(512, 1))},
        ValueError,
        "`out` must be contiguous, got strides [512, 1] for shape [64, 256]",
    ),
    (
        {"weight": lambda make: make(256, 256, dtype="uint8", address=ADDRESS + 8)},
        NotImplementedError,
        "`weight` must have rows of neighbouring elements at multiples of 16 bytes, "
        "got strides [256, 1]",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_bad_arguments_are_named(make, changes, error, text):
    with pytest.raises(error) as info:
        w4(make, **{name: value(make) for name, value in changes.items()})
    assert str(info.value) == f"w4_linear: {text}"


def test_bad_groups_are_named(make):
    with pytest.raises(ValueError, match=r"with a group of 32, 64 or 128, got \[256, 3\]"):
        w4(make, INT4, scale=make(256, 3, dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"`zero_point` must have shape as `scale` = \[256, 8\]"):
        w4(make, INT4, zero_point=make(256, 4, dtype="bfloat16"))
