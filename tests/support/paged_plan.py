# SPDX-License-Identifier: Apache-2.0
"""Plans of paged_attention for tensors that are only descriptions."""

from support.dlpack_tensor import ExchangeTensor

from tiercel import _C

FLOAT8 = "float8_e4m3fn"


def plan(
    make,
    rows=900,
    heads=(8, 2),
    d=64,
    *,
    batch=3,
    cache=(50, 16),
    columns=40,
    dtype="bfloat16",
    causal=True,
    window=None,
    scale=None,
    softcap=None,
    longest=900,
    most=None,
    **given,
):
    """The launches that paged_attention plans for tensors that `make` describes, or given ones."""

    def tensor(name, *shape, dtype=dtype):
        return given.get(name) or make(*shape, dtype=dtype)

    caches = [tensor(name, *cache, heads[1], d) for name in ("k_cache", "v_cache")]
    return _C.paged_attention_plan(
        tensor("q", rows, heads[0], d),
        *caches,
        tensor("page_table", batch, columns, dtype="int32"),
        tensor("seqused_k", batch, dtype="int32"),
        tensor("cu_seqlens_q", batch + 1, dtype="int32"),
        given.get("sinks"),
        longest,
        given.get("k_scale"),
        given.get("v_scale"),
        tensor("out", rows, heads[0], d),
        given.get("lse"),
        *(causal, window, scale, softcap, most),
        *(given.get(name) for name in ("tree", "prefix", "q_scale")),
    )


def far(*shape, strides, dtype="bfloat16"):
    return ExchangeTensor(*shape, dtype=dtype, strides=strides)


def float8(d=64, **options):
    """The arguments of float8 caches."""
    caches = (far(50, 16, 2, d, strides=(32 * d, 2 * d, d, 1), dtype=FLOAT8) for _ in range(2))
    return {"d": d, **dict(zip(("k_cache", "v_cache"), caches, strict=True)), **options}


def queries(rows=900, d=64, **options):
    """The arguments of float8 queries."""
    q, out = ExchangeTensor(rows, 8, d, dtype=FLOAT8), ExchangeTensor(rows, 8, d, dtype="bfloat16")
    return float8(d=d, **{"q": q, "out": out, "rows": rows, **options})
