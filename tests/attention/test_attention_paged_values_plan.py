# SPDX-License-Identifier: Apache-2.0
"""Plans of paged_attention for values whose head dimension is not that of keys."""

import pytest
from support.dlpack_tensor import ExchangeTensor
from support.paged_plan import plan

import tiercel

FLOAT8 = "float8_e4m3fn"


def with_values(d_v, d=128, page=16, dtype="bfloat16", **options):
    """Values of a head dimension of their own; the dtype is the cache's."""
    tensors = {
        "k_cache": ExchangeTensor(50, page, 2, d, dtype=dtype),
        "v_cache": ExchangeTensor(50, page, 2, d_v, dtype=dtype),
        "out": ExchangeTensor(900, 8, d_v, dtype="bfloat16"),
    }
    return plan(ExchangeTensor, d=d, **tensors, **options)


@pytest.mark.parametrize(
    ("d", "d_v", "tiles"), [(192, 128, 256), (128, 64, 128), (64, 128, 128), (8, 64, 64)]
)
@pytest.mark.parametrize("longest", [1, 900])
def test_another_head_dimension_of_values(d, d_v, tiles, longest):
    """Few new tokens too have tiles with as many columns as the larger one needs."""
    got = with_values(d_v, d, longest=longest)
    assert got["kernel"] == f"attention_paged_bf16_d{tiles}_causal" and got["decode"] == "none"
    with tiercel.batch_invariant():
        assert with_values(d_v, d, longest=longest)["kernel"].startswith("attention_paged_bf16")


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("`v_cache` must have the head dimension of `q` .* got 128", {"d_v": 128, "d": 264}),
        ("`v_cache` must have the head dimension of `q` .* got 264", {"d_v": 264}),
        ("`v_cache` must have the head dimension of `q` .* got 64", {"d_v": 64, "dtype": FLOAT8}),
        ("`v_cache` must have a head dimension that is a multiple of 8", {"d_v": 60}),
        ("`k_cache` must have pages of 4 keys or more .* got 2", {"d_v": 64, "page": 2}),
        (
            "`tree_mask` must be None with these head dimensions",
            {"d_v": 192, "longest": 9, "tree": ExchangeTensor(900, dtype="int64")},
        ),
    ],
)
def test_no_kernel_for_values(text, changes):
    with pytest.raises(NotImplementedError, match=text):
        with_values(**changes)
