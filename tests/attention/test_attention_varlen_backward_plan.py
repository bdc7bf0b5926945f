# SPDX-License-Identifier: Apache-2.0
"""attention_varlen_backward's checks and its choice of kernel: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ExchangeTensor

from tiercel import _C

NO_LIMIT = -1
MOST = 2**29 - 1  # rows


def arguments(
    make, rows=(900, 1000), heads=(8, 2), d=64, batch=3, dtype="bfloat16", d_v=None, **given
):
    q, k, sums = (rows[0], heads[0], d), (rows[1], heads[1], d), (heads[0], rows[0])
    out, v = (*q[:2], d_v or d), (*k[:2], d_v or d)
    shapes = {"grad": out, "q": q, "k": k, "v": v, "cu_seqlens_q": (batch + 1,)}
    shapes |= {"cu_seqlens_k": (batch + 1,), "out": out, "lse": sums, "grad_lse": None}
    shapes |= {"dq": q, "dk": k, "dv": v}
    dtypes = {"lse": "float32", "cu_seqlens_q": "int32", "cu_seqlens_k": "int32"}

    def tensor(name):
        size = shapes[name]
        return None if size is None else make(*size, dtype=dtypes.get(name, dtype))

    return [given.get(name) or tensor(name) for name in shapes]


def plan(make, *, left=NO_LIMIT, right=NO_LIMIT, softcap=0.0, deterministic=False, **given):
    tensors = arguments(make, **given)
    return _C.attention_varlen_backward_plan(
        *tensors, None, left, right, 0.1, softcap, deterministic
    )


@pytest.mark.parametrize("d", [8, 40, 64, 72, 96, 128])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize(("dtype", "short"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_every_head_dimension_has_a_kernel(make, d, softcap, dtype, short):
    got = plan(make, d=d, softcap=softcap, dtype=dtype)
    small = d <= 64 and not softcap
    rows, columns = (128, 64) if small else (64, 128)
    name = f"attention_backward_{short}_d{columns}_{rows}x128"
    assert got["kernel"] == name + ("_capped_packed" if softcap else "_packed")
    assert got["dynamic_smem"] <= 232448  # what a block may have on Hopper
    # At most: each sequence, and the rows before the first one and after the last one, begin a
    # block of queries and a tile of keys.
    blocks, tiles = 900 // rows + 5, 1000 // 128 + 5
    assert got["grid"] == 2 * tiles
    floats = 8 * blocks * (2 * rows + rows * columns + 1)
    assert got["workspace"] == floats + 8 * tiles + 2 * blocks + 4 + 1


@pytest.mark.parametrize(
    ("d", "d_v", "softcap", "name", "keys"),
    [
        (192, 128, 0.0, "d192v128_64x128_packed", 128),
        (136, 8, 0.0, "d192v128_64x128_packed", 128),
        (192, 128, 30.0, "d256_64x64", 64),
        (192, 136, 0.0, "d256_64x64", 64),
        (256, 256, 0.0, "d256_64x64", 64),
        (256, 256, 30.0, "d256_64x64", 64),
        (64, 136, 0.0, "d256_64x64", 64),
    ],
)
def test_wide_heads(make, d, d_v, softcap, name, keys):
    got = plan(make, d=d, d_v=d_v, softcap=softcap)
    assert got["kernel"] == f"attention_backward_bf16_{name}"
    assert got["dynamic_smem"] <= 232448  # what a block may have on Hopper
    blocks, tiles = 900 // 64 + 5, 1000 // keys + 5
    assert (got["tile_n"], got["grid"]) == (keys, 2 * tiles)
    floats = 8 * blocks * (2 * 64 + 64 * (192 if keys == 128 else 256) + 1)
    assert got["workspace"] == floats + 8 * tiles + 2 * blocks + 4 + 1


@pytest.mark.parametrize(("d", "d_v"), [(136, 136), (192, 128), (64, 256)])
def test_wide_heads_in_float16(make, d, d_v):
    got = plan(make, d=d, d_v=d_v, dtype="float16")
    assert got["kernel"] == "attention_backward_fp16_d256_64x64"


def test_few_rows_begin_few_blocks(make):
    got = plan(make, rows=(3, 2), heads=(1, 1), batch=1000)
    assert got["grid"] == 2
    assert got["workspace"] == 3 * (2 * 128 + 128 * 64 + 1) + 8 * 2 + 2 * 3 + 4 + 1


def test_tiles_of_a_causal_mask_are_mixed_as_the_cache_holds_a_sequence(make):
    sizes = {"rows": (16384, 16384), "heads": (16, 8), "d": 128}
    assert plan(make, **sizes, batch=1)["band"] == 1
    assert plan(make, **sizes, batch=1, right=0)["band"] == 1  # 32 MB a head of keys
    assert plan(make, **sizes, batch=4, right=0)["band"] == 4
    assert plan(make, **sizes, batch=64, right=0)["band"] == 8  # all


def test_in_order_late_keys_come_first(make):
    for options, descending in (
        ({}, False),
        ({"right": 0}, True),
        # However long the others are: the order is part of a sequence's bits.
        ({"right": 0, "left": 10**6}, False),
    ):
        assert plan(make, **options, deterministic=True)["descending"] is descending
        assert plan(make, **options)["descending"] is False


@pytest.mark.parametrize("sizes", [{"rows": (0, 5)}, {"heads": (0, 2)}])
def test_nothing_to_launch(make, sizes):
    got = plan(make, **sizes)
    assert got["kernel"] == "none" and got["workspace"] == 0


def test_starts_of_any_stride(make):
    for stride in (0, 2, 2**29 - 1):
        q, k = (make(4, dtype="int32", strides=(stride,)) for _ in "qk")
        assert plan(make, cu_seqlens_q=q, cu_seqlens_k=k) == plan(make)


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (TypeError, "`grad` must have dtype bfloat16", {"grad": ((900, 8, 64), "float16")}),
        (ValueError, "`dk` must have shape", {"dk": ((1000, 8, 64), "bfloat16")}),
        (ValueError, "`dq` must have 3 dimensions", {"dq": ((1, 900, 8, 64), "bfloat16")}),
        (ValueError, "`lse` must have shape", {"lse": ((900, 8), "float32")}),
        (TypeError, "`grad_lse` must have dtype float32", {"grad_lse": ((8, 900), "float16")}),
        (ValueError, "`grad_lse` must have shape", {"grad_lse": ((8, 899), "float32")}),
        (TypeError, "`cu_seqlens_k` must have dtype int32", {"cu_seqlens_k": ((4,), "int64")}),
        (ValueError, "`cu_seqlens_k` must have shape", {"cu_seqlens_k": ((5,), "int32")}),
        (
            ValueError,
            "`cu_seqlens_q` must have at least one element",
            {"cu_seqlens_q": ((0,), "int32")},
        ),
    ],
)
def test_bad_arguments(make, error, text, changes):
    given = {name: make(*shape, dtype=dtype) for name, (shape, dtype) in changes.items()}
    with pytest.raises(error, match=f"attention_varlen_backward: {text}"):
        plan(make, **given)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("`q` must have a head dimension that is a multiple of 8 up to 256", {"d": 264}),
        ("`q` must have fewer than 2\\^29 rows", {"rows": (MOST + 1, 1000)}),
        ("`k` must have fewer than 2\\^29 rows", {"rows": (900, MOST + 1)}),
        ("`q` must have fewer than 2\\^30 blocks", {"rows": (MOST, MOST), "heads": (128, 128)}),
        ("`cu_seqlens_q` must have fewer than 2\\^30 elements", {"batch": 2**30}),
    ],
)
def test_what_there_is_no_kernel_for(text, given):
    with pytest.raises(NotImplementedError, match=f"^attention_varlen_backward: {text}"):
        plan(ExchangeTensor, **given)


def test_values_of_another_head_dimension_take_tiles_for_both(make):
    assert plan(make, d=64, d_v=32)["kernel"] == "attention_backward_bf16_d64_128x128_packed"
    assert plan(make, d=64, d_v=72)["kernel"] == "attention_backward_bf16_d128_64x128_packed"


def test_a_workspace_is_asked_for(make):
    tensors = arguments(make)
    due = "attention_varlen_backward: `workspace` must be a tensor, got None"
    with pytest.raises(TypeError, match=due):
        _C.attention_varlen_backward(*tensors, None, NO_LIMIT, NO_LIMIT, 0.1, 0.0, False)
