# SPDX-License-Identifier: Apache-2.0
"""softmax's checks and its choice of kernel: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C


def plan(make, *shape, dtype="bfloat16", mask=None, log=False, scale=1.0, **x):
    return _C.softmax_plan(
        make(*shape, dtype=dtype, **x), mask, make(*shape, dtype=dtype), scale, log
    )


def backward_plan(*shape, dtype="bfloat16", mask=None):
    tensors = [ExchangeTensor(*shape, dtype=dtype) for _ in range(3)]
    return _C.softmax_backward_plan(*tensors[:2], mask, tensors[2], 1.0, False)


SIZES = [1, 2, 8, 16, 17, 64, 100, 128, 255, 512, 1000, 1024, 1025, 2048, 4096, 5000, 16_384]
SIZES += [32_000, 50_257, 65_536, 128_256, 131_072, 131_080, 262_144, 1_000_003]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("columns", SIZES)
def test_every_size_has_a_plan_that_covers_it(dtype, columns):
    per_vector = 4 if dtype == "float32" else 8
    for rows in (1, 7, 1000, 100_000):
        mask = ExchangeTensor(rows, columns, dtype="bool")
        for got in (
            plan(ExchangeTensor, rows, columns, dtype=dtype),
            plan(ExchangeTensor, rows, columns, dtype=dtype, mask=mask),
            backward_plan(rows, columns, dtype=dtype),
            backward_plan(rows, columns, dtype=dtype, mask=mask),
        ):
            kernel = got["kernel"]
            assert {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16"}[
                dtype
            ] in kernel
            assert got["block"] <= 512 and got["block"] % 32 == 0
            wide = "softmax_forward_by_blocks_x8" in kernel and "aligned=true" in kernel
            assert got["blocks_per_row"] <= (16 if wide else 8)
            if "blocks" in kernel:
                assert got["threads_per_row"] <= 4096  # what shared memory has room for
            if "long" in kernel:
                continue
            held = int(kernel.partition("<")[0].rpartition("x")[2]) * got["threads_per_row"]
            extra = per_vector - 1 if columns % per_vector and rows > 1 else 0
            assert held * per_vector >= columns + extra
            if "lanes" in kernel:
                rows_covered = got["grid"] * got["block"] // got["threads_per_row"]
                assert rows <= rows_covered < rows + got["block"]
            else:
                assert got["grid"] == rows * got["blocks_per_row"]


def test_clusters_of_16_for_many_long_rows():
    def blocks(rows):
        return plan(ExchangeTensor, rows, 131_072, dtype="bfloat16")["blocks_per_row"]

    assert [blocks(rows) for rows in (8, 9, 70)] == [8, 16, 16]


@pytest.mark.parametrize("columns", [1032, 2048, 2056, 5001, 50_257, 65_536])
@pytest.mark.parametrize("offset", [0, 3, 8, 32])
def test_blocks_have_places_for_whole_lines_and_no_more(columns, offset):
    """They number rows from a multiple of 128 bytes, which is up to 63 scores before them."""
    shape, place = (4096, columns), {"dtype": "bfloat16", "address": ADDRESS + 2 * offset}
    mask = ExchangeTensor(*shape, dtype="float32")  # for the kernels of unaligned rows
    got = _C.softmax_plan(
        ExchangeTensor(*shape, **place), mask, ExchangeTensor(*shape, **place), 1.0, False
    )
    assert "aligned=false" in got["kernel"] and "by_blocks" in got["kernel"]
    shift = max((offset + row * columns) % 64 for row in range(64))
    vectors = -(-(columns + shift) // 8)
    a_warp = 32 * int(got["kernel"].partition("<")[0].rpartition("x")[2])
    warps = -(-vectors // (a_warp * got["blocks_per_row"]))
    assert got["block"] == 32 * max(warps, 2)


def test_rows(make):
    assert plan(make, 4, 5, 64)["vectors"] is True
    assert plan(make, 4, 5, 63)["vectors"] is True  # rows that move together
    assert plan(make, 4, 64, address=ADDRESS + 2)["vectors"] is False
    assert plan(make, 4, 64, strides=(72, 1))["vectors"] is True
    assert plan(make, 4, 64, strides=(65, 1))["vectors"] is False
    with pytest.raises(
        NotImplementedError, match="^softmax_online: `x` must have rows at one dist"
    ):
        plan(make, 4, 5, 32, strides=(200, 33, 1))
    with pytest.raises(
        NotImplementedError, match="^log_softmax: `x` must be contiguous in its last"
    ):
        plan(make, 4, 32, strides=(64, 2), log=True)


def test_empty_launches_nothing(make):
    for shape in ((0, 32), (4, 0), (0, 3, 8), (3, 0, 8)):
        got = plan(make, *shape, address=0)
        assert (got["kernel"], got["grid"]) == ("none", 0)


def test_masks(make):
    for strides in ((60, 20, 4, 1), (0, 0, 4, 1), (60, 0, 4, 1), (0, 0, 0, 1), (0, 4, 0, 0)):
        for dtype in ("bool", "float32", "bfloat16"):
            mask = make(2, 3, 5, 4, dtype=dtype, strides=strides)
            assert "masked=true" in plan(make, 2, 3, 5, 4, mask=mask)["kernel"]
    # A bool mask that lies as the scores do is read with them.
    for mask, aligned in (
        (make(4, 64, dtype="bool"), "true"),
        (make(4, 64, dtype="bool", strides=(0, 1)), "true"),
        (make(4, 64, dtype="bool", strides=(65, 1)), "false"),
        (make(4, 64, dtype="float32"), "false"),
    ):
        assert f"masked=true, aligned={aligned}" in plan(make, 4, 64, mask=mask)["kernel"]
    with pytest.raises(TypeError, match="`mask` must have dtype bool, float32 or that of `x`, got"):
        plan(make, 4, 8, mask=make(4, 8, dtype="int8"))
    with pytest.raises(
        ValueError, match=r"`mask` must have shape that of `x` = \[4, 8\], got \[8\]"
    ):
        plan(make, 4, 8, mask=make(8, dtype="bool"))
    with pytest.raises(ValueError, match="`mask` must be on the device of `x`"):
        plan(make, 4, 8, mask=make(4, 8, dtype="bool", device="cuda:1"))
    mask = make(2, 2, 2, 2, 8, dtype="bool", strides=(8, 0, 16, 0, 1))
    with pytest.raises(NotImplementedError, match="`mask` must be broadcast over dimensions that"):
        plan(make, 2, 2, 2, 2, 8, mask=mask)


def test_bad_arguments(make):
    with pytest.raises(
        TypeError, match="^softmax_online: `x` must have dtype float32, bfloat16 or"
    ):
        plan(make, 4, 8, dtype="int32")
    with pytest.raises(ValueError, match="^softmax_online: `x` must have at least 1 dimension"):
        plan(make)
    with pytest.raises(ValueError, match="`x` must be a CUDA tensor, got a CPU tensor"):
        _C.softmax_plan(make(4, 8, device="cpu"), None, make(4, 8, device="cpu"), 1.0, False)
    with pytest.raises(ValueError, match=r"`out` must have shape that of `x` = \[4, 8\]"):
        _C.softmax_plan(make(4, 8), None, make(4, 9), 1.0, False)
    with pytest.raises(NotImplementedError, match="a scale other than 0"):
        plan(make, 4, 8, scale=0.0)
