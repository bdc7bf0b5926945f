# SPDX-License-Identifier: Apache-2.0
"""The declarations of rotary_embedding, kv_cache_write, qk_norm_rope_cache and qk_norm_rope."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tiercel.core.spec import (
    FLOATS,
    HALVES,
    INDICES,
    Bool,
    Call,
    Float,
    Numerics,
    Scalar,
    Spec,
    Tensor,
)


def _check_rotary(op: str, call: Call) -> None:
    size, (rows, rotated) = call.q.shape[2], call.cos_sin_cache.shape
    if rotated % 2 != 0 or rotated > size:
        raise ValueError(
            f"{op}: `cos_sin_cache` must have an even second dimension of at most "
            f"D = {size}, got {rotated}"
        )
    if rows == 0 and call.q.shape[0] != 0 and rotated != 0:
        raise ValueError(
            f"{op}: `cos_sin_cache` must have at least one row, "
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
    check=partial(_check_rotary, "rotary_embedding"),
    limits="contiguous last dimension",
    numerics=Numerics(4e-6, of="terms"),
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
    numerics=Numerics(0),
)


def _check_sections(op: str, call: Call) -> None:
    """Sections, and the shape of the positions, which depends on them."""
    from tiercel.core.checks import check_shape

    tokens, pairs, sections = call.q.shape[0], call.cos_sin_cache.shape[1] // 2, call.sections
    if sections is None:
        check_shape(op, "positions", call.positions, (tokens,), "[T]")
        if call.sections_interleaved:
            raise ValueError(f"{op}: `sections_interleaved` needs `sections`")
        return
    is_list = isinstance(sections, (tuple, list))
    if not is_list or len(sections) != 3 or not all(hasattr(n, "__index__") for n in sections):
        error = ValueError if is_list else TypeError
        raise error(f"{op}: `sections` must be None or three whole numbers, got {sections!r}")
    check_shape(op, "positions", call.positions, (3, tokens), "[3, T]")
    sections = list(sections)
    if min(sections) < 0:
        raise ValueError(f"{op}: `sections` must not be negative, got {sections}")
    if sum(sections) != pairs:
        raise ValueError(f"{op}: `sections` must add up to R / 2 = {pairs}, got {sections}")
    second, third = (pairs + 1) // 3, pairs // 3  # pairs 3 i + 1 and 3 i + 2
    if call.sections_interleaved and (sections[1] > second or sections[2] > third):
        raise ValueError(
            f"{op}: `sections` must be at most {second} and {third} for the second and third "
            f"position, interleaved, got {sections}"
        )


def _check_fused(call: Call) -> None:
    from tiercel.core.checks import check_cache_scale

    op = "qk_norm_rope_cache"
    _check_rotary(op, call)
    _check_sections(op, call)
    check_cache_scale(op, "q_scale", call.q_scale, call.q_out, "H", call.q.shape[1], "a `q_out`")
    for name in ("key_scale", "value_scale"):
        scale, heads = getattr(call, name), call.k.shape[1]
        check_cache_scale(op, name, scale, call.key_cache, "Hk", heads)


_FUSED_CACHE = "blocks places Hk D"
_FUSED_CACHE_TEXT = "[blocks, block size, Hk, D]"
_WEIGHT = ("q", "float32")

QK_NORM_ROPE_CACHE = Spec(
    "qk_norm_rope_cache",
    Tensor("q", "T H D", HALVES, strided=True),
    Tensor("k", "T Hk D", "q", strided=True),
    Tensor("v", "T Hk D", "q", strided=True),
    Tensor("q_out", "T H D", ("q", "float8_e4m3fn"), strided=True, written=True),
    Tensor(
        "key_cache",
        _FUSED_CACHE,
        ("q", "float8_e4m3fn"),
        strided=True,
        written=True,
        shape_text=_FUSED_CACHE_TEXT,
    ),
    Tensor(
        "value_cache",
        _FUSED_CACHE,
        "key_cache",
        strided=True,
        written=True,
        shape_text=_FUSED_CACHE_TEXT,
    ),
    Tensor("slots", "T", INDICES),
    Tensor("positions", "*", INDICES),
    Tensor("cos_sin_cache", "P R", ("float32", "q")),
    Tensor("q_weight", "D", _WEIGHT, optional=True),
    Tensor("k_weight", "D", _WEIGHT, optional=True),
    Float("eps", 1e-6, at_least=0),
    Bool("interleaved", False),
    Tensor("q_scale", "*", "float32", optional=True),
    Tensor("key_scale", "*", "float32", optional=True),
    Tensor("value_scale", "*", "float32", optional=True),
    Scalar("sections", None, kind="int[3]", optional=True),
    Bool("sections_interleaved", False),
    check=_check_fused,
    limits="D a multiple of 8 up to 512, R a multiple of 16, 16-byte aligned strides",
    numerics=Numerics(4e-6, of="terms", sums="float32: over a head, lanes in a fixed order"),
)

QK_NORM_ROPE = Spec(
    "qk_norm_rope",
    Tensor("q", "T H D", HALVES, strided=True),
    Tensor("k", "T Hk D", "q", strided=True),
    Tensor("positions", "T", INDICES),
    Tensor("cos_sin_cache", "P R", ("float32", "q")),
    Tensor("q_weight", "D", _WEIGHT, optional=True),
    Tensor("k_weight", "D", _WEIGHT, optional=True),
    Float("eps", 1e-6, at_least=0),
    Bool("interleaved", False),
    # The results' rounding to bfloat16, 2**-9.
    results=[
        Tensor("q_out", "T H D", "q", strided=True, rtol=4e-3, atol=1e-5),
        Tensor("k_out", "T Hk D", "q", strided=True, rtol=4e-3, atol=1e-5),
    ],
    check=partial(_check_rotary, "qk_norm_rope"),
    limits=QK_NORM_ROPE_CACHE.limits,
    numerics=QK_NORM_ROPE_CACHE.numerics,
)

# Gradients of weights that are not wanted are empty.
QK_NORM_ROPE_BACKWARD = Spec(
    "qk_norm_rope_backward",
    *QK_NORM_ROPE.arguments[:2],
    Tensor("grad_q_out", "T H D", "q", strided=True),
    Tensor("grad_k_out", "T Hk D", "q", strided=True),
    *QK_NORM_ROPE.arguments[2:],
    Bool("for_q_weight", True),
    Bool("for_k_weight", True),
    results=[
        Tensor("grad_q", "T H D", "q"),
        Tensor("grad_k", "T Hk D", "q"),
        Tensor("grad_q_weight", "D", "q_weight"),
        Tensor("grad_k_weight", "D", "k_weight"),
    ],
    check=partial(_check_rotary, "qk_norm_rope_backward"),
    limits=QK_NORM_ROPE.limits,
    gradient_of="qk_norm_rope",
)
