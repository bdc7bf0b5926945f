# SPDX-License-Identifier: Apache-2.0
"""Checks and plans of moe_align_block_size, topk_softmax_align and moe_sum: no PyTorch, no GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C


def slots_for(numel, experts, block_size):
    slots = numel + experts * (block_size - 1)
    return min(numel * block_size, slots) if numel < experts else slots


def align(make, tokens, k, experts, block_size, /, **changes):
    numel = tokens * k
    slots = slots_for(numel, experts, block_size)
    size = _C.moe_align_block_size_workspace(numel, experts)
    values = {
        "topk_ids": make(tokens, k, dtype="int32"),
        "expert_map": None,
        "sorted_token_ids": make(slots, dtype="int32"),
        "expert_ids": make(-(-slots // block_size), dtype="int32"),
        "num_tokens_post_padded": make(1, dtype="int32"),
        "workspace": make(size, dtype="int32") if size else None,
        "block_size": block_size,
        "num_experts": experts,
        "ignore": False,
    }
    return _C.moe_align_block_size_plan(*(values | changes).values())


@pytest.mark.parametrize("experts", [1, 8, 60, 64, 128, 256, 257, 512, 1024])
@pytest.mark.parametrize("block_size", [1, 16, 48, 128, 256])
def test_every_size_has_a_plan(experts, block_size):
    k = min(8, experts)
    for tokens in (0, 1, 2, 16, 100, 128, 1000, 1024, 4096, 8192, 20_000, 100_003, 1 << 20):
        got = align(ExchangeTensor, tokens, k, experts, block_size)
        assert got["block"] % 32 == 0 and experts <= got["block"] <= 1024
        assert got["dynamic_smem"] <= 227 * 1024
        assert got["cluster"] in (1, 2, 4, 8)
        assert got["grid"] == got["cluster"] or got["launches"] == 2
        if got["launches"] == 1:  # all ids fit the threads' registers
            assert got["grid"] * got["block"] * got["items"] >= tokens * k
        assert (got["launches"] == 2) == (
            _C.moe_align_block_size_workspace(tokens * k, experts) > 0
        )


def test_large_outputs_are_spread(make):
    assert align(make, 128, 8, 512, 256)["cluster"] > 1
    assert align(make, 16, 8, 256, 256)["cluster"] > 1
    assert align(make, 1, 8, 64, 16)["cluster"] == 1


ALIGN_BAD = {
    "ids dtype": (
        lambda make: {"topk_ids": make(4, 2, dtype="int16")},
        TypeError,
        "`topk_ids` must have dtype int32 or int64, got int16",
    ),
    "ids rank": (
        lambda make: {"topk_ids": make(8, dtype="int32")},
        ValueError,
        "`topk_ids` must have 2 dimensions, got 1 (shape [8])",
    ),
    "ids strides": (
        lambda make: {"topk_ids": make(4, 2, dtype="int32", strides=(1, 4))},
        ValueError,
        "`topk_ids` must be contiguous, got strides [1, 4] for shape [4, 2]",
    ),
    "ids on the CPU": (
        lambda make: {"topk_ids": make(4, 2, dtype="int32", device="cpu")},
        ValueError,
        "`topk_ids` must be a CUDA tensor, got a CPU tensor",
    ),
    "block size": (
        lambda make: {"block_size": 0},
        ValueError,
        "`block_size` must be at least 1, got 0",
    ),
    "block size type": (
        lambda make: {"block_size": 1.5},
        TypeError,
        "`block_size` must be an int, got float",
    ),
    "experts": (
        lambda make: {"num_experts": 0},
        ValueError,
        "`num_experts` must be at least 1, got 0",
    ),
    "too many experts": (
        lambda make: {"num_experts": 1025},
        NotImplementedError,
        "at most 1024 experts are supported, got 1025",
    ),
    "too few slots": (
        lambda make: {"sorted_token_ids": make(127, dtype="int32")},
        ValueError,
        "`sorted_token_ids` must have at least 128 elements, got 127",
    ),
    "slots dtype": (
        lambda make: {"sorted_token_ids": make(128, dtype="int64")},
        TypeError,
        "`sorted_token_ids` must have dtype int32, got int64",
    ),
    "slots rank": (
        lambda make: {"sorted_token_ids": make(8, 16, dtype="int32")},
        ValueError,
        "`sorted_token_ids` must have 1 dimensions, got 2 (shape [8, 16])",
    ),
    "blocks": (
        lambda make: {"expert_ids": make(9, dtype="int32")},
        ValueError,
        "`expert_ids` must have shape [ceil(sorted_token_ids / block_size)] = [8], got [9]",
    ),
    "number": (
        lambda make: {"num_tokens_post_padded": make(2, dtype="int32")},
        ValueError,
        "`num_tokens_post_padded` must have shape [1] = [1], got [2]",
    ),
    "numbers": (  # it could be room for counters, of another number of blocks
        lambda make: {"num_tokens_post_padded": make(12, dtype="int32")},
        ValueError,
        "`num_tokens_post_padded` must have shape [1] = [1], got [12]",
    ),
    "other device": (
        lambda make: {"expert_ids": make(8, dtype="int32", device="cuda:1")},
        ValueError,
        "`expert_ids` must be on the device of `topk_ids`, a tensor on cuda:0, "
        "got a tensor on cuda:1",
    ),
    "map dtype": (
        lambda make: {"expert_map": make(16, dtype="int64")},
        TypeError,
        "`expert_map` must have dtype int32, got int64",
    ),
    "map shape": (
        lambda make: {"expert_map": make(15, dtype="int32")},
        ValueError,
        "`expert_map` must have shape [num_experts] = [16], got [15]",
    ),
    "no tensor": (
        lambda make: {"topk_ids": [[1]]},
        TypeError,
        "`topk_ids` must be a torch.Tensor, got list",
    ),
    "no bool": (
        lambda make: {"ignore": 1},
        TypeError,
        "`ignore_invalid_experts` must be a bool, got int",
    ),
    "no memory": (
        lambda make: {"topk_ids": make(4, 2, dtype="int32", address=0)},
        ValueError,
        "`topk_ids` must have memory, got a tensor without storage (fake or meta)",
    ),
}


@pytest.mark.parametrize("name", ALIGN_BAD)
def test_bad_arguments_of_align_are_named(make, name):
    changes, error, text = ALIGN_BAD[name]
    with pytest.raises(error) as info:
        align(make, 4, 2, 16, 16, **changes(make))
    assert str(info.value) == f"moe_align_block_size: {text}" and type(info.value) is error


def test_a_workspace_is_asked_for(make):
    size = _C.moe_align_block_size_workspace(1 << 23, 64)
    assert size > 0
    with pytest.raises(ValueError, match=f"`workspace` must have {size} elements, got None"):
        align(make, 1 << 20, 8, 64, 64, workspace=None)
    with pytest.raises(ValueError, match=r"`workspace` must have shape \[blocks \* num_experts\]"):
        align(make, 1 << 20, 8, 64, 64, workspace=make(size - 1, dtype="int32"))


def test_more_slots_than_int32_numbers(make):
    with pytest.raises(ValueError, match="more slots than int32 can number are needed, 2147"):
        align(make, 1 << 27, 16, 512, 256)


def fused(make, tokens, k, experts, block_size, dtype="bfloat16", **changes):
    slots = slots_for(tokens * k, experts, block_size)
    values = {
        "scores": make(tokens, experts, dtype=dtype),
        "weights": make(tokens, k),
        "indices": make(tokens, k, dtype="int32"),
        "expert_map": None,
        "sorted_token_ids": make(slots, dtype="int32"),
        "expert_ids": make(-(-slots // block_size), dtype="int32"),
        "num_tokens_post_padded": make(1, dtype="int32"),
        "block_size": block_size,
        "softmax_first": True,
        "renormalize": False,
        "ignore": False,
    }
    return _C.topk_softmax_align_plan(*(values | changes).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("experts", [1, 64, 65, 128, 200, 256, 512])
def test_choosing_and_sorting_has_a_plan(dtype, experts):
    for tokens in (0, 1, 16, 17, 100, 128):
        got = fused(ExchangeTensor, tokens, min(16, experts), experts, 64, dtype)
        assert got["kernel"].startswith("topk_softmax_align<")
        assert got["cluster"] * got["block"] // 32 >= tokens  # a warp a row
        assert got["cluster"] <= 8 and experts <= got["block"]
        assert got["dynamic_smem"] <= 64 * 1024


def test_bad_arguments_of_choosing_and_sorting_are_named(make):
    with pytest.raises(NotImplementedError) as info:
        fused(make, 129, 2, 16, 16)
    assert str(info.value) == "topk_softmax_align: one launch takes up to 128 tokens, got 129"
    with pytest.raises(ValueError) as info:
        fused(make, 4, 2, 16, 16, scores=make(4, 16, 1))
    assert str(info.value).startswith("topk_softmax_align: `scores` must have 2 dimensions, got 3")
    with pytest.raises(ValueError) as info:
        fused(make, 4, 2, 16, 16, sorted_token_ids=make(3, dtype="int32"))
    text = "topk_softmax_align: `sorted_token_ids` must have at least 128 elements, got 3"
    assert str(info.value) == text


def summed(make, tokens, k, columns, dtype="bfloat16", weighted=True, **changes):
    values = {
        "x": make(tokens, k, columns, dtype=dtype),
        "weights": make(tokens, k) if weighted else None,
        "out": make(tokens, columns, dtype=dtype),
    }
    return _C.moe_sum_plan(*(values | changes).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("columns", [1, 8, 96, 1000, 1408, 2048, 7168, 131072])
def test_sums_have_a_plan(dtype, columns):
    for tokens in (1, 7, 128, 4096, 100_000):
        for k in (1, 2, 3, 6, 8, 9, 32):
            got = summed(ExchangeTensor, tokens, k, columns, dtype)
            size = 4 if dtype == "float32" else 2
            vectors = columns * size // got["vector_bytes"]
            assert got["grid"][0] * got["block"][1] >= tokens
            assert got["grid"][1] * got["block"][0] >= vectors
            assert got["block"][0] * got["block"][1] <= 256
            assert (got["vector_bytes"] == 16) == (columns * size % 16 == 0)


def test_sums_load_as_the_alignment_allows(make):
    assert summed(make, 4, 8, 64)["vector_bytes"] == 16
    for changes in (
        {"x": make(4, 8, 64, dtype="bfloat16", address=ADDRESS + 2)},
        {"x": make(4, 8, 64, dtype="bfloat16", strides=(8 * 65, 65, 1))},
        {"x": make(4, 8, 64, dtype="bfloat16", strides=(1, 4, 32))},
        {"out": make(4, 64, dtype="bfloat16", address=ADDRESS + 8)},
    ):
        assert summed(make, 4, 8, 64, **changes)["vector_bytes"] == 2
    experts_first = make(4, 8, 64, dtype="bfloat16", strides=(64, 256, 1))
    assert summed(make, 4, 8, 64, x=experts_first)["vector_bytes"] == 16


def test_empty_sums_launch_nothing(make):
    assert summed(make, 0, 8, 64)["kernel"] == "none"
    assert summed(make, 4, 8, 0)["kernel"] == "none"
    assert summed(make, 4, 0, 64, weighted=False)["kernel"] != "none"  # zeros


SUM_BAD = {
    "x dtype": (
        lambda make: {"x": make(4, 8, 64, dtype="int32")},
        TypeError,
        "`x` must have dtype float32, bfloat16 or float16, got int32",
    ),
    "x rank": (
        lambda make: {"x": make(4, 64, dtype="bfloat16")},
        ValueError,
        "`x` must have 3 dimensions, got 2 (shape [4, 64])",
    ),
    "out dtype": (
        lambda make: {"out": make(4, 64)},
        TypeError,
        "`out` must have dtype bfloat16, got float32",
    ),
    "out shape": (
        lambda make: {"out": make(4, 63, dtype="bfloat16")},
        ValueError,
        "`out` must have shape [T, H] = [4, 64], got [4, 63]",
    ),
    "weights shape": (
        lambda make: {"weights": make(4, 7)},
        ValueError,
        "`weights` must have shape [T, k] = [4, 8], got [4, 7]",
    ),
    "weights dtype": (
        lambda make: {"weights": make(4, 8, dtype="bfloat16")},
        TypeError,
        "`weights` must have dtype float32, got bfloat16",
    ),
}


@pytest.mark.parametrize("name", SUM_BAD)
def test_bad_arguments_of_sums_are_named(make, name):
    changes, error, text = SUM_BAD[name]
    with pytest.raises(error) as info:
        summed(make, 4, 8, 64, **changes(make))
    assert str(info.value) == f"moe_sum: {text}" and type(info.value) is error
