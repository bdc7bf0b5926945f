# SPDX-License-Identifier: Apache-2.0
"""Plans of paged_attention for tensors that are only descriptions."""

from tiercel import _C


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
        *(causal, window, scale, softcap, most, given.get("tree")),
    )
