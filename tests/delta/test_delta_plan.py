# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule's checks and launches: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import AttributeTensor, ExchangeTensor

from tiercel import _C


@pytest.fixture(params=[ExchangeTensor, AttributeTensor])
def make(request):
    return request.param


def inputs(make, batch, tokens, heads, sizes, dtype):
    keys = (batch, tokens, heads[0], sizes[0])
    values = (batch, tokens, heads[1], sizes[1])
    return {
        "q": make(*keys, dtype=dtype),
        "k": make(*keys, dtype=dtype),
        "v": make(*values, dtype=dtype),
        "g": make(*values[:3], dtype="float32"),
        "beta": make(*values[:3], dtype="float32"),
    }


def decode(make, batch=3, tokens=1, heads=(2, 4), sizes=(128, 128), dtype="bfloat16", **given):
    tensors = inputs(make, batch, tokens, heads, sizes, dtype) | {
        "states": make(9, heads[1], *sizes, dtype="float32"),
        "out": make(batch, tokens, heads[1], sizes[1], dtype=dtype),
        "state_indices": None,
        "accepted": None,
    }
    return _C.gated_delta_rule_decode_plan(*(tensors | given).values(), None, True)


def prompt(make, batch=3, tokens=100, heads=(2, 4), sizes=(128, 128), dtype="bfloat16", **given):
    tensors = inputs(make, batch, tokens, heads, sizes, dtype) | {
        "initial_state": None,
        "cu_seqlens": None,
        "out": make(batch, tokens, heads[1], sizes[1], dtype=dtype),
        "final_state": None,
        "workspace": None,
    }
    return _C.gated_delta_rule_plan(*(tensors | given).values(), None, True)


@pytest.mark.parametrize("sizes", [(64, 32), (128, 128), (128, 256)])
def test_decode(sizes):
    got = decode(ExchangeTensor, sizes=sizes)
    assert got["grid"] == 3 * 4 * sizes[1] // 32 and got["block"] == 128
    assert got["kernel"] == f"gated_delta_rule_decode<Float32, K={sizes[0]}>"


def test_nothing_to_do():
    for given in ({"batch": 0}, {"tokens": 0}, {"heads": (2, 0)}):
        assert decode(ExchangeTensor, **given)["kernel"] == "none"
    for given in ({"batch": 0}, {"heads": (2, 0)}, {"tokens": 0}):
        got = prompt(ExchangeTensor, **given)
        assert got["chunks"] == got["kernel"] == "none"
    final = ExchangeTensor(3, 4, 128, 128, dtype="float32")
    got = prompt(ExchangeTensor, tokens=0, final_state=final)
    assert got["chunks"] == "none" and got["kernel"] != "none"


def test_a_slice_is_as_narrow_as_leaves_all_blocks_resident():
    def warps(batch, heads, size=128):
        got = prompt(ExchangeTensor, batch, heads=(heads, heads), sizes=(128, size))
        assert got["grid"] == batch * heads * size // (16 * got["warps"])
        return got["warps"]

    assert [warps(1, heads) for heads in (1, 32, 33, 34, 66, 67, 128)] == [2, 2, 2, 4, 4, 4, 4]
    assert warps(8, 32) == 4
    assert warps(1, 1, 16) == 1 and warps(100, 8, 48) == 1 and warps(100, 8, 32) == 2


def test_workspace():
    for batch, tokens in ((1, 1), (2, 64), (3, 100)):
        places = -(-batch * tokens // 64) + batch
        got = prompt(ExchangeTensor, batch, tokens)
        assert got["chunk_grid"] == places
        assert got["workspace"] == places * 4 * (2 * 64 * 64 // 2 + 196)
        assert got["dynamic_smem"] <= 227 << 10


def test_what_the_kernels_do_not_take(make):
    for call in (decode, prompt):
        with pytest.raises(NotImplementedError, match="keys of 64 or 128 elements"):
            call(make, sizes=(96, 128))
        with pytest.raises(NotImplementedError, match="values of a multiple of"):
            call(make, sizes=(64, 40))
        with pytest.raises(TypeError, match="`q` must have dtype bfloat16 or float16"):
            call(make, dtype="float32")
    with pytest.raises(NotImplementedError, match="only bfloat16"):
        prompt(make, dtype="float16")
    with pytest.raises(NotImplementedError, match="a gate for each channel"):
        prompt(make, g=make(3, 100, 4, 128, dtype="float32"))
    decode(make, g=make(3, 1, 4, 128, dtype="float32"))


@pytest.mark.parametrize("call", [decode, prompt])
def test_inputs(make, call):
    tokens = 1 if call is decode else 100
    wrong = {
        "k": ((3, tokens, 2, 64), r"\[B, T, Hk, K\]"),
        "v": ((3, tokens + 1, 4, 128), r"\[B, T, Hv, V\]"),
        "out": ((3, tokens, 4, 64), r"\[B, T, Hv, V\]"),
    }
    for name, (shape, text) in wrong.items():
        with pytest.raises(ValueError, match=f"`{name}` must have shape {text}"):
            call(make, **{name: make(*shape, dtype="bfloat16")})
        with pytest.raises(TypeError, match=f"`{name}` must have dtype bfloat16"):
            call(make, **{name: make(*shape, dtype="float16")})
    with pytest.raises(ValueError, match="`v` must have a multiple of 3 heads, got 4"):
        call(make, heads=(3, 4))
    for name in ("g", "beta"):
        with pytest.raises(ValueError, match=rf"`{name}` must have shape \[B, T, Hv\]"):
            call(make, **{name: make(3, tokens, 5, dtype="float32")})
        with pytest.raises(TypeError, match=f"`{name}` must have dtype"):
            call(make, **{name: make(3, tokens, 4, dtype="float16")})
    call(make, beta=make(3, tokens, 4, dtype="bfloat16"))


def test_states_and_slots(make):
    with pytest.raises(ValueError, match=r"`states` must have shape \[slots, Hv, K, V\]"):
        decode(make, states=make(9, 4, 128, 64, dtype="float32"))
    with pytest.raises(TypeError, match="`states` must have dtype float32 or bfloat16"):
        decode(make, states=make(9, 4, 128, 128, dtype="float16"))
    for shape in ((3,), (3, 1), (3, 2)):
        decode(make, tokens=2, state_indices=make(*shape, dtype="int32"))
    for shape in ((2,), (3, 3), (3, 2, 1)):
        with pytest.raises(ValueError, match=r"`state_indices` must have shape \[B\] or \[B, T\]"):
            decode(make, tokens=2, state_indices=make(*shape, dtype="int32"))
    with pytest.raises(TypeError, match="`state_indices` must have dtype int32"):
        decode(make, state_indices=make(3, dtype="int64"))
    decode(make, accepted=make(3, dtype="int32"))
    with pytest.raises(ValueError, match=r"`accepted` must have shape \[B\]"):
        decode(make, accepted=make(4, dtype="int32"))
    with pytest.raises(TypeError, match="`accepted` must have dtype int32"):
        decode(make, accepted=make(3, dtype="int64"))


def test_sequences_and_their_states(make):
    prompt(make, 1, cu_seqlens=make(5, dtype="int32"))
    with pytest.raises(ValueError, match="`q` must have a batch of 1 with `cu_seqlens`, got 3"):
        prompt(make, cu_seqlens=make(5, dtype="int32"))
    with pytest.raises(ValueError, match="`cu_seqlens` must have at least one element"):
        prompt(make, 1, cu_seqlens=make(0, dtype="int32"))
    with pytest.raises(TypeError, match="`cu_seqlens` must have dtype int32"):
        prompt(make, 1, cu_seqlens=make(5, dtype="int64"))
    for name in ("initial_state", "final_state"):
        prompt(make, **{name: make(3, 4, 128, 128, dtype="float32")})
        starts = make(5, dtype="int32")
        prompt(make, 1, cu_seqlens=starts, **{name: make(4, 4, 128, 128, dtype="float32")})
        with pytest.raises(ValueError, match=rf"`{name}` must have shape \[N, Hv, K, V\]"):
            prompt(make, **{name: make(4, 4, 128, 128, dtype="float32")})
        with pytest.raises(TypeError, match=f"`{name}` must have dtype float32"):
            prompt(make, **{name: make(3, 4, 128, 128, dtype="bfloat16")})
    with pytest.raises(ValueError, match=r"`workspace` must have \d+ elements, got 5"):
        prompt(make, workspace=make(5, dtype="float32"))
    tensors = inputs(make, 1, 1, (1, 1), (64, 32), "bfloat16").values()
    out = make(1, 1, 1, 32, dtype="bfloat16")
    with pytest.raises(TypeError, match="`workspace` must be a tensor, got None"):
        _C.gated_delta_rule(*tensors, None, None, out, None, None, None, False)
