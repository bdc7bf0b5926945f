# SPDX-License-Identifier: Apache-2.0
"""cross_entropy's checks and its choice of a launch: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

DTYPES = ["float32", "bfloat16", "float16"]
OPTIONS = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}


def plan(make, rows, columns, dtype="bfloat16", **given):
    tensors = {
        "logits": make(rows, columns, dtype=dtype),
        "target": make(rows, dtype="int64"),
        "weight": None,
        "scale": None,
        "loss": make(rows, dtype="float32"),
        "grad": make(rows, columns, dtype=dtype),
    }
    return _C.cross_entropy_plan(*(tensors | OPTIONS | given).values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "columns", [1, 7, 8, 1000, 4096, 32_000, 36_000, 50_257, 128_256, 151_936, 262_144, 442_365]
)
def test_every_size_has_a_plan_that_holds_it(dtype, columns):
    element = 4 if dtype == "float32" else 2
    for rows in (1, 8, 1000, 2**20):
        got = plan(ExchangeTensor, rows, columns, dtype)
        # A row may begin anywhere in its first vector of 16 bytes.
        vectors = -(-(columns * element + 16 - element) // 16)
        part = -(-vectors // got["blocks_per_row"]) * 16
        assert got["blocks_per_row"] in (1, 2, 4, 8)
        if part <= 4112 and got["blocks_per_row"] == 1:  # a warp for a row
            per_block = min(-(-rows // 132), 8)
            assert got["dynamic_smem"] == part * per_block
            assert got["grid"] == -(-rows // per_block) and got["block"] == 32 * per_block
            assert got["kernel"].startswith("cross_entropy_short<")
            continue
        assert got["dynamic_smem"] == part <= 216 << 10
        assert got["grid"] == rows * got["blocks_per_row"] and got["block"] == 256
        if part > 71 << 10:
            assert got["blocks_per_row"] == 8
        elif rows > 1000:  # no more blocks than it takes
            assert got["blocks_per_row"] == 1 or 2 * part > 71 << 10


def test_few_rows_are_spread():
    got = [plan(ExchangeTensor, rows, 32_000)["blocks_per_row"] for rows in (1, 16, 17, 34, 67)]
    assert got == [8, 8, 4, 2, 1]
    assert plan(ExchangeTensor, 1, 1000)["blocks_per_row"] == 1


def test_kernels(make):
    for dtype, name in zip(DTYPES, ("Float32", "BFloat16", "Float16"), strict=True):
        for grad in ("true", "false"):
            of_block = 2049 if dtype == "float32" else 4097
            for softcap in (None, 30.0):
                for columns, kernel in (
                    (64, f"cross_entropy_short<{name}>"),
                    (of_block, f"cross_entropy<{name}, gradient={grad}>"),
                ):
                    given = make(4, columns, dtype=dtype) if grad == "true" else None
                    got = plan(make, 4, columns, dtype, softcap=softcap, grad=given)
                    assert got["kernel"] == kernel


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1024), ("bfloat16", 2048)])
def test_short_rows_have_a_warp(dtype, most):
    for columns, name in ((most, "cross_entropy_short"), (most + 8, "cross_entropy")):
        assert plan(ExchangeTensor, 9999, columns, dtype)["kernel"].split("<")[0] == name
    got = [plan(ExchangeTensor, rows, most, dtype) for rows in (1, 132, 133, 65536)]
    assert [(one["grid"], one["block"]) for one in got] == [
        (1, 32), (132, 32), (67, 64), (8192, 256)
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_longest_rows(dtype):
    most = 442_365 if dtype == "float32" else 884_729
    assert plan(ExchangeTensor, 3, most, dtype)["blocks_per_row"] == 8
    text = f"^cross_entropy: rows of up to {most} logits are supported, got {most + 1}$"
    with pytest.raises(NotImplementedError, match=text):
        plan(ExchangeTensor, 3, most + 1, dtype)
    with pytest.raises(NotImplementedError, match="rows of up to 268435455 logits"):
        plan(ExchangeTensor, 3, 2**28, dtype)


def test_many_rows(make):
    assert plan(make, 2**31 - 1, 8)["grid"] == 2**28
    assert plan(make, 2**31 - 1, 8192)["grid"] == 2**31 - 1
    with pytest.raises(NotImplementedError, match="too many rows for one launch, got 2147483648"):
        plan(make, 2**31, 8)
    assert plan(make, 2**24, 4096)["grid"] == 2**24  # 2**36 logits


def test_empty_launches_nothing(make):
    got = plan(make, 0, 64)
    assert (got["kernel"], got["grid"]) == ("none", 0)


def test_strides(make):
    apart = make(4, 64, dtype="bfloat16", strides=(99, 1), address=ADDRESS + 2)
    assert plan(make, 4, 64, logits=apart)["grid"] == 4
    assert plan(make, 4, 64, target=make(4, dtype="int32", strides=(7,)))["grid"] == 4
    with pytest.raises(NotImplementedError, match="`logits` must be contiguous in its last"):
        plan(make, 4, 64, logits=make(4, 64, dtype="bfloat16", strides=(1, 4)))


@pytest.mark.parametrize(
    ("error", "text", "name", "shape", "dtype", "more"),
    [
        (TypeError, "`logits` must have dtype float32, bfloat16 or float16, got int32",
         "logits", (4, 64), "int32", {}),
        (ValueError, "`logits` must have 2 dimensions, got 1", "logits", (64,), "bfloat16", {}),
        (ValueError, "`logits` must be a CUDA tensor", "logits", (4, 64), "bfloat16",
         {"device": "cpu"}),
        (TypeError, "`target` must have dtype int64 or int32, got int16",
         "target", (4,), "int16", {}),
        (ValueError, "`target` must have 1 dimension", "target", (4, 1), "int64", {}),
        (ValueError, r"`target` must have shape \[T\] = \[4\], got \[5\]",
         "target", (5,), "int64", {}),
        (ValueError, "`target` must be on the device of `logits`", "target", (4,), "int64",
         {"device": "cuda:1"}),
        (TypeError, "`weight` must have dtype float32, got bfloat16",
         "weight", (64,), "bfloat16", {}),
        (ValueError, r"`weight` must have shape \[V\] = \[64\], got \[63\]",
         "weight", (63,), "float32", {}),
        (ValueError, "`weight` must be contiguous", "weight", (64,), "float32",
         {"strides": (2,)}),
        (ValueError, "`weight` must be on the device of `logits`", "weight", (64,), "float32",
         {"device": "cuda:1"}),
        (TypeError, "`scale` must have dtype float32, got float16", "scale", (4,), "float16", {}),
        (ValueError, r"`scale` must have shape \[T\] = \[4\], got \[3\]",
         "scale", (3,), "float32", {}),
        (ValueError, "`scale` must have 1 dimension", "scale", (4, 1), "float32", {}),
        (TypeError, "`loss` must have dtype float32, got bfloat16", "loss", (4,), "bfloat16", {}),
        (ValueError, r"`loss` must have shape \[T\] = \[4\]", "loss", (3,), "float32", {}),
        (TypeError, "`grad` must have dtype bfloat16, got float32",
         "grad", (4, 64), "float32", {}),
        (ValueError, r"`grad` must have shape \[T, V\] = \[4, 64\]",
         "grad", (4, 63), "bfloat16", {}),
    ],
)  # fmt: skip
def test_bad_tensors(make, error, text, name, shape, dtype, more):
    with pytest.raises(error, match=f"^cross_entropy: {text}"):
        plan(make, 4, 64, **{name: make(*shape, dtype=dtype, **more)})


def test_bad_options(make):
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="^cross_entropy: `label_smoothing` must be between"):
            plan(make, 4, 64, label_smoothing=value)
    for value in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="^cross_entropy: `softcap` must be a positive"):
            plan(make, 4, 64, softcap=value)
    with pytest.raises(ValueError, match="`logits` must have at least 1 column, got 0"):
        plan(make, 4, 0)


def test_mean_scale(make):
    target, weight = make(9, dtype="int64"), make(64, dtype="float32")
    for given in (None, weight):
        scale = make(1, dtype="float32")
        got = _C.cross_entropy_mean_scale_plan(target, given, scale, -100)
        assert (got["kernel"], got["grid"]) == ("cross_entropy_scale", 1)
    with pytest.raises(ValueError, match=r"`scale` must have shape \[T\] = \[1\], got \[2\]"):
        _C.cross_entropy_mean_scale_plan(target, None, make(2, dtype="float32"), -100)
    with pytest.raises(TypeError, match="`weight` must have dtype float32"):
        _C.cross_entropy_mean_scale_plan(
            target, make(64, dtype="bfloat16"), make(1, dtype="float32"), -100
        )


def targets(make, **changes):
    given = {
        "sums": make(50, 64, dtype="bfloat16"),
        "x": make(7, 64, dtype="bfloat16"),
        "target": make(7, dtype="int32"),
        "order": make(7, dtype="int64"),
        "by": make(7),
    }
    return _C.target_rows_plan(*(given | changes).values())


def test_what_targets_add(make):
    got = targets(make)
    assert got["kernel"].startswith("target_rows<BFloat16, elements=8")
    assert (got["grid"], got["parts"], got["block"]) == (7, 1, 32)
    wide = {"sums": make(50, 5000, dtype="float16"), "x": make(7, 5000, dtype="float16")}
    got = targets(make, **wide)
    assert (got["kernel"], got["parts"], got["block"]) == (
        "target_rows<Float16, elements=8>",
        3,
        256,
    )
    apart = make(7, 64, dtype="bfloat16", strides=(65, 1))
    assert targets(make, x=apart)["kernel"] == "target_rows<BFloat16, elements=1>"
    none = {"x": make(0, 64, dtype="bfloat16"), "target": make(0, dtype="int32")}
    none |= {"order": make(0, dtype="int64"), "by": make(0)}
    assert targets(make, **none)["kernel"] == "none"


@pytest.mark.parametrize(
    ("error", "text", "name", "shape", "dtype"),
    [
        (TypeError, "`sums` must have dtype bfloat16 or float16", "sums", (50, 64), "float32"),
        (TypeError, "`x` must have dtype bfloat16, got float16", "x", (7, 64), "float16"),
        (ValueError, r"`x` must have shape \[T, H\] = \[7, 64\]", "x", (7, 63), "bfloat16"),
        (TypeError, "`target` must have dtype int32", "target", (7,), "int64"),
        (TypeError, "`order` must have dtype int64", "order", (7,), "int32"),
        (ValueError, r"`by` must have shape \[T\] = \[7\], got \[8\]", "by", (8,), "float32"),
    ],
)
def test_bad_lists_of_targets(make, error, text, name, shape, dtype):
    with pytest.raises(error, match=f"^linear_cross_entropy: {text}"):
        targets(make, **{name: make(*shape, dtype=dtype)})


def entropy_plan(make, columns=1000, **given):
    changes = {n: v for n, v in given.items() if n not in ("entropy", "entropy_scale")}
    tensors = {
        "logits": make(4, columns, dtype="bfloat16"),
        "target": make(4, dtype="int64"),
        "weight": None,
        "scale": None,
        "loss": make(4, dtype="float32"),
        "grad": make(4, columns, dtype="bfloat16"),
    }
    more = {"entropy": make(4), "entropy_scale": make(4)}
    more |= {n: v for n, v in given.items() if n in more}
    values = (tensors | OPTIONS | changes | more).values()
    return _C.cross_entropy_and_entropy_plan(*values)


def test_kernels_for_entropies(make):
    assert entropy_plan(make)["kernel"] == "cross_entropy_short<BFloat16, entropy>"
    kernel = entropy_plan(make, 5000)["kernel"]
    assert kernel == "cross_entropy<BFloat16, gradient=true, entropy>"
    kernel = entropy_plan(make, 5000, grad=None, entropy_scale=None)["kernel"]
    assert kernel == "cross_entropy<BFloat16, gradient=false, entropy>"


BAD_ENTROPY = {
    "dtype": (
        lambda make: {"entropy": make(4, dtype="float16")},
        TypeError,
        "`entropy` must have dtype float32, got float16",
    ),
    "rows": (
        lambda make: {"entropy": make(5)},
        ValueError,
        "`entropy` must have shape [T] = [4], got [5]",
    ),
    "its gradient": (
        lambda make: {"entropy_scale": make(1)},
        ValueError,
        "`entropy_scale` must have shape [T] = [4], got [1]",
    ),
    "smoothing": (
        lambda make: {"label_smoothing": 0.5},
        ValueError,
        "`label_smoothing` must be 0 with an entropy, got 0.500000",
    ),
}


@pytest.mark.parametrize("name", BAD_ENTROPY)
def test_bad_arguments_of_entropies_are_named(make, name):
    changed, error, text = BAD_ENTROPY[name]
    with pytest.raises(error) as info:
        entropy_plan(make, **changed(make))
    assert str(info.value) == f"cross_entropy: {text}"
