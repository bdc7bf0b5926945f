# SPDX-License-Identifier: Apache-2.0
"""attention_varlen's checks and its choice of kernel: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ExchangeTensor

from tiercel import _C

MOST = 2**29 - 1  # rows


def plan(
    make,
    rows=(900, 1000),
    heads=(8, 2),
    d=64,
    *,
    batch=3,
    longest=(500, 400),
    d_v=None,
    dtype="bfloat16",
    **given,
):
    d_v = d_v or d
    shapes = {
        "q": (rows[0], heads[0], d),
        "k": (rows[1], heads[1], d),
        "v": (rows[1], heads[1], d_v),
    }
    tensors = [given.get(name) or make(*shape, dtype=dtype) for name, shape in shapes.items()]
    starts = [
        given.get(name) or make(batch + 1, dtype="int32")
        for name in ("cu_seqlens_q", "cu_seqlens_k")
    ]
    out = given.get("out") or make(rows[0], heads[0], d_v, dtype=dtype)
    options = (given.get("left", -1), given.get("right", -1), 0.1, given.get("softcap", 0.0))
    sinks = [given["sinks"]] if "sinks" in given else []
    return _C.attention_varlen_plan(*tensors, *starts, out, None, *longest, *options, *sinks)


@pytest.mark.parametrize("d", [8, 40, 64, 72, 128])
@pytest.mark.parametrize("right", [-1, 0, 30])
def test_tiles_of_the_longest_sequence(make, d, right):
    got = plan(make, d=d, right=right, heads=(2, 2))
    assert got["kernel"].startswith(f"attention_bf16_d{64 if d <= 64 else 128}_128x128")
    assert got["grid"] == 4 * 2 * 3


@pytest.mark.parametrize(
    ("options", "ending"),
    [({}, ""), ({"right": 0}, "_causal"), ({"left": 5, "right": 0}, "_window")],
)
def test_keys_of_192_columns(make, options, ending):
    kernel = plan(make, d=192, d_v=128, **options)["kernel"]
    assert kernel == f"attention_bf16_d192v128_128x128{ending}_packed"
    assert plan(make, d=128, d_v=64)["kernel"] == "attention_bf16_d128_128x128_packed"


@pytest.mark.parametrize(
    "columns",
    [
        {"d": 136},
        {"d": 200, "d_v": 128},
        {"d": 192, "d_v": 128, "dtype": "float16"},
        {"d": 128, "d_v": 192},
        {"d": 256},
    ],
)
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (5, 0), (-1, 3)])
def test_one_kernel_for_all_masks_of_wide_heads(make, columns, left, right):
    name = f"attention_{'fp16' if 'dtype' in columns else 'bf16'}_d256_128x64_window"
    got = plan(make, **columns, left=left, right=right)
    assert got["kernel"] == f"{name}_packed" and got["dynamic_smem"] <= 232448
    assert (got["band"] > 1) == (left < 0 <= right)  # later queries see more keys
    capped = plan(make, **columns, left=left, right=right, softcap=5.0)["kernel"]
    assert capped == f"{name}_capped_packed"


@pytest.mark.parametrize("d", [8, 64, 96, 128])
@pytest.mark.parametrize(("dtype", "short"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_one_kernel_with_a_cap(make, d, dtype, short):
    for options in ({}, {"right": 0}, {"left": 5, "right": 0}):
        kernel = plan(make, d=d, softcap=5.0, dtype=dtype, **options)["kernel"]
        assert kernel == f"attention_{short}_d256_128x64_window_capped_packed"


@pytest.mark.parametrize(("name", "d", "d_v"), [("q", 264, 8), ("q", 60, 64), ("v", 64, 264)])
def test_columns_that_there_is_no_kernel_for(make, name, d, d_v):
    due = f"^attention_varlen: `{name}` must have a head dimension .* multiple of 8 up to 256"
    with pytest.raises(NotImplementedError, match=due):
        plan(make, d=d, d_v=d_v)


def test_sinks(make):
    assert plan(make, sinks=make(8, dtype="float32")) == plan(make, sinks=None) == plan(make)
    with pytest.raises(
        ValueError, match=r"^attention_varlen: `sinks` must have shape \[H\] = \[8\]"
    ):
        plan(make, sinks=make(2, dtype="float32"))


def test_longest_is_at_most_all_rows(make):
    most = plan(make, longest=(900, 1000))
    for longest in ((901, 1001), (2**62, 2**62), (2**63 - 1, 1)):
        assert plan(make, longest=longest)["grid"] == most["grid"]


def test_starts_of_any_stride(make):
    for stride in (0, 2, 2**29 - 1):
        q, k = (make(4, dtype="int32", strides=(stride,)) for _ in "qk")
        assert plan(make, cu_seqlens_q=q, cu_seqlens_k=k) == plan(make)


def far(*shape, strides, dtype="bfloat16"):
    return ExchangeTensor(*shape, dtype=dtype, strides=strides)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("`q` must have fewer than 2\\^29 rows", {"rows": (MOST + 1, 1000)}),
        ("`k` must have fewer than 2\\^29 rows", {"rows": (900, MOST + 1)}),
        (
            "`cu_seqlens_k` must have elements that are less than 2 GiB apart",
            {"cu_seqlens_k": far(4, strides=(2**29,), dtype="int32")},
        ),
        ("`q` must have fewer than 2\\^30 tiles", {"batch": 2**30 - 1}),
        ("`q` must have fewer than 2\\^30 tiles", {"batch": 2**62 - 1, "heads": (4, 2)}),
        (
            "`out` must have rows that are less than 32 GiB apart",
            {"out": far(900, 8, 64, strides=(64, 2**34 + 64, 1))},
        ),
    ],
)
def test_what_there_is_no_kernel_for(text, given):
    with pytest.raises(NotImplementedError, match=f"^attention_varlen: {text}"):
        plan(ExchangeTensor, **given)


def test_most_rows(make):
    assert plan(make, rows=(MOST, MOST), heads=(1, 1), d=8, longest=(MOST, MOST), batch=1)
