# SPDX-License-Identifier: Apache-2.0
"""The checks and the choice of kernel of qk_norm_rope and its gradients: without PyTorch and
without a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C


def call(make, tokens=6, heads=4, kv_heads=2, size=64, rotated=64, dtype="bfloat16", **changes):
    given = {
        "q": make(tokens, heads, size, dtype=dtype),
        "k": make(tokens, kv_heads, size, dtype=dtype),
        "positions": make(tokens, dtype="int32"),
        "cos_sin_cache": make(100, rotated),
        "q_weight": make(size),
        "k_weight": make(size, dtype=dtype),
        "eps": 1e-6,
        "interleaved": False,
        "q_out": make(tokens, heads, size, dtype=dtype),
        "k_out": make(tokens, kv_heads, size, dtype=dtype),
    } | changes
    return list(given.values())


def backward(make, tokens=6, heads=4, kv_heads=2, size=64, rotated=64, dtype="bfloat16", **changes):
    def like(count):
        return make(tokens, count, size, dtype=dtype)

    given = {
        "q": like(heads),
        "k": like(kv_heads),
        "grad_q_out": like(heads),
        "grad_k_out": like(kv_heads),
        "positions": make(tokens, dtype="int32"),
        "cos_sin_cache": make(100, rotated),
        "q_weight": make(size),
        "k_weight": make(size, dtype=dtype),
        "eps": 1e-6,
        "interleaved": False,
        "grad_q": like(heads),
        "grad_k": like(kv_heads),
        "grad_q_weight": make(size),
        "grad_k_weight": make(size, dtype=dtype),
        "workspace": None,
    } | changes
    return list(given.values())


def plan(make, *args, **changes):
    return _C.qk_norm_rope_plan(*call(make, *args, **changes))


def backward_plan(make, *args, **changes):
    return _C.qk_norm_rope_backward_plan(*backward(make, *args, **changes))


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize(
    ("size", "rotated", "lanes"),
    [(128, 128, 8), (64, 32, 4), (80, 16, 8), (256, 64, 16), (512, 512, 32), (8, 0, 1)],
)
def test_blocks_are_whole_warps(tokens, size, rotated, lanes):
    for heads, kv_heads in [(1, 1), (32, 8), (131, 3), (0, 1), (1, 0)]:
        given = (ExchangeTensor, tokens, heads, kv_heads, size, rotated)
        got = plan(*given)
        assert got["lanes"] == lanes and got["block"] % 32 == 0
        assert got["grid"] * got["block"] * 2 >= tokens * (heads + kv_heads) * lanes
        got = backward_plan(*given)
        assert got["lanes"] == lanes and got["block"] == 128
        assert got["grid"] == got["parts"] <= 528


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels(make, dtype, interleaved):
    name = {"bfloat16": "BFloat16", "float16": "Float16"}[dtype]
    kernel = backward_plan(make, dtype=dtype, interleaved=interleaved)["kernel"]
    assert kernel == f"qk_norm_rope_backward<{name}, interleaved={str(interleaved).lower()}>"
    assert "float8=false" in plan(make, dtype=dtype, interleaved=interleaved)["kernel"]


def test_an_empty_batch_launches_nothing(make):
    assert plan(make, tokens=0)["kernel"] == "none"
    assert backward_plan(make, tokens=0)["kernel"] == "none"


def odd(make, *shape, dtype="bfloat16"):
    return make(*shape, dtype=dtype, address=ADDRESS + 8)


LEFT_TO_REF = {
    "q off 16 bytes": lambda make: {"q": odd(make, 6, 4, 64)},
    "k off 16 bytes": lambda make: {"k": odd(make, 6, 2, 64)},
    "a weight off 16 bytes": lambda make: {"k_weight": odd(make, 64)},
    "angles off 16 bytes": lambda make: {"cos_sin_cache": odd(make, 100, 64)},
    "20 columns": lambda make: {"cos_sin_cache": make(100, 20)},
    "a size of 68": lambda make: {"size": 68},
    "a size of 520": lambda make: {"size": 520},
    "inner stride": lambda make: {"q": make(6, 4, 64, dtype="bfloat16", strides=(512, 128, 2))},
    "2**31 heads": lambda make: {"heads": 2**31},
    "2**31 rows": lambda make: {"cos_sin_cache": make(2**31, 64)},
}


@pytest.mark.parametrize("name", LEFT_TO_REF)
def test_left_to_ref(make, name):
    with pytest.raises(NotImplementedError, match="^qk_norm_rope: "):
        plan(make, **LEFT_TO_REF[name](make))
    with pytest.raises(NotImplementedError, match="^qk_norm_rope_backward: "):
        backward_plan(make, **LEFT_TO_REF[name](make))


@pytest.mark.parametrize("name", ["q_out", "k_out"])
def test_results_off_16_bytes(make, name):
    heads = 4 if name == "q_out" else 2
    with pytest.raises(NotImplementedError, match="multiples of 16 bytes"):
        plan(make, **{name: odd(make, 6, heads, 64)})
    with pytest.raises(NotImplementedError, match="multiples of 16 bytes"):
        backward_plan(make, **{f"grad_{name}": odd(make, 6, heads, 64)})


def test_more_heads_of_tokens_than_32_bits_count(make):
    with pytest.raises(NotImplementedError, match="too large for the kernels"):
        backward_plan(make, tokens=2**27, heads=32, kv_heads=1, size=8, rotated=0)


BAD = {
    "q dtype": (
        lambda make: {"q": make(6, 4, 64)},
        TypeError,
        "`q` must have dtype bfloat16 or float16, got float32",
    ),
    "k tokens": (
        lambda make: {"k": make(5, 2, 64, dtype="bfloat16")},
        ValueError,
        "`k` must have shape [T, Hk, D] = [6, 2, 64], got [5, 2, 64]",
    ),
    "positions": (
        lambda make: {"positions": make(5, dtype="int32")},
        ValueError,
        "`positions` must have shape [T] = [6], got [5]",
    ),
    "angles": (
        lambda make: {"cos_sin_cache": make(100, 66)},
        ValueError,
        "`cos_sin_cache` must have an even second dimension of at most D = 64, got 66",
    ),
    "weight dtype": (
        lambda make: {"q_weight": make(64, dtype="float16")},
        TypeError,
        "`q_weight` must have dtype bfloat16 or float32, got float16",
    ),
    "CPU": (
        lambda make: {"k": make(6, 2, 64, dtype="bfloat16", device="cpu")},
        ValueError,
        "`k` must be on the device of `q`, a tensor on cuda:0, got a CPU tensor",
    ),
}
BAD_FORWARD = {
    "k_out shape": (
        lambda make: {"k_out": make(6, 4, 64, dtype="bfloat16")},
        ValueError,
        "`k_out` must have shape [T, Hk, D] = [6, 2, 64], got [6, 4, 64]",
    ),
    "q_out dtype": (
        lambda make: {"q_out": make(6, 4, 64)},
        TypeError,
        "`q_out` must have dtype bfloat16, got float32",
    ),
}
BAD_BACKWARD = {
    "gradient's shape": (
        lambda make: {"grad_q_out": make(6, 2, 64, dtype="bfloat16")},
        ValueError,
        "`grad_q_out` must have shape [T, H, D] = [6, 4, 64], got [6, 2, 64]",
    ),
    "gradient's dtype": (
        lambda make: {"grad_k": make(6, 2, 64)},
        TypeError,
        "`grad_k` must have dtype bfloat16, got float32",
    ),
    "a weight's gradient": (
        lambda make: {"grad_q_weight": make(64, dtype="bfloat16")},
        TypeError,
        "`grad_q_weight` must have dtype float32, got bfloat16",
    ),
    "no weight": (
        lambda make: {"k_weight": None},
        ValueError,
        "`grad_k_weight` must be None without `k_weight`, got a tensor",
    ),
}


@pytest.mark.parametrize("name", BAD | BAD_FORWARD)
def test_bad_arguments_are_named(make, name):
    changed, error, text = (BAD | BAD_FORWARD)[name]
    for run, maker in ((_C.qk_norm_rope_plan, make), (_C.qk_norm_rope, ExchangeTensor)):
        with pytest.raises(error) as info:
            run(*call(maker, **changed(maker)))
        assert str(info.value) == f"qk_norm_rope: {text}"


@pytest.mark.parametrize("name", BAD | BAD_BACKWARD)
def test_bad_arguments_of_the_backward_are_named(make, name):
    changed, error, text = (BAD | BAD_BACKWARD)[name]
    launches = ((_C.qk_norm_rope_backward_plan, make), (_C.qk_norm_rope_backward, ExchangeTensor))
    for run, maker in launches:
        with pytest.raises(error) as info:
            run(*backward(maker, **changed(maker)))
        assert str(info.value) == f"qk_norm_rope_backward: {text}"


@pytest.mark.parametrize(
    ("workspace", "text"),
    [
        (None, "`workspace` must be a tensor if a weight's gradient is wanted, got None"),
        ((5, 64), "`workspace` must have shape [parts, D] = [3, 64], got [5, 64]"),
    ],
)
def test_a_workspace_that_does_not_fit(workspace, text):
    given = workspace and ExchangeTensor(*workspace)
    with pytest.raises(ValueError) as info:
        _C.qk_norm_rope_backward(*backward(ExchangeTensor, tokens=16, workspace=given))
    assert str(info.value) == f"qk_norm_rope_backward: {text}"
