# SPDX-License-Identifier: Apache-2.0
"""The checks and the choice of kernel of float8_e4m3fn attention: no PyTorch, no GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

NO_LIMIT = -1
FLOAT8 = "float8_e4m3fn"


def plan(make, shape=(2, 300, 8, 128), keys=(300, 8), *, left=-1, right=-1, softcap=0.0, **given):
    batch, _, _, d = shape
    shapes = {"q": shape, "k": (batch, *keys, d), "v": (batch, *keys, d), "out": shape}
    dtypes = dict.fromkeys("qkv", FLOAT8) | {"out": "bfloat16"}
    tensors = [given.pop(n, None) or make(*s, dtype=dtypes[n]) for n, s in shapes.items()]
    names = ("lse", "q_descale", "k_descale", "v_descale", "workspace")
    optional = [given.pop(name, None) for name in names]
    assert not given
    return _C.attention_fp8_plan(*tensors, *optional, left, right, 0.1, softcap)


@pytest.mark.parametrize("d", [16, 48, 64, 80, 96, 112, 128])
@pytest.mark.parametrize("right", [NO_LIMIT, 0, 30])
@pytest.mark.parametrize("left", [NO_LIMIT, 0, 100])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_every_head_dimension_and_mask_has_a_kernel(d, right, left, softcap):
    for seq in (1, 200, 5000):
        options = {"left": left, "right": right, "softcap": softcap}
        got = plan(ExchangeTensor, (2, seq, 4, d), (seq, 2), **options)
        tile = min(t for t in (64, 96, 128) if t >= d)
        assert got["kernel"].startswith(f"attention_fp8_d{tile}_")
        assert got["kernel"].endswith("_capped") == (softcap != 0)
        assert got["dynamic_smem"] <= 232448
        assert got["grid"] == min(-(-seq // got["tile_m"]) * 8, 132)
        columns = -(-got["tile_n"] // 64) * 64
        assert got["workspace"] == 128 + 4 * d * -(-seq // got["tile_n"]) * columns


def test_three_warpgroups_for_long_sequences():
    for seq, tile in ((512, (128, 128)), (1024, (128, 128)), (8192, (192, 96))):
        got = plan(ExchangeTensor, (2, seq, 32, 64), (seq, 32))
        assert (got["tile_m"], got["tile_n"]) == tile


def test_heads_are_mixed_while_the_l2_holds_keys_of_one_byte():
    assert plan(ExchangeTensor, (1, 16384, 16, 128), (16384, 16), right=0)["band"] == 16
    assert plan(ExchangeTensor, (32, 512, 16, 128), (512, 16))["band"] == 1


def test_empty_outputs_launch_nothing(make):
    got = plan(make, (0, 5, 2, 64), (7, 2))
    assert (got["kernel"], got["grid"], got["workspace"]) == ("none", 0, 0)


@pytest.mark.parametrize(
    ("error", "text", "name", "shape", "dtype"),
    [
        (TypeError, "`q` must have dtype float8_e4m3fn, got bfloat16", "q", None, "bfloat16"),
        (TypeError, "`k` must have dtype float8_e4m3fn, got uint8", "k", None, "uint8"),
        (TypeError, "`out` must have dtype bfloat16, got float8", "out", None, FLOAT8),
        (TypeError, "`q_descale` must have dtype float32, got", "q_descale", (8,), "float16"),
        (
            ValueError,
            r"`v_descale` must have shape \[B, Hk\] = \[2, 8\], \[Hk\] or one element, got \[2, 1",
            "v_descale",
            (2, 1),
            "float32",
        ),
    ],
)
def test_wrong_tensors(make, error, text, name, shape, dtype):
    tensor = make(*(shape or (2, 300, 8, 128)), dtype=dtype)
    with pytest.raises(error, match=f"^attention: {text}"):
        plan(make, **{name: tensor})


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (8,), (2, 8)])
def test_factors(make, shape):
    assert plan(make, k_descale=make(*shape, dtype="float32"))["grid"] > 0


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("`q` must have a head dimension that is a multiple of 16 up to 128", (2, 300, 8, 144)),
        ("`q` must have a head dimension that is a multiple of 8 up to 256", (2, 300, 8, 60)),
    ],
)
def test_what_there_is_no_kernel_for(make, text, shape):
    with pytest.raises(NotImplementedError, match=f"^attention: {text}"):
        plan(make, shape)


def test_values_of_another_head_dimension_have_no_kernel(make):
    v, out = (make(2, 300, 8, 64, dtype=dtype) for dtype in (FLOAT8, "bfloat16"))
    with pytest.raises(NotImplementedError, match="`v` must have the head dimension of `q`, 128"):
        plan(make, v=v, out=out)


def test_what_the_copy_engine_cannot_do(make):
    tensor = make(2, 300, 8, 128, dtype=FLOAT8, address=ADDRESS + 8)
    with pytest.raises(NotImplementedError, match="`v` must start at a multiple of 16 bytes"):
        plan(make, v=tensor)


def plan_packed(make, lengths=(900, 1000), shape=(8, 2, 64), longest=(500, 400), **given):
    heads, kv_heads, d = shape
    (queries, keys), none = lengths, [None] * 5
    tensors = [make(queries, heads, d, dtype=FLOAT8)]
    tensors += [make(keys, kv_heads, d, dtype=FLOAT8) for _ in "kv"]
    tensors.append(make(queries, heads, d, dtype=given.pop("out", "bfloat16")))
    starts = [make(given.pop(name, 4), dtype="int32") for name in ("starts_q", "starts_k")]
    options = (-1, given.pop("right", -1), 0.1, given.pop("softcap", 0.0))
    none[1] = given.pop("q_descale", None)
    assert not given
    return _C.attention_varlen_fp8_plan(*tensors, *none, *options, *starts, *longest)


@pytest.mark.parametrize("d", [16, 64, 96, 128])
@pytest.mark.parametrize("right", [NO_LIMIT, 0, 30])
def test_packed_sequences(make, d, right):
    got = plan_packed(make, shape=(8, 2, d), right=right)
    assert got["kernel"].startswith(f"attention_fp8_d{64 if d <= 64 else 128}_")
    assert got["kernel"].endswith("_packed")
    # Tiles for all keys, and one more a sequence.
    tiles = 1000 // got["tile_n"] + 3
    assert got["workspace"] == 128 + 2 * d * tiles * got["tile_n"]


def test_three_warpgroups_for_long_packed_sequences():
    got = plan_packed(ExchangeTensor, (5000, 1000), longest=(5000, 5000))
    assert (got["tile_m"], got["tile_n"]) == (192, 96)
    assert got["workspace"] == 128 + 2 * 64 * (1000 // 96 + 3) * 128


def test_longest_is_at_most_all_rows():
    most = plan_packed(ExchangeTensor, longest=(900, 1000))
    assert plan_packed(ExchangeTensor, longest=(2**62, 2**63 - 1)) == most


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (TypeError, "`out` must have dtype bfloat16, got float8_e4m3fn", {"out": FLOAT8}),
        (ValueError, r"`cu_seqlens_k` must have shape", {"starts_k": 5}),
        (
            ValueError,
            r"`q_descale` must have shape \[B, Hk\] = \[3, 2\]",
            {"q_descale": ExchangeTensor(4, dtype="float32")},
        ),
        (NotImplementedError, "`softcap` must be None", {"softcap": 3.0}),
    ],
)
def test_bad_packed_arguments(error, text, changes):
    with pytest.raises(error, match=f"^attention_varlen: {text}"):
        plan_packed(ExchangeTensor, **changes)
