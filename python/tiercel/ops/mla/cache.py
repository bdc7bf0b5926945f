# SPDX-License-Identifier: Apache-2.0
"""New latents into a paged cache."""

from __future__ import annotations

import math

from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index, places
from tiercel.core.op import Native, Op
from tiercel.core.spec import Call
from tiercel.ops.mla import reference as ref
from tiercel.ops.mla import spec

__all__ = ["mla_cache_write"]


def _indices(call: Call) -> list[Index]:
    return [places("slots", call.slots, math.prod(call.kv_cache.shape[:2]))]


_WRITE = Op(
    spec.MLA_CACHE_WRITE,
    sm90=Native(
        _C.mla_cache_write,
        _C.mla_cache_write_plan,
        spec.MLA_CACHE_WRITE.names,
        "a token a warp, all layouts in one launch",
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
    backend: str | None = None,
) -> Tensor:
    """Writes new latents and rotary keys into a paged cache for :func:`tiercel.mla_decode`.

    In one launch, whatever the layout. A float8_e4m3fn cache holds ``element / kv_scale``, rounded
    to nearest even and saturated at +-448; NaN stays NaN. A row of 656 bytes has the latent as 512
    float8 values, four float32 scales of 128 values each, and the rotary key as 64 bfloat16 values;
    a scale is the largest magnitude / 448, at least ``2**-126``.

    Works under torch.compile and in CUDA graphs; it never synchronises. No gradient flows.

    Args:
        latent: ``[T, L]`` bfloat16 or float16. The precompiled kernels take L = 512, and rows, here
            and below, that are contiguous and start at multiples of 16 bytes.
        rotary: ``[T, R]``, the same dtype, already rotated; the precompiled kernels take R = 64.
        kv_cache: ``[blocks, block size, L + R]`` of the dtype of ``latent`` or float8_e4m3fn, or
            ``[blocks, block size, 656]`` uint8 for bfloat16; written to.
        slots: ``[T]`` int32 or int64, contiguous: ``block * block_size + place`` for each token.
            -1, or any other slot outside of the cache, is skipped. If tokens share a slot, it holds
            any one of them, or parts of several.
        kv_scale: ``[1]`` float32; None is 1. For float8_e4m3fn only.
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
    """
    _WRITE.pick()(latent, rotary, kv_cache, slots, kv_scale, backend)
    return kv_cache
