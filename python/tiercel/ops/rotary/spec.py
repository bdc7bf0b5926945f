# SPDX-License-Identifier: Apache-2.0
"""The declarations of rotary_embedding and kv_cache_write."""

from __future__ import annotations

from dataclasses import replace

from tiercel.core.spec import FLOATS, HALVES, INDICES, Bool, Call, Spec, Tensor


def _check_rotary(call: Call) -> None:
    size, (rows, rotated) = call.q.shape[2], call.cos_sin_cache.shape
    if rotated % 2 != 0 or rotated > size:
        raise ValueError(
            "rotary_embedding: `cos_sin_cache` must have an even second dimension of at most "
            f"D = {size}, got {rotated}"
        )
    if rows == 0 and call.q.shape[0] != 0 and rotated != 0:
        raise ValueError(
            "rotary_embedding: `cos_sin_cache` must have at least one row, "
            f"got {list(call.cos_sin_cache.shape)}"
        )


ROTARY_EMBEDDING = Spec(
    "rotary_embedding",
    Tensor("positions", "T", INDICES),
    Tensor("q", "T H D", FLOATS, strided=True),
    Tensor("k", "T Hk D", "q", strided=True),
    Tensor("cos_sin_cache", "P R", ("float32", "q")),
    Bool("interleaved", False),
    # The results' rounding to bfloat16, 2**-9.
    results=[
        Tensor("q_out", "T H D", "q", strided=True, rtol=4e-3, atol=1e-5),
        Tensor("k_out", "T Hk D", "q", strided=True, rtol=4e-3, atol=1e-5),
    ],
    check=_check_rotary,
    limits="contiguous last dimension",
)

ROTARY_IN_PLACE = ROTARY_EMBEDDING.changed(
    name="rotary_embedding_",
    arguments=tuple(
        replace(argument, written=True) if argument.name in ("q", "k") else argument
        for argument in ROTARY_EMBEDDING.arguments
    ),
    results=(),
)


_CACHE = "blocks places H D"
_CACHE_TEXT = "[blocks, block size, H, D]"


def _check_scales(call: Call) -> None:
    from tiercel.core.checks import check_cache_scale

    for name in ("key_scale", "value_scale"):
        scale, heads = getattr(call, name), call.key.shape[1]
        check_cache_scale("kv_cache_write", name, scale, call.key_cache, "H", heads)


KV_CACHE_WRITE = Spec(
    "kv_cache_write",
    Tensor("key", "T H D", HALVES, strided=True),
    Tensor("value", "T H D", "key", strided=True),
    Tensor(
        "key_cache",
        _CACHE,
        ("key", "float8_e4m3fn"),
        strided=True,
        written=True,
        shape_text=_CACHE_TEXT,
    ),
    Tensor("value_cache", _CACHE, "key_cache", strided=True, written=True, shape_text=_CACHE_TEXT),
    Tensor("slots", "T", INDICES),
    Tensor("key_scale", "*", "float32", optional=True),
    Tensor("value_scale", "*", "float32", optional=True),
    check=_check_scales,
    limits="contiguous last dimension",
)
