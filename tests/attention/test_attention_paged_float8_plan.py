# SPDX-License-Identifier: Apache-2.0
"""paged_attention's choice of kernel for float8 caches and queries and for prefixes, and the checks
of these."""

import pytest
from support.dlpack_tensor import AttributeTensor, ExchangeTensor
from support.paged_plan import FLOAT8, far, float8, plan, queries

import tiercel


@pytest.fixture(params=[ExchangeTensor, AttributeTensor])
def make(request):
    return request.param


@pytest.mark.parametrize(
    ("d", "longest", "kernel"),
    [
        (64, 1, "decode_attention<BFloat16, float8=true"),
        (64, 900, "attention_paged_bf16_d64_causal"),
        (256, 900, "attention_paged_bf16_d256_window_float8"),
        (72, 1, "attention_paged_bf16_d128_causal"),
        (72, 900, "attention_paged_bf16_d128_causal"),
        (512, 1, "attention_paged_wide<BFloat16, float8=true>"),
    ],
)
def test_the_kernels_of_float8_caches(make, d, longest, kernel):
    given = float8(d=d, longest=longest)
    if d % 16:  # rows of such a cache are apart by a multiple of 16 bytes
        strides = (16 * 256, 256, 128, 1)
        caches = {
            name: far(50, 16, 2, d, strides=strides, dtype=FLOAT8)
            for name in ("k_cache", "v_cache")
        }
        given |= caches
    of_bf16 = plan(make, **given)
    assert of_bf16["kernel"].startswith(kernel) and of_bf16["convert"] == "none"
    assert (of_bf16["widen"] != "none") == (d == 72)
    got = plan(ExchangeTensor, **queries(**given))
    floats = 900 * 8 * d // 2
    assert got == of_bf16 | {"convert": "paged_queries", "workspace": of_bf16["workspace"] + floats}
    scaled = queries(**given, q_scale=ExchangeTensor(1, dtype="float32"))
    assert plan(ExchangeTensor, **scaled)["workspace"] == got["workspace"] + 4


def test_empty_float8_queries():
    assert plan(ExchangeTensor, **queries(rows=0))["convert"] == "none"


@pytest.mark.parametrize("longest", [1, 900, 8192])
@pytest.mark.parametrize("d", [64, 256])
def test_chunks_over_a_float8_cache_are_decoding_in_the_batch_invariant_mode(d, longest):
    with tiercel.batch_invariant():
        got = plan(ExchangeTensor, **float8(d=d, longest=longest))
    assert got["kernel"].startswith("decode_attention<") and got["parts"] == 4


def test_too_many_rows_over_a_float8_cache_in_the_batch_invariant_mode():
    with (
        tiercel.batch_invariant(),
        pytest.raises(
            NotImplementedError, match="^paged_attention: `k_cache` must be .* batch-invariant mode"
        ),
    ):
        plan(ExchangeTensor, rows=2**20, batch=64, **float8(longest=2**20))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_prefixes_run_on_the_kernels_of_windows(make, d, softcap):
    got = plan(make, d=d, softcap=softcap, prefix=make(3, dtype="int32"))
    capped = "_capped" if softcap else ""
    assert got["kernel"] == f"attention_paged_bf16_d{d}_window{capped}"
    got = plan(make, d=d, softcap=softcap, prefix=make(3, dtype="int32"), longest=1, window=(7, 0))
    assert got["kernel"].startswith("decode_attention<")
    with tiercel.batch_invariant():
        got = plan(make, d=d, softcap=softcap, prefix=make(3, dtype="int32"))
    assert got["kernel"] == f"attention_paged_bf16_d{d}_window{capped}"


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (
            "`q` must have a head dimension that is a multiple of 8 up to 512",
            queries(d=20),
        ),
        (
            "`q` must be contiguous in its last dimension",
            queries(q=far(900, 8, 64, strides=(1024, 128, 2), dtype=FLOAT8)),
        ),
        (
            "`q` must start at a multiple of 8 bytes, with strides that are too",
            queries(q=far(900, 8, 64, strides=(516, 64, 1), dtype=FLOAT8)),
        ),
        (
            "`prefix` must be None with a window that limits the keys before a query",
            {"prefix": ExchangeTensor(3, dtype="int32"), "window": (7, 0)},
        ),
        (
            "`prefix` must have elements that are less than 2 GiB apart",
            {"prefix": far(3, strides=(2**29,), dtype="int32")},
        ),
    ],
)
def test_what_there_is_no_kernel_for(text, given):
    with pytest.raises(NotImplementedError, match=f"^paged_attention: {text}"):
        plan(ExchangeTensor, **given)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("`q_scale` must be None", {"q_scale": ExchangeTensor(1, dtype="float32")}),
        ("`prefix` must have shape", {"prefix": ExchangeTensor(4, dtype="int32")}),
        (
            "`prefix` must be None with `tree_mask`",
            {
                "prefix": ExchangeTensor(3, dtype="int32"),
                "tree": ExchangeTensor(900, dtype="int64"),
                "longest": 9,
            },
        ),
        (
            "`q_scale` must have 1 element",
            queries(q_scale=ExchangeTensor(2, dtype="float32")),
        ),
        (
            "`k_scale` must have 1 element or Hk = 2",
            queries(k_scale=ExchangeTensor(3, dtype="float32")),
        ),
    ],
)
def test_what_does_not_fit(text, given):
    with pytest.raises(ValueError, match=f"^paged_attention: {text}"):
        plan(ExchangeTensor, **given)
