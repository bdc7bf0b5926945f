# SPDX-License-Identifier: Apache-2.0
"""The declarations of the ops of latent attention."""

from __future__ import annotations

from tiercel.core.spec import HALVES, INDICES, Bool, Call, Float, Int, Numerics, Spec, Tensor

FLOAT8 = "float8_e4m3fn"
LATENT, ROTARY, GROUP = 512, 64, 128
PACKED = LATENT + LATENT // GROUP * 4 + ROTARY * 2  # bytes of a row with scales of its own


def _check_row(op: str, call: Call, columns: int) -> None:
    """The cache's rows have that many columns, or are packed."""
    from tiercel.core.checks import dtype_name

    dtype, found = dtype_name(call.kv_cache.dtype), call.kv_cache.shape[2]
    expected = PACKED if dtype == "uint8" else columns
    if found != expected:
        raise ValueError(
            f"{op}: `kv_cache` of {dtype} must have {expected} in its last dimension, got {found}"
        )
    if call.kv_scale is not None and dtype != FLOAT8:
        raise ValueError(
            f"{op}: `kv_scale` must be None for a cache that is not {FLOAT8}, got a tensor"
        )


def _check_decode(call: Call) -> None:
    _check_absorbed("mla_decode", call)


def _check_sparse(call: Call) -> None:
    _check_absorbed("mla_sparse_attention", call)


def _check_absorbed(op: str, call: Call) -> None:
    columns = call.q.shape[-1]
    _check_row(op, call, columns)
    packed = call.kv_cache.shape[2] == PACKED and columns != PACKED
    if packed and columns != LATENT + ROTARY:
        raise ValueError(f"{op}: `q` must have 576 columns for a cache of uint8, got {columns}")
    if not 0 < call.scale < float("inf"):
        raise ValueError(f"{op}: `scale` must be positive and finite, got {call.scale}")
    if not 0 < call.d_v <= columns:
        raise ValueError(f"{op}: `d_v` must be from 1 to the columns of `q`, got {call.d_v}")


_CACHE_TYPES = (FLOAT8, "uint8")

MLA_DECODE_LSE = Spec(
    "mla_decode_lse",
    Tensor("q", "B Sq H D", HALVES, strided=True),
    Tensor(
        "kv_cache",
        "pages page_size W",
        ("q", *_CACHE_TYPES),
        strided=True,
        shape_text="[pages, page size, D]",
    ),
    Tensor("page_table", "B pages_each", "int32", True, shape_text="[B, pages of a sequence]"),
    Tensor("seqused_k", "B", "int32", strided=True),
    Float("scale"),
    Tensor("kv_scale", "1", "float32", optional=True),
    Int("d_v", LATENT),
    # Probabilities and results are rounded to bfloat16, 2**-9 each; values are about 1.
    results=[
        Tensor("out", "B Sq H d_v", "q", strided=True, rtol=1e-2, atol=1e-2),
        Tensor("lse", "B H Sq", "float32", rtol=1e-4, atol=1e-4),
    ],
    check=_check_decode,
    public="mla_decode",
    limits="D = 576, d_v = 512, page sizes that are powers of two, 16-byte aligned rows",
    numerics=Numerics(
        2**-8,
        of="terms",
        sums="float32: keys in order, by tiles and splits; probabilities rounded to bfloat16 or "
        "float16",
        batch_invariant=False,
        varies="the splits of the keys, which are chosen by the batch",
    ),
)

MLA_DECODE = MLA_DECODE_LSE.changed(name="mla_decode", results=MLA_DECODE_LSE.results[:1])

MLA_SPARSE_LSE = Spec(
    "mla_sparse_attention_lse",
    Tensor("q", "T H D", "bfloat16", strided=True),
    MLA_DECODE_LSE.tensors[1],
    Tensor("indices", "T k", "int32", strided=True),
    Float("scale"),
    Tensor("kv_scale", "1", "float32", optional=True),
    Int("d_v", LATENT),
    results=[
        Tensor("out", "T H d_v", "q", strided=True, rtol=1e-2, atol=1e-2),
        Tensor("lse", "T H", "float32", rtol=1e-4, atol=1e-4),
    ],
    check=_check_sparse,
    public="mla_sparse_attention",
    limits="D = 576, d_v = 512, page sizes that are powers of two, 16-byte aligned rows",
    numerics=Numerics(
        2**-8,
        of="terms",
        sums="float32: entries in order, by tiles and splits; probabilities rounded to bfloat16",
        batch_invariant=False,
        varies="the splits of the entries, which are chosen by the batch",
    ),
)

MLA_SPARSE = MLA_SPARSE_LSE.changed(name="mla_sparse_attention", results=MLA_SPARSE_LSE.results[:1])


INDEXER_LOGITS = Spec(
    "indexer_logits",
    Tensor("q", "T H D", FLOAT8),
    Tensor("k", "K D", FLOAT8, strided=True),
    Tensor("k_scale", "K", "float32"),
    Tensor("weights", "T H", "float32", strided=True),
    Tensor("starts", "T", "int32", optional=True, strided=True),
    Tensor("ends", "T", "int32", optional=True, strided=True),
    # The tensor cores keep about 13 bits of a sum of products of float8.
    results=[Tensor("logits", "T K", "float32", rtol=2e-3, atol=2e-3)],
    limits="32 or 64 heads of 128 columns, 16-byte aligned rows of k",
    numerics=Numerics(
        2**-12,
        of="terms",
        sums="products as the tensor cores sum float8; heads in float32, in a fixed order",
    ),
)


def _check_top_k(call: Call) -> None:
    if call.k < 1:
        raise ValueError(f"top_k_indices: `k` must be at least 1, got {call.k}")


TOP_K_INDICES = Spec(
    "top_k_indices",
    Tensor("logits", "T N", "float32", strided=True),
    Int("k", 2048),
    Tensor("lengths", "T", "int32", optional=True, strided=True),
    results=[Tensor("indices", "T k", "int32")],
    check=_check_top_k,
    limits="contiguous rows",
    numerics=Numerics(0.0, of="result", sums="none: the selection is exact"),
)


def _check_write(call: Call) -> None:
    from tiercel.core.checks import dtype_name

    op, columns, rotary = "mla_cache_write", call.latent.shape[1], call.rotary.shape[1]
    _check_row(op, call, columns + rotary)
    angles = call.cos_sin_cache
    if angles is not None and rotary % 2 != 0:
        raise ValueError(f"{op}: `rotary` must have an even number of columns, got {rotary}")
    if angles is not None and angles.shape[0] == 0 and call.latent.shape[0] != 0:
        raise ValueError(
            f"{op}: `cos_sin_cache` must have at least one row, got {list(angles.shape)}"
        )
    if call.interleaved and angles is None:
        raise ValueError(f"{op}: `interleaved` needs `positions` and `cos_sin_cache`, got None")
    if dtype_name(call.kv_cache.dtype) != "uint8":
        return
    if (columns, rotary) != (LATENT, ROTARY):
        raise ValueError(
            f"{op}: `latent` and `rotary` must have 512 and 64 columns for a cache of uint8, "
            f"got {columns} and {rotary}"
        )
    if dtype_name(call.latent.dtype) != "bfloat16":
        raise TypeError(
            f"{op}: `latent` must have dtype bfloat16 for a cache of uint8, "
            f"got {dtype_name(call.latent.dtype)}"
        )


MLA_CACHE_WRITE = Spec(
    "mla_cache_write",
    Tensor("latent", "T L", HALVES, strided=True),
    Tensor("rotary", "T R", "latent", strided=True),
    Tensor(
        "kv_cache",
        "blocks places W",
        ("latent", *_CACHE_TYPES),
        strided=True,
        written=True,
        shape_text="[blocks, block size, D]",
    ),
    Tensor("slots", "T", INDICES),
    Tensor("kv_scale", "1", "float32", optional=True),
    Tensor("positions", "T", INDICES, optional=True),
    Tensor("cos_sin_cache", "P R", ("float32", "latent"), optional=True),
    Bool("interleaved", False),
    together=("positions", "cos_sin_cache"),
    check=_check_write,
    limits="L = 512, R = 64, 16-byte aligned rows",
    numerics=Numerics(2**-22, of="terms"),
)
