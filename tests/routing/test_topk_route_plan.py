# SPDX-License-Identifier: Apache-2.0
"""The general router's checks and its choice of kernel: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def plan(
    rows, experts, k, bias=None, groups=(1, 1), shared=0, scoring=1, table=(None, None), **scores
):
    results = (ExchangeTensor(rows, k + shared), ExchangeTensor(rows, k + shared, dtype="int32"))
    softmax, options = (True, False), (scoring, *groups, 1.0, shared)
    return _C.topk_route_plan(
        ExchangeTensor(rows, experts, **scores), bias, *results, *softmax, *options, *table
    )


@pytest.mark.parametrize("dtype", SIZES)
def test_every_size_has_a_plan(dtype):
    for experts in range(1, 1025):
        for k in {1, 8, 32, experts} & set(range(1, min(32, experts) + 1)):
            got = plan(301, experts, k, dtype=dtype)
            assert got["lanes_per_row"] == 32 and got["grid"] == 76 and got["block"] == 128
            per_lane = next(n for n in (8, 16, 32) if 32 * n >= experts)
            assert f"per_lane={per_lane}>" in got["kernel"]


def test_groups_of_any_power_of_two():
    for n_group in (1, 2, 4, 8, 16, 32):
        for experts in range(n_group, 1025, n_group):
            plan(5, experts, 1, groups=(n_group, 1))
    with pytest.raises(NotImplementedError, match="17 groups of 60 experts are not supported"):
        plan(5, 1020, 1, groups=(17, 2))
    with pytest.raises(NotImplementedError, match="at most 32 groups are supported, got 64"):
        plan(5, 1024, 1, groups=(64, 2))


@pytest.mark.parametrize("dtype", SIZES)
def test_loads_are_as_wide_as_groups_allow(dtype):
    size = SIZES[dtype]
    assert plan(64, 256, 8, groups=(8, 4), dtype=dtype)["vector_bytes"] == 16
    assert plan(64, 160, 8, groups=(8, 4), dtype=dtype)["vector_bytes"] == 4 * size
    assert plan(64, 256, 8, dtype=dtype, address=ADDRESS + 4)["vector_bytes"] == 4
    assert plan(64, 127, 8, dtype=dtype)["vector_bytes"] == size
    assert plan(64, 128, 8, dtype=dtype, strides=(1, 64))["vector_bytes"] == size


def test_empty_batch_launches_nothing():
    assert plan(0, 64, 8)["kernel"] == "none"


def test_limits():
    with pytest.raises(NotImplementedError, match="at most 1024 experts are supported, got 1025"):
        plan(4, 1025, 2)
    with pytest.raises(NotImplementedError, match="supported up to together 32, got 33"):
        plan(4, 64, 30, shared=3)


def test_bad_arguments_are_named():
    with pytest.raises(
        ValueError, match="`n_group` must divide the number of experts, got 3 for 8"
    ):
        plan(4, 8, 2, groups=(3, 1))
    with pytest.raises(
        ValueError, match="`topk_group` must be between 1 and `n_group`, got 3 of 2"
    ):
        plan(4, 8, 2, groups=(2, 3))
    with pytest.raises(ValueError, match="k must be at most the experts of `topk_group` groups"):
        plan(4, 8, 3, groups=(4, 1))
    with pytest.raises(ValueError, match="`n_shared` must be at least 0, got -1"):
        plan(4, 8, 3, shared=-1)
    with pytest.raises(ValueError, match=r"`correction_bias` must have shape \[E\]"):
        plan(4, 8, 2, bias=ExchangeTensor(7))
    with pytest.raises(TypeError, match="`correction_bias` must have dtype float32"):
        plan(4, 8, 2, bias=ExchangeTensor(8, dtype="float16"))
    with pytest.raises(ValueError, match="scoring"):
        plan(4, 8, 2, scoring=3)


def test_large_calls_of_topk_softmax():
    for experts, k in ((513, 2), (64, 17), (1024, 32)):
        scores, weights = ExchangeTensor(5, experts), ExchangeTensor(5, k)
        indices = ExchangeTensor(5, k, dtype="int32")
        got = _C.topk_softmax_plan(scores, weights, indices, True, False)
        assert got["kernel"].startswith("topk_route<Float32")


@pytest.mark.parametrize("dtype", SIZES)
def test_experts_of_a_table(dtype):
    ids, table = ExchangeTensor(9, dtype="int64"), ExchangeTensor(50, 6, dtype="int32")
    got = plan(9, 256, 6, shared=1, table=(ids, table), dtype=dtype)
    assert got["kernel"] == "hash_route" and got["grid"] == 3 and got["block"] == 128
    assert plan(0, 256, 6, table=(ExchangeTensor(0, dtype="int32"), table))["kernel"] == "none"
    for wrong in ((ids, None), (None, table)):
        with pytest.raises(ValueError, match="`token_ids` and `expert_table` must be given tog"):
            plan(9, 256, 6, table=wrong)
    with pytest.raises(ValueError, match=r"`token_ids` must have shape \[T\]"):
        plan(8, 256, 6, table=(ids, table))
    with pytest.raises(TypeError, match="`token_ids` must have dtype int32 or int64"):
        plan(9, 256, 6, table=(ExchangeTensor(9), table))
    with pytest.raises(ValueError, match=r"`expert_table` must have shape \[tokens, k\]"):
        plan(9, 256, 5, table=(ids, table))
    with pytest.raises(TypeError, match="`expert_table` must have dtype int32"):
        plan(9, 256, 6, table=(ids, ExchangeTensor(50, 6, dtype="int64")))
    with pytest.raises(ValueError, match="`correction_bias` and `topk_group` must not be given"):
        plan(9, 256, 6, bias=ExchangeTensor(256), table=(ids, table))
