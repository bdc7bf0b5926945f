# SPDX-License-Identifier: Apache-2.0
"""reduce's checks and its choice of kernels: neither needs PyTorch or a GPU."""

import itertools
import math

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
SUM, MEAN, MAX = 0, 1, 2


def plan(make, *shape, dim=-1, op=SUM, dtype="bfloat16", out_dtype=None, **x):
    left = list(shape)
    dim %= len(shape)
    del left[dim]
    out = make(*left, dtype=out_dtype or dtype)
    return _C.reduce_plan(make(*shape, dtype=dtype, **x), out, None, dim, op)


EDGES = [1, 2, 3, 8, 15, 64, 100, 129, 1000, 4096, 65536, 1 << 20]


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("op", [SUM, MEAN, MAX])
def test_every_size_has_a_plan(dtype, op):
    for rows, columns in itertools.product(EDGES, EDGES):
        for dim in (0, 1):
            got = plan(ExchangeTensor, rows, columns, dim=dim, op=op, dtype=dtype)
            assert got["grid"] >= 1 and got["block"] % 32 == 0 and 32 <= got["block"] <= 1024
            assert 1 <= got["parts"] <= max(1, (rows, columns)[dim])
            assert got["cluster"] in (1, got["parts"]) and got["cluster"] <= 8
            outputs = rows * columns // (rows, columns)[dim]
            combined = got["parts"] > 1 and got["cluster"] == 1
            assert got["workspace"] == (got["parts"] * outputs if combined else 0)
            assert (got["second"] != "none") == combined
            assert got["workspace"] * 4 <= max(rows * columns * SIZES[dtype], 1 << 20)


def test_three_dimensions():
    for shape in itertools.product([1, 3, 64, 1000], repeat=3):
        for dim in range(3):
            assert plan(ExchangeTensor, *shape, dim=dim)["grid"] >= 1


def test_which_way(make):
    assert plan(make, 4096, 4096)["kernel"].startswith("reduce_rows")
    assert plan(make, 4096, 4096, dim=0)["kernel"].startswith("reduce_columns<")
    assert plan(make, 4096, 4096, dim=0, strides=(1, 4096))["kernel"].startswith("reduce_rows")
    assert plan(make, 4096, 4096, strides=(1, 4096))["kernel"].startswith("reduce_columns<")
    assert plan(make, 4, 4096, 8, dim=1)["kernel"].startswith("reduce_columns<")
    assert plan(make, 4, 4096, 1, dim=1)["kernel"].startswith("reduce_rows")


@pytest.mark.parametrize("dtype", SIZES)
def test_loads_down_columns_are_wide_at_any_alignment(make, dtype):
    size = SIZES[dtype]
    assert plan(make, 512, 256, dim=0, dtype=dtype)["vector_bytes"] == 16
    unaligned = [
        plan(make, 512, 256, dim=0, dtype=dtype, address=ADDRESS + size),
        plan(make, 512, 256, dim=0, dtype=dtype, strides=(257, 1)),
        plan(make, 512, 255, dim=0, dtype=dtype),
    ]
    for got in unaligned:
        assert got["vector_bytes"] == 16 and got["kernel"].startswith("reduce_columns_shifted<")
    assert plan(make, 512, 63, dim=0, dtype=dtype)["vector_bytes"] == size  # too narrow for that
    # Along rows vectors are used at any alignment.
    assert plan(make, 512, 255, dtype=dtype, address=ADDRESS + size)["vector_bytes"] == 16
    assert plan(make, 512, 256, dtype=dtype, strides=(512, 2))["vector_bytes"] == size


def test_dimensions_that_lie_side_by_side_are_one(make):
    contiguous = plan(make, 2, 3, 4, 5, 6, 7, dim=2)
    assert contiguous["grid"] >= 1
    assert plan(make, 6, 4, 1, 8, dim=1, strides=(999, 8, 5, 1))["grid"] >= 1
    with pytest.raises(NotImplementedError) as info:
        plan(make, 4, 4, 4, 4, strides=(1000, 100, 10, 1))
    assert str(info.value) == (
        "reduce: `x` without `dim` must merge to at most two dimensions, got strides "
        "[1000, 100, 10, 1] for shape [4, 4, 4, 4]"
    )


def test_a_few_long_rows_fill_the_gpu(make):
    for rows, length in [(1, 1 << 26), (8, 1 << 22), (64, 1 << 20), (100, 100_000)]:
        assert plan(make, rows, length)["grid"] >= 132
    assert plan(make, 1 << 24, 64, dim=0)["grid"] >= 132


def test_more_than_2_to_31_elements(make):
    for shape in [(1 << 20, 1 << 13), (1 << 13, 1 << 20), (1, 1 << 33), (1 << 33, 1)]:
        for dim in (0, 1):
            assert plan(make, *shape, dim=dim)["grid"] >= 1
    with pytest.raises(NotImplementedError, match="too many results for one launch"):
        plan(make, 1 << 45, 1)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 4)])
def test_no_results_launch_nothing(make, shape):
    got = plan(make, *shape, dim=-1, address=0)
    assert (got["kernel"], got["grid"]) == ("none", 0)


def test_a_sum_over_nothing_is_launched(make):
    assert plan(make, 5, 0, address=0)["grid"] == 1
    assert plan(make, 0, 5, dim=0, op=MEAN, address=0)["grid"] >= 1


# What is changed in a right call: (x, out, workspace, dim, op), exception, text
BAD = {
    "rank": (
        lambda make: {"x": make()},
        ValueError,
        "`x` must have 1 to 8 dimensions, got 0",
    ),
    "dtype": (
        lambda make: {"x": make(4, 8, dtype="int32")},
        TypeError,
        "`x` must have dtype float32, bfloat16 or float16, got int32",
    ),
    "out dtype": (
        lambda make: {"out": make(4, dtype="float16")},
        TypeError,
        "`out` must have dtype bfloat16, got float16",
    ),
    "dim": (lambda make: {"dim": 2}, ValueError, "`dim` must be from 0 to 1, got 2"),
    "elements": (
        lambda make: {"out": make(8, dtype="bfloat16")},
        ValueError,
        "`out` must have 4 elements, got 8",
    ),
    "nothing to maximise": (
        lambda make: {"x": make(4, 0, dtype="bfloat16"), "op": MAX},
        ValueError,
        "`x` must not be empty in dimension 1 for a maximum, got shape [4, 0]",
    ),
    "CPU": (
        lambda make: {"x": make(4, 8, dtype="bfloat16", device="cpu")},
        ValueError,
        "`x` must be a CUDA tensor, got a CPU tensor",
    ),
    "out elsewhere": (
        lambda make: {"out": make(4, dtype="bfloat16", device="cuda:1")},
        ValueError,
        "`out` must be on the device of `x`, a tensor on cuda:0, got a tensor on cuda:1",
    ),
    "out strides": (
        lambda make: {"out": make(4, dtype="bfloat16", strides=(2,))},
        ValueError,
        "`out` must be contiguous, got strides [2] for shape [4]",
    ),
    "no memory": (
        lambda make: {"x": make(4, 8, dtype="bfloat16", address=0)},
        ValueError,
        "`x` must have memory, got a tensor without storage (fake or meta)",
    ),
    "no tensor": (lambda make: {"x": 3}, TypeError, "`x` must be a torch.Tensor, got int"),
    "operation": (lambda make: {"op": 3}, ValueError, "no operation has the index 3"),
}


def check_bad(make, name, function):
    changed, error, text = BAD[name]
    given = {
        "x": make(4, 8, dtype="bfloat16"),
        "out": make(4, dtype="bfloat16"),
        "workspace": None,
        "dim": 1,
        "op": SUM,
    }
    with pytest.raises(error) as info:
        function(*(given | changed(make)).values())
    assert str(info.value) == f"reduce: {text}"


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(make, name):
    check_bad(make, name, _C.reduce_plan)


@pytest.mark.parametrize("name", BAD)
def test_a_launch_checks_the_same(name):
    check_bad(ExchangeTensor, name, _C.reduce)


def test_the_workspace_is_asked_for_and_checked():
    make = ExchangeTensor
    x, out = make(1 << 24, dtype="bfloat16"), make(dtype="float32")
    needed = _C.reduce(x, out, None, 0, SUM)
    assert needed == _C.reduce_plan(x, out, None, 0, SUM)["workspace"] > 1
    for workspace, error, text in [
        (make(needed, dtype="bfloat16"), TypeError, "must have dtype float32, got bfloat16"),
        (make(needed + 1), ValueError, "must have shape [parts * outputs] = "),
        (make(needed, device="cpu"), ValueError, "must be on the device of `x`"),
    ]:
        with pytest.raises(error) as info:
            _C.reduce(x, out, workspace, 0, SUM)
        assert f"reduce: `workspace` {text}" in str(info.value)
    assert math.prod([needed]) < 1 << 16


def test_wrong_number_of_arguments():
    with pytest.raises(TypeError, match="expected 5 positional arguments, got 2"):
        _C.reduce(1, 2)
