# SPDX-License-Identifier: Apache-2.0
"""topk_softmax's checks and its choice of kernel: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

SCORE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


def plan(make, rows, experts, k, *, options=(True, False), indices="int32", **scores):
    return _C.topk_softmax_plan(
        make(rows, experts, **scores),
        make(rows, k),
        make(rows, k, dtype=indices),
        *options,
    )


@pytest.mark.parametrize("dtype", SCORE_DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 300, 4096, 100_003])
def test_every_size_has_a_plan(dtype, rows):
    for experts in range(1, 513):
        for k in {1, 2, 5, 8, 9, 16, experts} & set(range(1, min(16, experts) + 1)):
            got = plan(ExchangeTensor, rows, experts, k, dtype=dtype)
            assert got["kernel"] != "none"
            assert got["grid"] * got["rows_per_block"] >= rows
            assert (got["grid"] - 1) * got["rows_per_block"] < rows
            assert got["block"] % 32 == 0 and 32 <= got["block"] <= 1024
            assert got["lanes_per_row"] in (1, 2, 4, 8, 16, 32)
            assert got["lanes_per_row"] * got["rows_per_block"] <= got["block"]


@pytest.mark.parametrize("dtype", SCORE_DTYPES)
def test_loads_are_as_wide_as_the_alignment_allows(make, dtype):
    size = SCORE_DTYPES[dtype]
    assert plan(make, 64, 128, 8, dtype=dtype)["vector_bytes"] == 16
    # A base, a row stride or a row length that is off narrows the load, never below one element.
    for offset in (2, 4, 8):
        if offset >= size:
            got = plan(make, 64, 128, 8, dtype=dtype, address=ADDRESS + offset)
            assert got["vector_bytes"] == offset
    assert plan(make, 64, 127, 8, dtype=dtype)["vector_bytes"] == size
    odd_rows = plan(make, 64, 128, 8, dtype=dtype, strides=(129, 1))
    assert odd_rows["vector_bytes"] == size
    padded = plan(make, 64, 128, 8, dtype=dtype, strides=(160, 1))
    assert padded["vector_bytes"] == 16


def test_strided_scores_are_loaded_one_by_one(make):
    assert plan(make, 64, 128, 8, strides=(1, 64))["vector_bytes"] == 4
    assert plan(make, 64, 128, 8, strides=(256, 2))["vector_bytes"] == 4
    assert plan(make, 64, 128, 8, strides=(0, 1))["vector_bytes"] == 16  # one row, expanded


def test_empty_batch_launches_nothing(make):
    got = plan(make, 0, 64, 8, address=0)
    assert (got["kernel"], got["grid"]) == ("none", 0)


def test_more_than_2_to_31_elements(make):
    got = plan(make, (1 << 23) + 5, 512, 2, dtype="bfloat16")
    assert got["grid"] * got["rows_per_block"] >= (1 << 23) + 5


def test_both_index_dtypes_and_every_option(make):
    for options in [(a, b) for a in (True, False) for b in (True, False)]:
        for indices in ("int32", "int64"):
            assert plan(make, 5, 8, 2, options=options, indices=indices)["grid"] >= 1


def call(make, scores=None, weights=None, indices=None, options=(True, False)):
    return _C.topk_softmax_plan(
        make(4, 8) if scores is None else scores,
        make(4, 2) if weights is None else weights,
        make(4, 2, dtype="int32") if indices is None else indices,
        *options,
    )


# (arguments made by the producer, exception, text)
BAD = {
    "scores dtype": (
        lambda make: {"scores": make(4, 8, dtype="int64")},
        TypeError,
        "topk_softmax: `scores` must have dtype float32, bfloat16 or float16, got int64",
    ),
    "scores unknown dtype": (
        lambda make: {"scores": make(4, 8, dtype="complex64")},
        TypeError,
        "topk_softmax: `scores` must have dtype float32, bfloat16 or float16, "
        "got an unsupported dtype",
    ),
    "weights dtype": (
        lambda make: {"weights": make(4, 2, dtype="float16")},
        TypeError,
        "topk_softmax: `weights` must have dtype float32, got float16",
    ),
    "indices dtype": (
        lambda make: {"indices": make(4, 2, dtype="int16")},
        TypeError,
        "topk_softmax: `indices` must have dtype int32 or int64, got int16",
    ),
    "scores rank": (
        lambda make: {"scores": make(2, 4, 8)},
        ValueError,
        "topk_softmax: `scores` must have 2 dimensions, got 3 (shape [2, 4, 8])",
    ),
    "scores scalar": (
        lambda make: {"scores": make()},
        ValueError,
        "topk_softmax: `scores` must have 2 dimensions, got 0 (shape [])",
    ),
    "weights rank": (
        lambda make: {"weights": make(8)},
        ValueError,
        "topk_softmax: `weights` must have 2 dimensions, got 1 (shape [8])",
    ),
    "weights rows": (
        lambda make: {"weights": make(3, 2)},
        ValueError,
        "topk_softmax: `weights` must have shape [T, k] = [4, 2], got [3, 2]",
    ),
    "indices shape": (
        lambda make: {"indices": make(4, 3, dtype="int32")},
        ValueError,
        "topk_softmax: `indices` must have shape [T, k] = [4, 2], got [4, 3]",
    ),
    "k > E": (
        lambda make: {"weights": make(4, 9), "indices": make(4, 9, dtype="int32")},
        ValueError,
        "topk_softmax: k must be between 1 and the number of experts, got k = 9 for 8 experts",
    ),
    "k = 0": (
        lambda make: {"weights": make(4, 0), "indices": make(4, 0, dtype="int32")},
        ValueError,
        "topk_softmax: k must be between 1 and the number of experts, got k = 0 for 8 experts",
    ),
    "E = 0": (
        lambda make: {"scores": make(4, 0)},
        ValueError,
        "topk_softmax: k must be between 1 and the number of experts, got k = 2 for 0 experts",
    ),
    "E > 1024": (
        lambda make: {"scores": make(4, 1025)},
        NotImplementedError,
        "topk_softmax: at most 1024 experts are supported, got 1025",
    ),
    "k > 32": (
        lambda make: {
            "scores": make(4, 64),
            "weights": make(4, 33),
            "indices": make(4, 33, dtype="int32"),
        },
        NotImplementedError,
        "topk_softmax: k is supported up to 32, got 33",
    ),
    "CPU": (
        lambda make: {"scores": make(4, 8, device="cpu")},
        ValueError,
        "topk_softmax: `scores` must be a CUDA tensor, got a CPU tensor",
    ),
    "other device": (
        lambda make: {"scores": make(4, 8, device="vulkan:0")},
        ValueError,
        "topk_softmax: `scores` must be a CUDA tensor, got a tensor on another kind of device",
    ),
    "weights on CPU": (
        lambda make: {"weights": make(4, 2, device="cpu")},
        ValueError,
        "topk_softmax: `weights` must be on the device of `scores`, a tensor on cuda:0, "
        "got a CPU tensor",
    ),
    "indices on another GPU": (
        lambda make: {"indices": make(4, 2, dtype="int32", device="cuda:1")},
        ValueError,
        "topk_softmax: `indices` must be on the device of `scores`, a tensor on cuda:0, "
        "got a tensor on cuda:1",
    ),
    "weights strides": (
        lambda make: {"weights": make(4, 2, strides=(4, 1))},
        ValueError,
        "topk_softmax: `weights` must be contiguous, got strides [4, 1] for shape [4, 2]",
    ),
    "indices strides": (
        lambda make: {"indices": make(4, 2, dtype="int32", strides=(1, 4))},
        ValueError,
        "topk_softmax: `indices` must be contiguous, got strides [1, 4] for shape [4, 2]",
    ),
    "no memory": (
        lambda make: {"scores": make(4, 8, address=0)},
        ValueError,
        "topk_softmax: `scores` must have memory, got a tensor without storage (fake or meta)",
    ),
    "no tensor": (
        lambda make: {"scores": [[1.0]]},
        TypeError,
        "topk_softmax: `scores` must be a torch.Tensor, got list",
    ),
    "no bool": (
        lambda make: {"options": (True, 1)},
        TypeError,
        "topk_softmax: `renormalize` must be a bool, got int",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(make, name):
    arguments, error, text = BAD[name]
    with pytest.raises(error) as info:
        call(make, **arguments(make))
    assert str(info.value) == text
    assert type(info.value) is error


def test_a_launch_checks_the_same():
    make = ExchangeTensor
    for arguments, error, text in BAD.values():
        given = {"scores": make(4, 8), "weights": make(4, 2), "indices": make(4, 2, dtype="int32")}
        given |= arguments(make)
        options = given.pop("options", (True, False))
        with pytest.raises(error) as info:
            _C.topk_softmax(*given.values(), *options)
        assert str(info.value) == text


def test_wrong_number_of_arguments():
    with pytest.raises(TypeError, match="expected 5 positional arguments, got 2"):
        _C.topk_softmax(1, 2)
