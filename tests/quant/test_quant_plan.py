# SPDX-License-Identifier: Apache-2.0
"""The quantising launchers' checks and choices: they need neither PyTorch nor a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
TENSOR, ROW, GROUP, BLOCK = range(4)
E4M3, E2M1 = "float8_e4m3fn", "float4_e2m1fn_x2"


def scale_shape(rows, columns, granularity):
    down, across = -(-rows // 128), -(-columns // 128)
    return [(1, 1), (rows, 1), (rows, across), (down, across)][granularity]


def fp8(make, rows, columns, granularity, dtype="bfloat16", *, changes=(), **x):
    arguments = {
        "x": make(rows, columns, dtype=dtype, **x),
        "q": make(rows, columns, dtype=E4M3),
        "scale": make(*scale_shape(rows, columns, granularity)),
        "partial": make(1024) if granularity == TENSOR else None,
    } | dict(changes)
    return _C.fp8_quantize_plan(*arguments.values(), granularity)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", range(4))
def test_every_size_has_a_plan(dtype, granularity):
    for rows in (1, 7, 64, 1000, 70_000):
        for columns in (8, 120, 128, 1000, 4096, 7168, 65536, 100_000):
            got = fp8(ExchangeTensor, rows, columns, granularity, dtype)
            assert got["kernel"].startswith("fp8_quantize_")
            assert got["block"] % 32 == 0 and 32 <= got["block"] <= 1024
            assert got["launches"] == (
                2 if "tensor<" in got["kernel"] and "small" not in got["kernel"] else 1
            )
            if granularity == ROW:
                each = 8 if rows == 70_000 and columns <= 1024 else 1  # a warp each
                assert got["grid"] == -(-rows // each)
                threads = got["block"] // each
                held = got["vectors"] * threads * 8
                assert held >= columns or "long" in got["kernel"]
            elif granularity == BLOCK:
                assert got["grid"] == -(-rows // 128) * -(-columns // 128)
            elif granularity == GROUP:
                assert got["grid"] * got["block"] * got["vectors"] * 8 >= rows * columns


def test_only_small_tensors_take_one_launch(make):
    assert fp8(make, 16, 4096, TENSOR)["launches"] == 1
    assert fp8(make, 4096, 4096, TENSOR)["launches"] == 2


def test_any_number_of_rows_has_a_plan(make):
    for granularity in range(4):
        assert fp8(make, 128 * 65536 + 1, 8, granularity)["grid"] >= 1
    with pytest.raises(NotImplementedError, match=r"rows hold at most 2\^33 values"):
        fp8(make, 1, 2**33 + 8, ROW)
    with pytest.raises(NotImplementedError, match="too many rows for one launch"):
        fp8(make, 2**31, 8, ROW)


def test_empty(make):
    assert fp8(make, 0, 64, ROW, address=0)["kernel"] == "none"
    assert fp8(make, 4, 0, GROUP, address=0)["kernel"] == "none"
    # A scale all the same.
    assert fp8(make, 4, 0, ROW, address=0)["grid"] == 4
    assert fp8(make, 0, 0, TENSOR, address=0)["launches"] == 1


BAD_FP8 = [
    (
        {"x": lambda make: make(4, 128, dtype="int8")},
        TypeError,
        "`x` must have dtype float32, bfloat16 or float16, got int8",
    ),
    ({"x": lambda make: make(128)}, ValueError, "`x` must have 2 dimensions, got 1 (shape [128])"),
    (
        {"q": lambda make: make(4, 128)},
        TypeError,
        "`q` must have dtype float8_e4m3fn, got float32",
    ),
    (
        {"q": lambda make: make(4, 64, dtype=E4M3)},
        ValueError,
        "`q` must have shape [T, K] = [4, 128], got [4, 64]",
    ),
    (
        {"scale": lambda make: make(4, 2)},
        ValueError,
        "`scale` must have shape [T, K / 128] = [4, 1], got [4, 2]",
    ),
    (
        {"scale": lambda make: make(4, 1, dtype="float16")},
        TypeError,
        "`scale` must have dtype float32, got float16",
    ),
    (
        {"q": lambda make: make(4, 128, dtype=E4M3, device="cpu")},
        ValueError,
        "`q` must be on the device of `x`, a tensor on cuda:0, got a CPU tensor",
    ),
    (
        {"q": lambda make: make(4, 128, dtype=E4M3, strides=(256, 1))},
        ValueError,
        "`q` must be contiguous, got strides [256, 1] for shape [4, 128]",
    ),
    (
        {"x": lambda make: make(4, 128, dtype="bfloat16", strides=(1, 4))},
        NotImplementedError,
        "`x` must have rows of neighbouring values at multiples of 16 bytes, got strides [1, 4]",
    ),
    (
        {"x": lambda make: make(4, 128, dtype="bfloat16", address=ADDRESS + 2)},
        NotImplementedError,
        "`x` must have rows of neighbouring values at multiples of 16 bytes, got strides [128, 1] "
        "and an address or rows off that",
    ),
    (
        {"x": lambda make: make(4, 128, dtype="bfloat16", device="cpu")},
        ValueError,
        "`x` must be a CUDA tensor, got a CPU tensor",
    ),
    ({"x": lambda make: [1.0]}, TypeError, "`x` must be a torch.Tensor, got list"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD_FP8)
def test_bad_arguments_are_named(make, changes, error, text):
    made = {name: value(make) for name, value in changes.items()}
    with pytest.raises(error) as info:
        fp8(make, 4, 128, GROUP, changes=made.items())
    assert str(info.value) == f"fp8_quantize: {text}"


def test_odd_rows_are_left_to_ref(make):
    with pytest.raises(NotImplementedError, match="a multiple of 8 values, got 100"):
        fp8(make, 4, 100, ROW)


def nvfp4(make, rows=4, columns=64, dtype="bfloat16", *, changes=(), **x):
    arguments = {
        "x": make(rows, columns, dtype=dtype, **x),
        "global_scale": None,
        "q": make(rows, columns // 2, dtype=E2M1),
        "scale": make(rows, columns // 16, dtype=E4M3),
    } | dict(changes)
    x, global_scale, q, scale = arguments.values()
    back = _C.nvfp4_dequantize_plan(q, scale, global_scale, x) if not changes else None
    plan = _C.nvfp4_quantize_plan(x, global_scale, q, scale)
    assert back is None or back["grid"] * back["block"] * 16 >= rows * columns
    return plan


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_sizes(make, dtype):
    for rows in (1, 7, 4096):
        for columns in (16, 48, 4096, 7168):
            got = nvfp4(make, rows, columns, dtype)
            assert got["grid"] * got["block"] * 16 >= rows * columns
    assert nvfp4(make, 0, 64, address=0)["kernel"] == "none"


BAD_NVFP4 = [
    (
        {"q": lambda make: make(4, 32, dtype="uint8")},
        TypeError,
        "`q` must have dtype float4_e2m1fn_x2, got uint8",
    ),
    (
        {"q": lambda make: make(4, 64, dtype=E2M1)},
        ValueError,
        "`q` must have shape [T, K / 2] = [4, 32], got [4, 64]",
    ),
    (
        {"scale": lambda make: make(4, 8, dtype=E4M3)},
        ValueError,
        "`scale` must have shape [T, K / 16] = [4, 4], got [4, 8]",
    ),
    (
        {"global_scale": lambda make: make(2)},
        ValueError,
        "`global_scale` must have shape [1] = [1], got [2]",
    ),
    (
        {"global_scale": lambda make: make(1, device="cpu")},
        ValueError,
        "`global_scale` must be on the device of `x`, a tensor on cuda:0, got a CPU tensor",
    ),
    (
        {"x": lambda make: make(4, 40, dtype="bfloat16")},
        ValueError,
        "`x` must have a multiple of 16 columns, got [4, 40]",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD_NVFP4)
def test_bad_nvfp4_arguments_are_named(make, changes, error, text):
    made = {name: value(make) for name, value in changes.items()}
    with pytest.raises(error) as info:
        nvfp4(make, changes=made.items())
    assert str(info.value) == f"nvfp4_quantize: {text}"


def turned(make, rows=130, columns=264, granularity=GROUP, changes=(), **x):
    down, across = -(-rows // 128), -(-columns // 128)
    arguments = {
        "x": make(rows, columns, dtype="bfloat16", **x),
        "q": make(rows, columns, dtype=E4M3),
        "scale": make(*scale_shape(rows, columns, granularity)),
        "q_t": make(columns, down * 128, dtype=E4M3),
        "scale_t": make(across, down) if granularity == BLOCK else make(down, columns),
    } | dict(changes)
    return _C.fp8_quantize_transpose_plan(*arguments.values(), granularity)


@pytest.mark.parametrize("granularity", [GROUP, BLOCK])
def test_a_block_for_each_tile_that_is_turned(make, granularity):
    for rows, columns, tiles in ((1, 8, 1), (128, 128, 1), (130, 264, 6)):
        assert turned(make, rows, columns, granularity)["grid"] == tiles
    for rows, columns in ((0, 64), (64, 0)):
        assert turned(make, rows, columns, granularity)["kernel"] == "none"


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q_t": ((264, 130), E4M3)}, ValueError, "`q_t` must have shape [K, T to a multiple of"),
        ({"q_t": ((264, 256), "int8")}, TypeError, "`q_t` must have dtype float8_e4m3fn"),
        ({"scale": ((130, 2), "float32")}, ValueError, "`scale` must have shape [T, K / 128]"),
        ({"scale_t": ((264, 2), "float32")}, ValueError, "`scale_t` must have shape [T / 128, K]"),
        ({"scale_t": ((2, 264), "float16")}, TypeError, "`scale_t` must have dtype float32"),
        ({"x": ((130, 264), "int8")}, TypeError, "`x` must have dtype float32, bfloat16 or"),
    ],
)
def test_what_cannot_be_turned(make, changes, error, text):
    made = {name: make(*shape, dtype=dtype) for name, (shape, dtype) in changes.items()}
    with pytest.raises(error) as info:
        turned(make, changes=made.items())
    assert str(info.value).startswith("fp8_quantize_transpose: ") and text in str(info.value)


def test_limits_of_turning(make):
    with pytest.raises(NotImplementedError, match="`x` must have a multiple of 8 columns, got 260"):
        turned(make, 130, 260)
    with pytest.raises(NotImplementedError, match="too many values for one launch"):
        turned(make, 2**31, 2**17)
    with pytest.raises(NotImplementedError, match="rows of neighbouring values"):
        turned(make, strides=(1, 130))
    for granularity in (TENSOR, ROW):
        with pytest.raises(ValueError, match="`granularity` must be 1x128 or 128x128"):
            turned(make, granularity=granularity)
