# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and writes to a paged cache, separately and in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index, between, places
from tiercel.core.op import Gradient, Native, Op
from tiercel.core.spec import Call, Spec
from tiercel.ops.rotary import reference as ref
from tiercel.ops.rotary import spec

__all__ = ["kv_cache_write", "qk_norm_rope_cache", "rotary_embedding"]


def _indices(call: Call) -> list[Index]:
    return [between("positions", call.positions, 0, call.cos_sin_cache.shape[0] - 1)]


def _slots(call: Call) -> Index:
    return places("slots", call.slots, math.prod(call.key_cache.shape[:2]))


def _save(ctx: Any, call: Call, results: Any) -> None:
    ctx.interleaved = call.interleaved
    ctx.save_for_backward(call.positions, call.cos_sin_cache)


def _gradients(ctx: Any, *grads: Tensor | None) -> dict[str, Tensor | None]:
    """The gradients turned back: by the same angles, with the signs of the sines changed."""
    positions, cache = ctx.saved_tensors
    back = ref.turned_back(cache)
    given = [grad for grad in grads if grad is not None]
    if not given:
        return {}
    none = given[0].new_empty(given[0].shape[0], 0, given[0].shape[2])
    q, k = (none if grad is None else grad for grad in grads)
    turned = rotary_embedding(positions, q, k, back, interleaved=ctx.interleaved)
    pairs = zip("qk", grads, turned, strict=True)
    return {name: None if grad is None else result for name, grad, result in pairs}


def _rotary(declared: Spec, outputs: tuple[str, str], **more: Any) -> Op:
    return Op(
        declared,
        sm90=Native(
            _C.rotary_embedding,
            _C.rotary_embedding_plan,
            ("positions", "q", "k", "cos_sin_cache", *outputs, "interleaved"),
            "whole vectors of q and k in one launch",
            load=_C.rotary_embedding_load,
        ),
        method="torch, one step after the other",
        indices=_indices,
        **more,
    )


def _reference(call: Call) -> tuple[Tensor, Tensor]:
    return ref.rotary_embedding(**spec.ROTARY_EMBEDDING.values(call))


def _reference_in_place(call: Call) -> None:
    for place, result in zip((call.q, call.k), _reference(call), strict=True):
        place.copy_(result)


_ROTARY = _rotary(
    spec.ROTARY_EMBEDDING,
    ("q_out", "k_out"),
    reference=_reference,
    gradient=Gradient(_save, _gradients),
)
_ROTARY_IN_PLACE = _rotary(spec.ROTARY_IN_PLACE, ("q", "k"), reference=_reference_in_place)


@_ROTARY.export
def rotary_embedding(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    interleaved: bool = False,
    inplace: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotates pairs of elements of queries and keys by their token's position, in one launch.

    Rotary position embedding (Su et al., 2021, arXiv:2104.09864). The first R elements of each head
    are rotated, ``(x, y) -> (x cos - y sin, y cos + x sin)``; the others are copied. Pairs are
    elements i and i + R/2 (GPT-NeoX, Llama), or 2i and 2i + 1 with ``interleaved`` (GPT-J).
    Arithmetic is float32, and results are rounded once.

    Differentiable in ``q`` and ``k``, except with ``inplace`` or ``out``. Works under torch.compile
    and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        positions: ``[T]`` int32 or int64, contiguous: rows of ``cos_sin_cache``, clamped to its
            first and last row.
        q: ``[T, H, D]``, float32, bfloat16 or float16. The precompiled kernels take any strides
            with a contiguous last dimension; fastest with all others multiples of 16 bytes.
        k: ``[T, Hk, D]``, the same; Hk may be 0.
        cos_sin_cache: ``[P, R]``, contiguous: R/2 cosines, then R/2 sines. float32 or the dtype of
            ``q``; R is even and at most D, and P is 1 or more.
        interleaved: Whether pairs are elements 2i and 2i + 1 instead of i and i + R/2.
        inplace: Whether to rotate ``q`` and ``k`` in place.
        out: ``(q_out, k_out)`` to write to, of the shapes, dtypes and device of ``q`` and ``k``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``(q, k)`` rotated.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> q, k = tiercel.rotary_embedding(positions, q, k, cos_sin_cache)
    """
    if inplace:
        if out is not None:
            raise ValueError("rotary_embedding: `inplace` and `out` exclude each other")
        _ROTARY_IN_PLACE.pick()(positions, q, k, cos_sin_cache, interleaved, backend)
        return q, k
    if out is None:
        result: tuple[Tensor, Tensor] = _ROTARY.pick()(
            positions, q, k, cos_sin_cache, interleaved, backend
        )
        return result
    return _ROTARY.into()(out, positions, q, k, cos_sin_cache, interleaved, backend)  # type: ignore[no-any-return]


_KV_CACHE_WRITE = Op(
    spec.KV_CACHE_WRITE,
    sm90=Native(
        _C.kv_cache_write,
        _C.kv_cache_write_plan,
        spec.KV_CACHE_WRITE.names,
        "keys and values in one launch",
        load=_C.kv_cache_write_load,
    ),
    reference=lambda call: ref.kv_cache_write(**spec.KV_CACHE_WRITE.values(call)),
    method="torch's indexed assignment",
    indices=lambda call: [_slots(call)],
)


@_KV_CACHE_WRITE.export
def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes new keys and values into a paged cache, in one launch.

    A float8_e4m3fn cache holds ``element / scale``, rounded to nearest even and saturated at +-448;
    NaN stays NaN.

    Works under torch.compile and in CUDA graphs; it never synchronises. No gradient flows.

    Args:
        key: ``[T, H, D]`` bfloat16 or float16. The precompiled kernels take any strides with a
            contiguous last dimension.
        value: The same.
        key_cache: ``[blocks, block size, H, D]`` of the dtype of ``key`` or float8_e4m3fn, written
            to; any strides with a contiguous last dimension.
        value_cache: The same.
        slots: ``[T]`` int32 or int64, contiguous: ``block * block_size + place`` for each token.
            -1, or any other slot outside of the cache, is skipped. If tokens share a slot, it holds
            any one of them, or parts of several.
        key_scale: float32, one element or H of them; None is 1. For float8 only.
        value_scale: The same.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``(key_cache, value_cache)``, the arguments.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> tiercel.kv_cache_write(k, v, key_cache, value_cache, slot_mapping)
    """
    _KV_CACHE_WRITE.pick()(
        key, value, key_cache, value_cache, slots, key_scale, value_scale, backend
    )
    return key_cache, value_cache


_QK_NORM_ROPE_CACHE = Op(
    spec.QK_NORM_ROPE_CACHE,
    sm90=Native(
        _C.qk_norm_rope_cache,
        _C.qk_norm_rope_cache_plan,
        spec.QK_NORM_ROPE_CACHE.names,
        "norms, rotation and cache in one launch, a head in a few lanes' registers",
        load=_C.qk_norm_rope_cache_load,
    ),
    reference=lambda call: ref.qk_norm_rope_cache(**spec.QK_NORM_ROPE_CACHE.values(call)),
    method="torch, one step after the other",
    indices=lambda call: [_slots(call), *_indices(call)],
)


@_QK_NORM_ROPE_CACHE.export
def qk_norm_rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    q_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms, rotates and caches the heads of a decode step, between projection and attention, in
    one launch.

    Each head of queries and keys is divided by its root mean square where there is a weight, as by
    :func:`tiercel.rms_norm`, and rotated as by :func:`tiercel.rotary_embedding`. Queries go to
    ``q_out``, keys and values to a paged cache as by :func:`tiercel.kv_cache_write`. Arithmetic is
    float32 from the first step to the last, and results are rounded once.

    There is no derivative: it is for inference; :func:`tiercel.qk_norm_rope` has one. Works under
    torch.compile and in CUDA graphs; it never synchronises.

    Args:
        q: ``[T, H, D]`` bfloat16 or float16. The precompiled kernels take D that is a multiple of 8
            up to 512, and any strides that are multiples of 16 bytes with a contiguous last
            dimension, such as slices of one projection.
        k: ``[T, Hk, D]``, the same.
        v: The same.
        q_out: ``[T, H, D]``, written to: of the dtype of ``q``, possibly ``q`` itself; or
            float8_e4m3fn, for ``element / q_scale``.
        key_cache: ``[blocks, block size, Hk, D]`` of the dtype of ``q`` or float8_e4m3fn, written
            to; any strides with a contiguous last dimension.
        value_cache: The same.
        slots: ``[T]`` int32 or int64, contiguous: ``block * block_size + place`` for each token.
            -1, or any other slot outside of the cache, is skipped; the token's query is computed
            all the same.
        positions: ``[T]`` int32 or int64, contiguous: rows of ``cos_sin_cache``, clamped to its
            first and last row. With ``sections`` ``[3, T]``: three positions for each token.
        cos_sin_cache: ``[P, R]``, contiguous: R/2 cosines, then R/2 sines. float32 or the dtype of
            ``q``; R is even and at most D, and P is 1 or more. The precompiled kernels take R that
            is a multiple of 16.
        q_weight: ``[D]``, contiguous, of the dtype of ``q`` or float32; None for no norm.
        k_weight: The same, for keys.
        eps: Added to the mean of the squares; not negative.
        interleaved: Whether pairs are elements 2i and 2i + 1 instead of i and i + R/2.
        q_scale: float32, one element or H of them; None is 1. For a float8 ``q_out`` only.
        key_scale: float32, one element or Hk of them; None is 1. For a float8 cache only.
        value_scale: The same.
        sections: Multimodal rotary embedding (Qwen2-VL, arXiv:2409.12191): how many of the R/2
            pairs are rotated by the first, second and third position of a token (time, height and
            width), in this order; ``mrope_section`` in a model's configuration. They add up to
            R/2. None: one position for each token.
        sections_interleaved: The order of Qwen3-VL: pairs 1, 4, 7, ... are rotated by the second
            position, pairs 2, 5, 8, ... by the third, as many as ``sections`` says, and all others
            by the first. With ``sections`` only.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``(q_out, key_cache, value_cache)``, the arguments.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, ``eps`` is negative, or there is no such
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted.

    Example:
        >>> q, k, v = qkv.view(tokens, 48, 128).split([32, 8, 8], dim=1)
        >>> tiercel.qk_norm_rope_cache(
        ...     *(q, k, v, q, key_cache, value_cache, slots, positions, cos_sin_cache),
        ...     *(q_norm.weight, k_norm.weight),
        ... )
    """
    _QK_NORM_ROPE_CACHE.pick()(
        *(q, k, v, q_out, key_cache, value_cache, slots, positions, cos_sin_cache),
        *(q_weight, k_weight, eps, interleaved, q_scale, key_scale, value_scale),
        *(sections, sections_interleaved, backend),
    )
    return q_out, key_cache, value_cache
