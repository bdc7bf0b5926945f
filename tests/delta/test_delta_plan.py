# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule's checks and launches: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ExchangeTensor

from tiercel import _C


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


def backward(make, batch=3, tokens=100, heads=(2, 4), sizes=(128, 128), dtype="bfloat16", **given):
    tensors = inputs(make, batch, tokens, heads, sizes, dtype)
    tensors = {"grad": make(batch, tokens, heads[1], sizes[1], dtype=dtype)} | tensors
    tensors |= dict.fromkeys(("grad_final", "initial_state", "cu_seqlens"))
    made = inputs(make, batch, tokens, heads, sizes, dtype)
    tensors |= {f"d{name}": tensor for name, tensor in made.items()}
    tensors |= {"grad_initial": None, "workspace": None}
    return _C.gated_delta_rule_backward_plan(*(tensors | given).values(), None, True)


@pytest.mark.parametrize("sizes", [(64, 32), (128, 128), (128, 256)])
def test_decode(sizes):
    got = decode(ExchangeTensor, sizes=sizes)
    assert got["grid"] == 3 * 4 * sizes[1] // 32 and got["block"] == 128
    assert got["kernel"] == f"gated_delta_rule_decode<Float32, K={sizes[0]}>"


def test_decode_of_many_sequences():
    """Blocks that stay, where each has several states of 128 x 128 and one token."""
    assert "stream" not in decode(ExchangeTensor, batch=66)["kernel"]
    for state, kernel in (("float32", "Float32"), ("bfloat16", "BFloat16")):
        states = ExchangeTensor(9, 4, 128, 128, dtype=state)
        got = decode(ExchangeTensor, batch=67, states=states)
        assert got["kernel"] == f"gated_delta_rule_decode_stream<{kernel}>"
        assert (got["grid"], got["block"]) == (132, 576) and got["dynamic_smem"] <= 227 << 10
    for given in ({"tokens": 2}, {"sizes": (64, 128)}, {"sizes": (128, 256)}):
        assert "stream" not in decode(ExchangeTensor, batch=67, **given)["kernel"]


def test_nothing_to_do():
    for given in ({"batch": 0}, {"tokens": 0}, {"heads": (2, 0)}):
        assert decode(ExchangeTensor, **given)["kernel"] == "none"
    for given in ({"batch": 0}, {"heads": (2, 0)}, {"tokens": 0}):
        got = prompt(ExchangeTensor, **given)
        assert got["chunks"] == got["kernel"] == "none"
    final = ExchangeTensor(3, 4, 128, 128, dtype="float32")
    got = prompt(ExchangeTensor, tokens=0, final_state=final)
    assert got["chunks"] == "none" and got["kernel"] != "none"


def test_two_slices_share_a_block_where_there_are_many():
    def groups(batch, heads, size=128):
        got = prompt(ExchangeTensor, batch, heads=(heads, heads), sizes=(128, size))
        assert got["grid"] == batch * heads * -(-size // (64 * got["groups"]))
        return got["groups"]

    assert [groups(1, heads) for heads in (1, 66, 67, 128)] == [1, 1, 2, 2]
    assert groups(8, 32) == 2 and groups(100, 8, 48) == 1 and groups(100, 8, 80) == 2


def test_few_long_sequences_are_divided():
    def chunks(batch, tokens, heads, sizes=(128, 128), **given):
        heads = (heads, heads)
        got = prompt(ExchangeTensor, batch, tokens, heads=heads, sizes=sizes, **given)
        found = got["segment_chunks"]
        if found:
            places = -(-batch * tokens // 64) + batch
            slots = places // found + batch
            assert got["grid"] == slots * heads[1] * -(-sizes[1] // (64 * got["groups"]))
        return found

    assert [chunks(1, 32768, heads) for heads in (8, 16, 22, 23, 64)] == [64, 64, 86, 0, 0]
    # Twice as many, with two slices in a block, if they are long.
    assert [chunks(1, tokens, 8) for tokens in (65024, 65536)] == [127, 64]
    assert chunks(1, 65536, 16, (128, 64)) == 128
    assert chunks(2, 32768, 8) == 64 and chunks(4, 8192, 8) == 0
    assert chunks(1, 1536, 1) == 8 and chunks(1, 1472, 1) == 0
    assert chunks(1, 32768, 8, (64, 128)) == 0
    assert chunks(1, 32768, 8, cu_seqlens=ExchangeTensor(2, dtype="int32")) == 64
    assert chunks(1, 32768, 8, cu_seqlens=ExchangeTensor(5, dtype="int32")) == 0
    assert chunks(1, 32768, 8, cu_seqlens=ExchangeTensor(1, dtype="int32")) == 0


def test_first_kernel_beside_the_last():
    """It needs half of the multiprocessors without a state, and more chunks than fit at once."""

    def beside(batch, tokens, heads, sizes=(128, 128), **given):
        got = prompt(ExchangeTensor, batch, tokens, heads=heads, sizes=sizes, **given)
        flags = got["workspace"] - got["chunk_grid"] * heads[1] * (64 * 64 + 196)
        assert flags == (got["chunk_grid"] * heads[0] if got["beside"] else 0)
        return got["beside"]

    # Two slices share a block if that leaves enough.
    assert [beside(1, 32768, (16, heads)) for heads in (32, 48, 64, 80)] == [68, 84, 68, 0]
    assert beside(1, 1024, (16, 32)) == 0 and beside(1, 2048, (16, 32)) == 68
    assert beside(1, 8192, (8, 32)) == 68 and beside(2, 4096, (8, 16)) == 68
    assert beside(8, 4096, (4, 4), (64, 64)) == 100
    assert beside(1, 4096, (16, 32), cu_seqlens=ExchangeTensor(2, dtype="int32")) == 68
    assert beside(1, 4096, (16, 32), cu_seqlens=ExchangeTensor(3, dtype="int32")) == 68
    assert beside(1, 4096, (16, 32), cu_seqlens=ExchangeTensor(4, dtype="int32")) == 0
    assert beside(1, 4096, (16, 32), cu_seqlens=ExchangeTensor(1, dtype="int32")) == 0


def test_blocks_that_divide_heads():
    """Those that share keys, if all blocks run at once."""

    def rows(tokens, *heads, **given):
        return prompt(ExchangeTensor, 1, tokens, heads=heads, **given)["chunk_rows"]

    assert [rows(tokens, 2, 8) for tokens in (1024, 4096, 8192, 32768)] == [8, 8, 4, 2]
    assert rows(64, 2, 6) == 6 and rows(4096, 4, 12) == 4 and rows(1024, 16, 32) == 16
    gates = ExchangeTensor(1, 64, 8, 128, dtype="float32")
    assert rows(64, 2, 8, sizes=(128, 128), g=gates) == 8


def test_workspace(make):
    for batch, tokens in ((1, 1), (2, 64), (3, 100)):
        places = -(-batch * tokens // 64) + batch
        got = prompt(ExchangeTensor, batch, tokens)
        assert got["chunk_grid"] == places
        assert got["workspace"] == places * 4 * (2 * 64 * 64 // 2 + 196)
    for channels in (False, True):
        more = {"g": make(1, 64, 4, 128, dtype="float32")} if channels else {}
        got = prompt(make, 1, 64, **more)
        assert got["workspace"] == 2 * 4 * (2 * 64 * 64 // 2 + 196 + channels * 3 * 64 * 128 // 2)
        assert got["dynamic_smem"] <= 227 << 10
        assert got["chunks"].startswith(
            "gated_delta_rule_channels<" if channels else "gated_delta_rule_chunks<"
        )


def test_backward(make):
    got = backward(make)
    assert got["chunks"] == "gated_delta_rule_chunks<BFloat16, K=128, backward>"
    assert got["passes"] == "gated_delta_rule_passes<BFloat16, K=128>"
    assert got["gradients"] == "gated_delta_rule_gradients<BFloat16, K=128>"
    assert got["chunk_grid"] == -(-300 // 64) + 3
    # Forward and back, by sequences, heads and slices, of which two share a block where many are.
    assert (got["groups"], got["pass_grid"]) == (1, 2 * 3 * 4 * 2)
    got = backward(make, batch=17)
    assert (got["groups"], got["pass_grid"]) == (2, 2 * 17 * 4)
    for sizes in ((128, 16), (128, 144), (64, 128)):
        got = backward(make, 1, 64, sizes=sizes)
        states, values = sizes[0] * sizes[1], 64 * sizes[1]
        due = 64 * 64 + 260 + states + 3 * values // 2
        assert got["workspace"] == 2 * 4 * due
        gates = {name: make(1, 64, 4, sizes[0], dtype="float32") for name in ("g", "dg")}
        got = backward(make, 1, 64, sizes=sizes, **gates)
        # Three tiles of keys and queries, and the keys' products.
        assert got["workspace"] == 2 * 4 * (due + 3 * 64 * sizes[0] // 2 + 64 * 64 // 2)


def test_few_long_sequences_are_divided_for_gradients():
    def chunks(batch, tokens, heads, sizes=(128, 128), count=None):
        heads = (heads, heads)
        given = {}
        if count is not None:
            given["cu_seqlens"] = ExchangeTensor(count + 1, dtype="int32")
        got = backward(ExchangeTensor, batch, tokens, heads=heads, sizes=sizes, **given)
        found = got["segment_chunks"]
        count = batch if count is None else count
        places = -(-batch * tokens // 64) + count
        slots = places // found + count if found else count
        slices = -(-sizes[1] // (64 * got["groups"]))
        assert got["pass_grid"] == 2 * slots * heads[1] * slices
        if found:
            chunks = heads[1] * (64 * 64 + 260 + sizes[0] * sizes[1] + 3 * 32 * sizes[1])
            segments = slots * heads[1] * sizes[0] * (3 * sizes[1] + sizes[0])
            assert got["workspace"] == places * chunks + segments
        return found

    assert [chunks(1, 32768, heads) for heads in (1, 4, 8, 18, 19, 32)] == [12, 47, 86, 171, 0, 0]
    assert chunks(1, 2048, 1, (128, 16)) == 8 and chunks(1, 1984, 1, (128, 16)) == 0
    assert chunks(2, 32768, 4) == 86 and chunks(4, 8192, 4) == 40 and chunks(4, 8192, 8) == 0
    assert chunks(1, 32768, 8, (64, 128)) == 0
    assert [chunks(1, 32768, 4, count=count) for count in (0, 2, 4, 8)] == [0, 43, 40, 0]


def test_backward_with_a_gate_per_channel(make):
    for dtype, name in (("bfloat16", "BFloat16"), ("float16", "Float16")):
        for size in (64, 128):
            gates = {name: make(3, 100, 4, size, dtype="float32") for name in ("g", "dg")}
            got = backward(make, sizes=(size, 128), dtype=dtype, **gates)
            assert got["chunks"] == f"gated_delta_rule_channels<{name}, K={size}, backward>"
            assert got["passes"] == f"gated_delta_rule_passes<{name}, K={size}, channels>"
            assert got["gradients"] == f"gated_delta_rule_channel_gradients<{name}, K={size}>"
            assert got["chunk_grid"] == -(-300 // 64) + 3


def test_backward_of_nothing(make):
    for given in ({"batch": 0}, {"tokens": 0}, {"heads": (0, 0)}):
        got = backward(make, **given)
        assert got["chunks"] == got["passes"] == got["gradients"] == "none"
    state = make(3, 4, 128, 128, dtype="float32")
    got = backward(make, tokens=0, grad_initial=state)
    assert got["chunks"] == got["gradients"] == "none" and got["passes"] != "none"
    with pytest.raises(NotImplementedError, match="`v` is empty and `q` is not"):
        backward(make, heads=(2, 0))


def test_gradients(make):
    shapes = {
        "dq": (3, 100, 2, 128),
        "dk": (3, 100, 2, 128),
        "dv": (3, 100, 4, 128),
        "dg": (3, 100, 4),
        "dbeta": (3, 100, 4),
    }
    for name, shape in shapes.items():
        dtype = "bfloat16" if len(shape) == 4 else "float32"
        with pytest.raises(ValueError, match=f"`{name}` must have shape"):
            backward(make, **{name: make(3, 99, *shape[2:], dtype=dtype)})
        with pytest.raises(TypeError, match=f"`{name}` must have dtype {dtype}"):
            backward(make, **{name: make(*shape, dtype="float16")})
    halves = {name: make(3, 100, 4, dtype="bfloat16") for name in ("beta", "dbeta")}
    backward(make, **halves)
    for name in ("grad_final", "initial_state", "grad_initial"):
        backward(make, **{name: make(3, 4, 128, 128, dtype="float32")})
        with pytest.raises(ValueError, match=rf"`{name}` must have shape \[N, Hv, K, V\]"):
            backward(make, **{name: make(3, 4, 128, 64, dtype="float32")})
    with pytest.raises(ValueError, match=r"`grad` must have shape \[B, T, Hv, V\]"):
        backward(make, grad=make(3, 100, 4, 64, dtype="bfloat16"))
    with pytest.raises(ValueError, match="`workspace` must have .* elements, got 5"):
        backward(make, workspace=make(5, dtype="float32"))
    for shape in ((3, 100, 4), (3, 100, 4, 64)):
        with pytest.raises(ValueError, match=r"`dg` must have .*(shape|dimensions)"):
            backward(
                make,
                g=make(3, 100, 4, 128, dtype="float32"),
                dg=make(*shape, dtype="float32"),
            )


def test_what_the_kernels_do_not_take(make):
    with pytest.raises(NotImplementedError, match="keys of 64 or 128 elements"):
        backward(make, sizes=(96, 128))
    with pytest.raises(NotImplementedError, match="values of a multiple of 16"):
        backward(make, sizes=(128, 40))
    for call in (decode, prompt):
        with pytest.raises(NotImplementedError, match="keys of 64 or 128 elements"):
            call(make, sizes=(96, 128))
        with pytest.raises(NotImplementedError, match="values of a multiple of"):
            call(make, sizes=(64, 40))
        with pytest.raises(TypeError, match="`q` must have dtype bfloat16 or float16"):
            call(make, dtype="float32")
    for dtype in ("bfloat16", "float16"):
        assert dtype[0] == prompt(make, dtype=dtype)["kernel"].split("<")[1][0].lower()
        got = prompt(make, g=make(3, 100, 4, 128, dtype="float32"), dtype=dtype)
        assert "channels=true" in got["kernel"]
    with pytest.raises(ValueError, match=r"`g` must have shape \[B, T, Hv, K\]"):
        prompt(make, g=make(3, 100, 4, 64, dtype="float32"))
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


def norm(make, rows=5, columns=128, dtype="bfloat16", **given):
    tensors = {
        "x": make(rows, columns, dtype=dtype),
        "gate": make(rows, columns, dtype=dtype),
        "weight": make(columns, dtype="float32"),
        "out": make(rows, columns, dtype=dtype),
    }
    return _C.gated_rms_norm_plan(*(tensors | given).values(), 1e-6)


def test_lanes_of_a_norm(make):
    lanes = {8: 1, 24: 4, 64: 8, 128: 16, 256: 32, 264: 16, 512: 16, 520: 32, 1024: 32}
    for columns, due in lanes.items():
        got = norm(make, 1000, columns)
        assert got["lanes"] == due and got["grid"] == -(-1000 // (256 // due))
        assert f"vectors={1 if columns <= 256 else 4}" in got["kernel"]
    assert norm(make, 0)["kernel"] == norm(make, 5, 0)["kernel"] == "none"


def test_what_a_norm_does_not_take(make):
    for columns in (20, 1032):
        with pytest.raises(NotImplementedError, match="rows of a multiple of 8 elements"):
            norm(make, columns=columns)
    with pytest.raises(TypeError, match="`x` must have dtype bfloat16 or float16"):
        norm(make, dtype="float32")
    with pytest.raises(TypeError, match="`gate` must have dtype bfloat16"):
        norm(make, gate=make(5, 128, dtype="float16"))
    with pytest.raises(TypeError, match="`weight` must have dtype"):
        norm(make, weight=make(128, dtype="float16"))
    for name, shape in (("gate", (5, 64)), ("out", (4, 128)), ("weight", (64,))):
        dtype = "float32" if name == "weight" else "bfloat16"
        with pytest.raises(ValueError, match=f"`{name}` must have shape"):
            norm(make, **{name: make(*shape, dtype=dtype)})
