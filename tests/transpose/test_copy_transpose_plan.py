# SPDX-License-Identifier: Apache-2.0
"""copy_transpose's checks and its choice of kernel: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

SIZES = {"int8": 1, "uint8": 1, "bool": 1, "bfloat16": 2, "float16": 2, "int16": 2}
SIZES |= {"float32": 4, "int32": 4}


def plan(make, *shape, tile=0, dtype="bfloat16", out_address=ADDRESS, **x):
    turned = (*shape[:-2], shape[-1], shape[-2])
    out = make(*turned, dtype=dtype, address=out_address)
    return _C.copy_transpose_plan(make(*shape, dtype=dtype, **x), out, tile)


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("tile", [0, 32, 64, 128])
def test_every_size_has_a_plan(dtype, tile):
    for shape in [(1, 1), (64, 64), (1000, 24), (33, 7), (5, 1 << 20), (1 << 20, 40), (3, 17, 65)]:
        got = plan(ExchangeTensor, *shape, tile=tile, dtype=dtype)
        if tile:
            assert got["tile_rows"] == got["tile_columns"] == tile
        down, across = -(-shape[-2] // got["tile_rows"]), -(-shape[-1] // got["tile_columns"])
        assert got["grid"] == down * across * (shape[0] if len(shape) == 3 else 1)
        assert 32 <= got["block"] <= 1024


@pytest.mark.parametrize("dtype", SIZES)
def test_vectors_are_taken_where_both_sides_allow_them(make, dtype):
    size = SIZES[dtype]
    assert plan(make, 256, 512, dtype=dtype, tile=128)["vector_bytes"] == 16
    for wrong in (
        {"address": ADDRESS + size},
        {"out_address": ADDRESS + size},
        {"strides": (513, 1)},
        {"strides": (1, 256)},
    ):
        assert plan(make, 256, 512, dtype=dtype, tile=128, **wrong)["vector_bytes"] == size
    assert plan(make, 255, 512, dtype=dtype, tile=128)["vector_bytes"] == size
    assert plan(make, 256, 511, dtype=dtype, tile=128)["vector_bytes"] == size
    assert plan(make, 256, 512, dtype=dtype, tile=128, strides=(640, 1))["vector_bytes"] == 16
    assert plan(make, 2, 256, 512, dtype=dtype, tile=128)["vector_bytes"] == 16


def test_large_and_many_matrices(make):
    got = plan(make, 1 << 17, 1 << 17)
    assert got["grid"] * got["tile_rows"] * got["tile_columns"] == 1 << 34
    assert plan(make, 1 << 20, 8, 8)["grid"] == 1 << 20
    with pytest.raises(NotImplementedError, match="too large for one launch"):
        plan(make, 1 << 24, 1 << 24)
    for shape in ((1 << 37, 1), (1, 1 << 37), (1 << 40, 1 << 20), (1 << 33, 1, 1)):
        with pytest.raises(NotImplementedError, match="too large for one launch"):
            plan(make, *shape, dtype="uint8")


@pytest.mark.parametrize(
    ("matrices", "rows", "columns"),
    [(64, 196, 386), (400, 101, 104), (300, 104, 107), (1, 250, 99_992)],
)
def test_short_columns_are_whole(matrices, rows, columns):
    got = plan(ExchangeTensor, matrices, rows, columns)
    assert "columns" in got["kernel"] and got["tile_rows"] == rows
    # A tile's first column begins on 16 bytes of out.
    assert got["tile_columns"] * rows * 2 % 16 == 0
    unaligned = plan(ExchangeTensor, matrices, rows, columns, out_address=ADDRESS + 2)
    assert "realigned" in unaligned["kernel"]
    if rows % 8:  # else matrices of any number of columns begin on 16 bytes
        assert "realigned" in plan(ExchangeTensor, 200, rows, 387)["kernel"]
    assert "realigned" in plan(ExchangeTensor, matrices, rows + 256, columns)["kernel"]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_nothing_to_copy_launches_nothing(make, shape):
    got = plan(make, *shape, address=0, out_address=0)
    assert (got["kernel"], got["grid"]) == ("none", 0)


# (x, out, tile, exception, text) of what is changed in a right call
BAD = {
    "rank": (
        lambda make: {"x": make(8, dtype="bfloat16")},
        ValueError,
        "`x` must have 2 or 3 dimensions, got 1 (shape [8])",
    ),
    "dtype": (
        lambda make: {"x": make(4, 8, dtype="int64")},
        TypeError,
        "`x` must have dtype bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, int8, uint8, "
        "bool, int16 or int32, got int64",
    ),
    "out dtype": (
        lambda make: {"out": make(8, 4, dtype="float16")},
        TypeError,
        "`out` must have dtype bfloat16, got float16",
    ),
    "out shape": (
        lambda make: {"out": make(4, 8, dtype="bfloat16")},
        ValueError,
        "`out` must have shape [N, M] = [8, 4], got [4, 8]",
    ),
    "batched out shape": (
        lambda make: {"x": make(2, 4, 8, dtype="bfloat16")},
        ValueError,
        "`out` must have shape [B, N, M] = [2, 8, 4], got [8, 4]",
    ),
    "tile": (
        lambda make: {"tile": 48},
        ValueError,
        "`tile_size` must be 32, 64 or 128, got 48",
    ),
    "CPU": (
        lambda make: {"x": make(4, 8, dtype="bfloat16", device="cpu")},
        ValueError,
        "`x` must be a CUDA tensor, got a CPU tensor",
    ),
    "out elsewhere": (
        lambda make: {"out": make(8, 4, dtype="bfloat16", device="cuda:1")},
        ValueError,
        "`out` must be on the device of `x`, a tensor on cuda:0, got a tensor on cuda:1",
    ),
    "out strides": (
        lambda make: {"out": make(8, 4, dtype="bfloat16", strides=(1, 8))},
        ValueError,
        "`out` must be contiguous, got strides [1, 8] for shape [8, 4]",
    ),
    "no memory": (
        lambda make: {"x": make(4, 8, dtype="bfloat16", address=0)},
        ValueError,
        "`x` must have memory, got a tensor without storage (fake or meta)",
    ),
    "no tensor": (lambda make: {"x": 3}, TypeError, "`x` must be a torch.Tensor, got int"),
}


def check_bad(make, name, function):
    changed, error, text = BAD[name]
    given = {"x": make(4, 8, dtype="bfloat16"), "out": make(8, 4, dtype="bfloat16"), "tile": 0}
    with pytest.raises(error) as info:
        function(*(given | changed(make)).values())
    assert str(info.value) == f"copy_transpose: {text}"


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(make, name):
    check_bad(make, name, _C.copy_transpose_plan)


@pytest.mark.parametrize("name", BAD)
def test_a_launch_checks_the_same(name):
    check_bad(ExchangeTensor, name, _C.copy_transpose)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="expected 3 positional arguments, got 2"):
        _C.copy_transpose(1, 2)
    tensors = ExchangeTensor(4, 8), ExchangeTensor(8, 4)
    with pytest.raises(TypeError):
        _C.copy_transpose_plan(*tensors, "64")
