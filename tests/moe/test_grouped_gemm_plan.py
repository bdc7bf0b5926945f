# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm's launcher: checks and plans, without PyTorch or a GPU."""

import pytest

from tiercel import _C

PLAIN, OF_X, OF_WEIGHT = range(3)
M, E, N, K = 1000, 4, 320, 136


def plan(make, kind, m=M, e=E, n=N, k=K, dtype="bfloat16", index="int32", **changes):
    x, grad, w = (m, k), (m, n), (e, n, k)
    a, b, out = {PLAIN: (x, w, grad), OF_X: (grad, w, x), OF_WEIGHT: (grad, x, w)}[kind]
    arguments = {
        "a": make(*a, dtype=dtype),
        "b": make(*b, dtype=dtype),
        "offsets": make(e + 1, dtype=index),
        "out": make(*out, dtype=dtype),
    } | changes
    return _C.grouped_gemm_plan(*arguments.values(), kind)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("kind", [PLAIN, OF_X, OF_WEIGHT])
def test_plans(make, kind, dtype, index):
    made = plan(make, kind, dtype=dtype, index=index)
    name = ("", "grad_x_", "grad_weight_")[kind] + {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    assert made["kernel"].startswith(f"grouped_gemm_{name}_")
    columns = N if kind == PLAIN else K
    rows = E * -(-N // 128) if kind == OF_WEIGHT else M // 128 + E + 2
    assert made["tiles"] == rows * -(-columns // made["tile_n"])
    assert made["grid"] == min(made["tiles"], 132) and made["block"] == 384
    assert made["dynamic_smem"] <= 232448


def test_nothing_to_do(make):
    assert plan(make, PLAIN, m=0)["kernel"] == "none"
    assert plan(make, OF_X, m=0)["kernel"] == "none"
    assert plan(make, OF_WEIGHT, e=0)["kernel"] == "none"
    # Zeros are to be written.
    assert plan(make, OF_WEIGHT, m=0)["kernel"] != "none"
    assert plan(make, PLAIN, e=0)["kernel"] != "none"


WRONG = [
    (PLAIN, {"b": ((E, N, 128), "bfloat16")}, ValueError, r"`w` must have shape \[E, N, K\]"),
    (PLAIN, {"b": ((E, N, K), "float16")}, TypeError, "`w` must have dtype bfloat16"),
    (PLAIN, {"out": ((M, 8), "bfloat16")}, ValueError, r"`out` must have shape \[M, N\]"),
    (PLAIN, {"offsets": ((E,), "int32")}, ValueError, r"`w` must have shape \[E, N, K\]"),
    (PLAIN, {"offsets": ((E + 1,), "float32")}, TypeError, "`offsets` must have dtype int32 or"),
    (OF_X, {"b": ((E, 8, K), "bfloat16")}, ValueError, r"`w` must have shape \[E, N, K\]"),
    (OF_X, {"out": ((8, K), "bfloat16")}, ValueError, r"`out` must have shape \[M, K\]"),
    (OF_WEIGHT, {"b": ((8, K), "bfloat16")}, ValueError, r"`x` must have shape \[M, K\]"),
    (OF_WEIGHT, {"out": ((E, K, N), "bfloat16")}, ValueError, r"`out` must have shape \[E, N, K\]"),
    (OF_WEIGHT, {"a": ((M,), "bfloat16")}, ValueError, "`grad` must have 2 dimensions, got 1"),
]


@pytest.mark.parametrize(("kind", "changes", "error", "text"), WRONG)
def test_wrong_arguments(make, kind, changes, error, text):
    given = {name: make(*shape, dtype=dtype) for name, (shape, dtype) in changes.items()}
    with pytest.raises(error, match=text):
        plan(make, kind, **given)


@pytest.mark.parametrize("kind", [PLAIN, OF_X, OF_WEIGHT])
@pytest.mark.parametrize("sizes", [{"n": 12}, {"k": 12}, {"e": 513}])
def test_what_the_kernels_do_not_take(make, kind, sizes):
    with pytest.raises(NotImplementedError, match="must have multiples of 8 columns, and there"):
        plan(make, kind, **sizes)


def test_rows_at_odd_bytes(make):
    x = make(M, K, dtype="bfloat16", strides=(K + 4, 1))
    with pytest.raises(NotImplementedError, match="`x`"):
        plan(make, PLAIN, a=x)


def test_an_unknown_kind(make):
    with pytest.raises(ValueError, match="no kind has the index 3"):
        _C.grouped_gemm_plan(*[make(1, dtype="bfloat16")] * 4, 3)
