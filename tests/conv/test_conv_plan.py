# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d's checks and its choice of a launch: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ExchangeTensor

from tiercel import _C

DTYPES = ["float32", "bfloat16", "float16"]


def plan(make, *shape, dtype="bfloat16", width=4, **given):
    tensors = {
        "x": make(*shape, dtype=dtype),
        "weight": make(shape[-1], width, dtype=dtype),
        "bias": None,
        "cu_seqlens": None,
        "out": make(*shape, dtype=dtype),
    }
    return _C.causal_conv1d_plan(*(tensors | given).values(), True)


def update(make, *shape, dtype="bfloat16", width=4, slots=9, **given):
    tensors = {
        "x": make(*shape, dtype=dtype),
        "states": make(slots, width - 1, shape[-1], dtype=dtype),
        "weight": make(shape[-1], width, dtype=dtype),
        "out": make(*shape, dtype=dtype),
        "bias": None,
        "state_indices": None,
        "has_state": None,
        "cu_seqlens": None,
    }
    return _C.causal_conv1d_update_plan(*(tensors | given).values(), False)


def backward(make, *shape, parts=3, width=4, **given):
    tensors = {
        "grad": make(*shape, dtype="bfloat16"),
        "x": make(*shape, dtype="bfloat16"),
        "weight": make(shape[-1], width, dtype="bfloat16"),
        "bias": None,
        "cu_seqlens": None,
        "dx": make(*shape, dtype="bfloat16"),
        "sums": make(parts, width + 1, shape[-1], dtype="float32"),
    }
    return _C.causal_conv1d_backward_plan(*(tensors | given).values(), False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 65536, 8192), (256, 1, 8192), (7, 33, 2048)])
def test_all_rows_and_channels_have_a_thread(shape, dtype):
    got = plan(ExchangeTensor, *shape, dtype=dtype)
    batch, tokens, channels = shape
    vectors = channels // 4
    parts = -(-batch * tokens // got["rows_per_thread"])
    assert got["grid"] == -(-parts * vectors // got["block"])
    assert 1 <= got["rows_per_thread"] <= 32
    assert got["kernel"].lower() == f"causal_conv1d<{dtype}>"


def test_few_rows_are_spread():
    rows = [plan(ExchangeTensor, 1, n, 8192)["rows_per_thread"] for n in (1, 128, 512, 2**16)]
    assert rows == [1, 3, 11, 32]
    assert update(ExchangeTensor, 256, 1, 8192, slots=256)["rows_per_thread"] == 1
    assert backward(ExchangeTensor, 100, 64, parts=7)["rows_per_thread"] == 15


def test_threads_are_whole_waves():
    """Three blocks of each of 132 multiprocessors run at once."""
    cases = (4096, 2048, 1), (8192, 2048, 1), (4096, 8192, 2), (32768, 2048, 6)
    for tokens, channels, waves in cases:
        got = plan(ExchangeTensor, 1, tokens, channels)
        assert (waves - 0.1) * 396 < got["grid"] <= waves * 396


def test_nothing_to_do():
    assert plan(ExchangeTensor, 0, 5, 64)["kernel"] == "none"
    assert plan(ExchangeTensor, 2, 5, 0)["kernel"] == "none"
    assert update(ExchangeTensor, 0, 1, 64)["kernel"] == "none"
    assert backward(ExchangeTensor, 0, 64, parts=0)["kernel"] == "none"


def test_layouts_that_the_kernels_do_not_take(make):
    for channels, dtype, size in ((2, "bfloat16", 8), (6, "float16", 8), (5, "float32", 16)):
        with pytest.raises(NotImplementedError, match=f"`x` must be aligned to {size} bytes"):
            plan(make, 2, 5, channels, dtype=dtype)
    with pytest.raises(NotImplementedError, match="too many rows for one launch"):
        plan(make, 2**26, 2**10, 2**20)


@pytest.mark.parametrize("call", [plan, update, backward])
def test_widths_and_weights(make, call):
    for width in (2, 3, 4):
        call(make, 1, 9, 64, width=width)
    for width in (1, 5):
        with pytest.raises(ValueError, match="`weight` must have 2, 3 or 4 taps"):
            call(make, 1, 9, 64, width=width)
    with pytest.raises(ValueError, match=r"`weight` must have shape \[D, W\]"):
        call(make, 1, 9, 64, weight=make(32, 4, dtype="bfloat16"))
    with pytest.raises(TypeError, match="`weight` must have dtype bfloat16"):
        call(make, 1, 9, 64, weight=make(64, 4, dtype="float32"))
    call(make, 1, 9, 64, bias=make(64, dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"`bias` must have shape \[D\]"):
        call(make, 1, 9, 64, bias=make(65, dtype="bfloat16"))
    with pytest.raises(TypeError, match="`bias` must have dtype bfloat16"):
        call(make, 1, 9, 64, bias=make(64, dtype="float32"))


@pytest.mark.parametrize("call", [plan, update, backward])
def test_starts(make, call):
    call(make, 1, 9, 64, cu_seqlens=make(4, dtype="int32"))
    with pytest.raises(TypeError, match="`cu_seqlens` must have dtype int32"):
        call(make, 1, 9, 64, cu_seqlens=make(4, dtype="int64"))
    with pytest.raises(ValueError, match="`cu_seqlens` must have from 1 to"):
        call(make, 1, 9, 64, cu_seqlens=make(0, dtype="int32"))
    with pytest.raises(ValueError, match=r"`x` must have shape \[1, T, D\] with `cu_seqlens`"):
        call(make, 2, 9, 64, cu_seqlens=make(4, dtype="int32"))


def test_x_and_results(make):
    with pytest.raises(TypeError, match="`x` must have dtype"):
        plan(make, 2, 5, 64, dtype="int32")
    with pytest.raises(ValueError, match="`x` must have at least 2 dimensions, got 1"):
        plan(make, 64)
    with pytest.raises(ValueError, match="`out` must have shape the shape of `x`"):
        plan(make, 2, 5, 64, out=make(2, 6, 64, dtype="bfloat16"))
    with pytest.raises(TypeError, match="`out` must have dtype bfloat16"):
        plan(make, 2, 5, 64, out=make(2, 5, 64, dtype="float16"))
    with pytest.raises(ValueError, match=r"`sums` must have shape \[parts, W \+ 1, D\]"):
        backward(make, 9, 64, sums=make(3, 4, 64, dtype="float32"))
    with pytest.raises(TypeError, match="`sums` must have dtype float32"):
        backward(make, 9, 64, sums=make(3, 5, 64, dtype="float16"))


def test_states(make):
    with pytest.raises(ValueError, match=r"`states` must have shape \[slots, W - 1, D\]"):
        update(make, 9, 1, 64, states=make(9, 4, 64, dtype="bfloat16"))
    with pytest.raises(TypeError, match="`states` must have dtype bfloat16"):
        update(make, 9, 1, 64, states=make(9, 3, 64, dtype="float32"))
    update(make, 9, 1, 64, state_indices=make(9, dtype="int32"), has_state=make(9, dtype="bool"))
    for name, dtype in (("state_indices", "int32"), ("has_state", "bool")):
        with pytest.raises(ValueError, match=rf"`{name}` must have shape \[N\]"):
            update(make, 9, 1, 64, **{name: make(8, dtype=dtype)})
        with pytest.raises(TypeError, match=f"`{name}` must have dtype {dtype}"):
            update(make, 9, 1, 64, **{name: make(9, dtype="int64")})
