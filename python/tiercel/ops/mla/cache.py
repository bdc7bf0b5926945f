# SPDX-License-Identifier: Apache-2.0
"""New latents into a paged cache."""

from __future__ import annotations

import math

from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index, between, places
from tiercel.core.op import Native, Op
from tiercel.core.spec import Call
from tiercel.ops.mla import reference as ref
from tiercel.ops.mla import spec

__all__ = ["mla_cache_write"]


def _indices(call: Call) -> list[Index]:
    found = [places("slots", call.slots, math.prod(call.kv_cache.shape[:2]))]
    if call.positions is not None:
        found.append(between("positions", call.positions, 0, call.cos_sin_cache.shape[0] - 1))
    return found


_WRITE = Op(
    spec.MLA_CACHE_WRITE,
    sm90=Native(
        _C.mla_cache_write,
        _C.mla_cache_write_plan,
        spec.MLA_CACHE_WRITE.names,
        "a token a warp, all layouts in one launch, rotation too",
        load=_C.mla_cache_write_load,
    ),
    reference=lambda call: ref.mla_cache_write(**spec.MLA_CACHE_WRITE.values(call)),
    method="torch's indexed assignment",
    indices=_indices,
)


@_WRITE.export
def mla_cache_write(
    latent: Tensor,
    rotary: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    *,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Writes new latents and rotary keys into a paged cache for :func:`tiercel.mla_decode`.

    In one launch, whatever the layout. With ``positions`` and ``cos_sin_cache`` rotary keys are
    rotated first, as by :func:`tiercel.rotary_embedding`, in float32; the results are rounded once,
    to the cache's format. A float8_e4m3fn cache holds ``element / kv_scale``, rounded
    to nearest even and saturated at +-448; NaN stays NaN. A row of 656 bytes has the latent as 512
    float8 values, four float32 scales of 128 values each, and the rotary key as 64 bfloat16 values;
    a scale is the largest magnitude / 448, at least ``2**-126``.

    Works under torch.compile and in CUDA graphs; it never synchronises. No gradient flows.

    Args:
        latent: ``[T, L]`` bfloat16 or float16. The precompiled kernels take L = 512, and rows, here
            and below, that are contiguous and start at multiples of 16 bytes.
        rotary: ``[T, R]``, the same dtype; already rotated, unless ``positions`` are given. The
            precompiled kernels take R = 64.
        kv_cache: ``[blocks, block size, L + R]`` of the dtype of ``latent`` or float8_e4m3fn, or
            ``[blocks, block size, 656]`` uint8 for bfloat16; written to.
        slots: ``[T]`` int32 or int64, contiguous: ``block * block_size + place`` for each token.
            -1, or any other slot outside of the cache, is skipped. If tokens share a slot, it holds
            any one of them, or parts of several.
        kv_scale: ``[1]`` float32; None is 1. For float8_e4m3fn only.
        positions: ``[T]`` int32 or int64, contiguous: rows of ``cos_sin_cache``, clamped to its
            first and last row. None: rotary keys are written as they are.
        cos_sin_cache: ``[P, R]``, contiguous: R/2 cosines, then R/2 sines. float32 or the dtype of
            ``latent``; R is even, and P is 1 or more. Given if ``positions`` are.
        interleaved: Whether pairs are elements 2i and 2i + 1 (DeepSeek's checkpoints) instead of i
            and i + R/2.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``kv_cache``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> tiercel.mla_cache_write(latent, rotary, kv_cache, slots)
        >>> turned = {"positions": positions, "cos_sin_cache": table, "interleaved": True}
        >>> tiercel.mla_cache_write(latent, rotary, kv_cache, slots, **turned)
    """
    turned = (positions, cos_sin_cache, interleaved)
    _WRITE.pick()(latent, rotary, kv_cache, slots, kv_scale, *turned, backend)
    return kv_cache
