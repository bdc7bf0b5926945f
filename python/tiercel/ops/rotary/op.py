# SPDX-License-Identifier: Apache-2.0
"""Around attention: rotary position embedding, and new keys and values into a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._launcher import Argument, Like, Output, launcher
from tiercel._op import Autograd, Backend, Op
from tiercel.core import platform
from tiercel.core.checks import (
    check_bool,
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.eager import empty
from tiercel.core.index_checks import Index, between, places
from tiercel.core.platform import Reason
from tiercel.ops.rotary import reference as ref

__all__ = ["kv_cache_write", "rotary_embedding"]

_ROTARY = "rotary_embedding"
_KV = "kv_cache_write"
_ELEMENTS = (torch.float32, torch.bfloat16, torch.float16)
_INDICES = (torch.int32, torch.int64)


def _check_rotary(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    interleaved: bool,
    backend: str | None,
) -> None:
    check_rank(_ROTARY, "positions", positions, 1)
    check_dtype(_ROTARY, "positions", positions.dtype, _INDICES)
    check_rank(_ROTARY, "q", q, 3)
    check_dtype(_ROTARY, "q", q.dtype, _ELEMENTS)
    check_rank(_ROTARY, "k", k, 3)
    check_dtype(_ROTARY, "k", k.dtype, (q.dtype,))
    tokens, size = positions.shape[0], q.shape[2]
    check_shape(_ROTARY, "q", q, (tokens, q.shape[1], size), "[T, H, D]")
    check_shape(_ROTARY, "k", k, (tokens, k.shape[1], size), "[T, Hk, D]")
    check_rank(_ROTARY, "cos_sin_cache", cos_sin_cache, 2)
    if cos_sin_cache.dtype != torch.float32:
        check_dtype(_ROTARY, "cos_sin_cache", cos_sin_cache.dtype, (q.dtype,))
    rotated = cos_sin_cache.shape[1]
    if rotated % 2 != 0 or rotated > size:
        raise ValueError(
            f"{_ROTARY}: `cos_sin_cache` must have an even second dimension of at most "
            f"D = {size}, got {rotated}"
        )
    if cos_sin_cache.shape[0] == 0 and tokens != 0 and rotated != 0:
        raise ValueError(
            f"{_ROTARY}: `cos_sin_cache` must have at least one row, "
            f"got {list(cos_sin_cache.shape)}"
        )
    for name, tensor in (("positions", positions), ("k", k), ("cos_sin_cache", cos_sin_cache)):
        check_same_device(_ROTARY, name, tensor, "q", q)
    check_contiguous(_ROTARY, "positions", positions)
    check_contiguous(_ROTARY, "cos_sin_cache", cos_sin_cache)
    check_bool(_ROTARY, "interleaved", interleaved)


def _check_rotary_out(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    interleaved: bool,
    backend: str | None,
) -> None:
    _check_rotary(positions, q, k, cos_sin_cache, interleaved, backend)
    for name, out, like in (("q_out", q_out, q), ("k_out", k_out, k)):
        check_dtype(_ROTARY, name, out.dtype, (q.dtype,))
        check_shape(_ROTARY, name, out, like.shape, f"of `{name[0]}`")
        check_same_device(_ROTARY, name, out, "q", q)


def _rotary_outputs(positions: Tensor, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty(q, tuple(q.shape), q.dtype), empty(k, tuple(k.shape), k.dtype)


def _rotary_sm90(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    interleaved: bool,
    backend: str | None,
    *,
    launch: Any = _C.rotary_embedding,
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _rotary_outputs(positions, q, k)
    launch(positions, q, k, cos_sin_cache, q_out, k_out, interleaved)
    return q_out, k_out


_POSITIONS, _Q, _K, _CACHE, _INTERLEAVED = map(Argument, range(5))
_ROTARY_RUN = launcher(
    _C.rotary_embedding,
    (_POSITIONS, _Q, _K, _CACHE, Output(0), Output(1), _INTERLEAVED),
    count=6,
    outputs=(Like(_Q), Like(_K)),
    otherwise=_rotary_sm90,
)


def _rotary_sm90_out(*args: Any) -> None:
    _C.rotary_embedding(*args[:-1])


def _rotary_sm90_in_place(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool, _: Any
) -> None:
    _C.rotary_embedding(positions, q, k, cos_sin_cache, q, k, interleaved)


def _rotary_ref(*args: Any) -> tuple[Tensor, Tensor]:
    return ref.rotary_embedding(*args[:4], interleaved=args[4])


def _rotary_ref_out(*args: Any) -> None:
    results = ref.rotary_embedding(*args[:4], interleaved=args[6])
    for out, result in zip(args[4:6], results, strict=True):
        out.copy_(result)


def _rotary_ref_in_place(*args: Any) -> None:
    _rotary_ref_out(*args[:4], args[1], args[2], *args[4:])


def _rotary_plan(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool, *_: Any
) -> dict[str, Any]:
    outputs = _rotary_outputs(positions, q, k)
    return dict(_C.rotary_embedding_plan(positions, q, k, cos_sin_cache, *outputs, interleaved))


def _unless(op: str, device: torch.device, plan: Any) -> Reason | None:
    reason = platform.why_not(device)
    if reason is not None:
        return reason
    try:
        plan()
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{op}: "))
    return None


def _rotary_why_not(*args: Any) -> Reason | None:
    return _unless(_ROTARY, args[1].device, lambda: _rotary_plan(*args))


def _rotary_why_not_out(*args: Any) -> Reason | None:
    return _unless(_ROTARY, args[1].device, lambda: _C.rotary_embedding_plan(*args[:-1]))


def _rotary_indices(positions: Tensor, q: Tensor, k: Tensor, cache: Tensor, *_: Any) -> list[Index]:
    return [between("positions", positions, 0, cache.shape[0] - 1)]


def _rotary_save(ctx: Any, args: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    positions, _, _, cos_sin_cache, ctx.interleaved = args[:5]
    ctx.save_for_backward(positions, cos_sin_cache)


def _rotary_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Turned back: the same with the sines' signs changed."""
    positions, cache = ctx.saved_tensors
    half = cache.shape[1] // 2
    back = torch.cat([cache[:, :half], -cache[:, half:]], dim=1)
    given = [grad for grad in grads if grad is not None]
    if not given:
        return None, None, None
    none = given[0].new_empty(given[0].shape[0], 0, given[0].shape[2])
    q, k = (none if grad is None else grad for grad in grads)
    turned = rotary_embedding(positions, q, k, back, interleaved=ctx.interleaved)
    results = [None if g is None else t for g, t in zip(grads, turned, strict=True)]
    return None, results[0], results[1]


_ROTARY_CUDA = ("whole vectors of q and k in one launch", "cuda")
_ROTARY_TORCH = ("torch, one step after the other", "torch")
_ROTARY_ARGUMENTS = "Tensor positions, {}, Tensor cos_sin_cache, "

_ROTARY_OP = Op(
    _ROTARY,
    f"({_ROTARY_ARGUMENTS.format('Tensor q, Tensor k')}bool interleaved=False,"
    " str? backend=None) -> (Tensor q_out, Tensor k_out)",
    check=_check_rotary,
    fake=_rotary_outputs,
    sm90=Backend("sm90", _ROTARY_RUN, *_ROTARY_CUDA, why_not=_rotary_why_not),
    ref=Backend("ref", _rotary_ref, *_ROTARY_TORCH),
    autograd=Autograd(_rotary_save, _rotary_backward),
    describe=_rotary_plan,
    load=_C.rotary_embedding_load,
    indices=_rotary_indices,
)

_ROTARY_OUT = Op(
    f"{_ROTARY}_out",
    f"({_ROTARY_ARGUMENTS.format('Tensor q, Tensor k')}Tensor(a!) q_out, Tensor(b!) k_out,"
    " bool interleaved=False, str? backend=None) -> ()",
    check=_check_rotary_out,
    fake=lambda *args: None,
    sm90=Backend("sm90", _rotary_sm90_out, *_ROTARY_CUDA, why_not=_rotary_why_not_out),
    ref=Backend("ref", _rotary_ref_out, *_ROTARY_TORCH),
    family=_ROTARY,
    launch=_C.rotary_embedding,
    indices=_rotary_indices,
)

_ROTARY_IN_PLACE = Op(
    f"{_ROTARY}_",
    f"({_ROTARY_ARGUMENTS.format('Tensor(a!) q, Tensor(b!) k')}bool interleaved=False,"
    " str? backend=None) -> ()",
    check=_check_rotary,
    fake=lambda *args: None,
    sm90=Backend("sm90", _rotary_sm90_in_place, *_ROTARY_CUDA, why_not=_rotary_why_not),
    ref=Backend("ref", _rotary_ref_in_place, *_ROTARY_TORCH),
    family=_ROTARY,
    indices=_rotary_indices,
)


@_ROTARY_OP.export
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
    """Turns pairs of elements of queries and keys by their token's position, in one launch.

    Rotary position embedding (Su et al., 2021, arXiv:2104.09864). Of each head the first R elements
    are turned, ``(x, y) -> (x cos - y sin, y cos + x sin)``, the others are copied. Pairs are
    elements i and i + R/2 (GPT-NeoX, Llama), or 2i and 2i + 1 with ``interleaved`` (GPT-J).
    Arithmetic is float32, and results are rounded once.

    Differentiable in ``q`` and ``k``, except with ``inplace`` or ``out``. Works under torch.compile
    and torch.export, and in CUDA graphs; it never synchronises.

    Args:
        positions: ``[T]`` int32 or int64, contiguous: rows of ``cos_sin_cache``. Below 0 the first
            row is taken, beyond the end the last one.
        q: ``[T, H, D]``, float32, bfloat16 or float16. The precompiled kernels take any strides
            with a contiguous last dimension; fastest with all others multiples of 16 bytes.
        k: ``[T, Hk, D]``, the same; Hk may be 0.
        cos_sin_cache: ``[P, R]``, contiguous: R/2 cosines, then R/2 sines. float32 or the dtype of
            ``q``; R is even and at most D, and P is 1 or more.
        interleaved: Which elements make a pair.
        inplace: Turn ``q`` and ``k`` themselves.
        out: ``(q_out, k_out)`` to write to, of the shapes, dtypes and device of ``q`` and ``k``.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``(q, k)`` turned.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> q, k = tiercel.rotary_embedding(positions, q, k, cos_sin_cache)
    """
    if inplace:
        if out is not None:
            raise ValueError(f"{_ROTARY}: `inplace` and `out` exclude each other")
        _ROTARY_IN_PLACE.pick()(positions, q, k, cos_sin_cache, interleaved, backend)
        return q, k
    if out is None:
        result: tuple[Tensor, Tensor] = _ROTARY_OP.pick()(
            positions, q, k, cos_sin_cache, interleaved, backend
        )
        return result
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"{_ROTARY}: `out` must be a pair (q_out, k_out), got {got}")
    _ROTARY_OUT(positions, q, k, cos_sin_cache, out[0], out[1], interleaved, backend)
    return out[0], out[1]


def _check_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    backend: str | None,
) -> None:
    check_rank(_KV, "key", key, 3)
    check_dtype(_KV, "key", key.dtype, (torch.bfloat16, torch.float16))
    check_dtype(_KV, "value", value.dtype, (key.dtype,))
    tokens, heads, size = key.shape
    check_shape(_KV, "value", value, (tokens, heads, size), "[T, H, D]")
    check_rank(_KV, "key_cache", key_cache, 4)
    check_dtype(_KV, "key_cache", key_cache.dtype, (key.dtype, torch.float8_e4m3fn))
    check_dtype(_KV, "value_cache", value_cache.dtype, (key_cache.dtype,))
    shape = (*key_cache.shape[:2], heads, size)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_shape(_KV, name, cache, shape, "[blocks, block size, H, D]")
    check_dtype(_KV, "slots", slots.dtype, _INDICES)
    check_shape(_KV, "slots", slots, (tokens,), "[T]")
    check_contiguous(_KV, "slots", slots)
    tensors = {"value": value, "key_cache": key_cache, "value_cache": value_cache, "slots": slots}
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is None:
            continue
        if key_cache.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"{_KV}: `{name}` must be None for a cache that is not float8, got a tensor"
            )
        check_dtype(_KV, name, scale.dtype, (torch.float32,))
        if scale.numel() not in (1, heads):
            raise ValueError(
                f"{_KV}: `{name}` must have 1 element or H = {heads}, got {scale.numel()}"
            )
        check_contiguous(_KV, name, scale)
        tensors[name] = scale
    for name, tensor in tensors.items():
        check_same_device(_KV, name, tensor, "key", key)


def _kv_sm90(*args: Any) -> None:
    _C.kv_cache_write(*args[:-1])


def _kv_ref(*args: Any) -> None:
    ref.kv_cache_write(*args[:5], key_scale=args[5], value_scale=args[6])


def _kv_plan(*args: Any) -> dict[str, Any]:
    return dict(_C.kv_cache_write_plan(*args[:7]))


def _kv_why_not(*args: Any) -> Reason | None:
    return _unless(_KV, args[0].device, lambda: _kv_plan(*args))


def _kv_indices(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *_: Any
) -> list[Index]:
    return [places("slots", slots, key_cache.shape[0] * key_cache.shape[1])]


_KV_OP = Op(
    _KV,
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots,"
    " Tensor? key_scale=None, Tensor? value_scale=None, str? backend=None) -> ()",
    check=_check_kv,
    fake=lambda *args: None,
    sm90=Backend("sm90", _kv_sm90, "keys and values in one launch", "cuda", why_not=_kv_why_not),
    ref=Backend("ref", _kv_ref, "torch's indexed assignment", "torch"),
    describe=_kv_plan,
    load=_C.kv_cache_write_load,
    launch=_C.kv_cache_write,
    indices=_kv_indices,
)


@_KV_OP.export
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
            -1, and whatever else lies outside of the cache, is skipped. Of tokens with the same
            slot any one may stay, or parts of several.
        key_scale: float32, one element or H of them; None is 1. For float8 only.
        value_scale: The same.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``(key_cache, value_cache)``, the arguments.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> tiercel.kv_cache_write(k, v, key_cache, value_cache, slot_mapping)
    """
    _KV_OP(key, value, key_cache, value_cache, slots, key_scale, value_scale, backend)
    return key_cache, value_cache
