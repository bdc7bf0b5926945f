# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the two halves of the MLPs, over tokens that are routed already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index, between, places
from tiercel.core.op import Op, Python
from tiercel.core.spec import Call
from tiercel.ops.moe import reference as ref
from tiercel.ops.moe import spec

__all__ = ["moe_down", "moe_up"]

ACTIVATION_INDEX = {name: index for index, name in enumerate(spec.ACTIVATIONS)}


def rows_scale(scale: Tensor | None, w_scale: Tensor | None) -> Tensor | None:
    """The scales of a product's rows, as the native functions take them."""
    return scale if scale is None or spec.block_scaled(w_scale) else scale.view(-1)


def _half(declared: spec.Spec, reference: Callable[..., Tensor], w_name: str) -> Op:
    up, native = w_name == "w_up", getattr(_C, declared.name)
    scales = ("x_scale", f"{w_name}_scale")
    sixteen_bit = declared.without(*scales).names

    def arguments(call: Call, allocate: Callable[..., Tensor]) -> tuple[Any, ...]:
        """Those of the native functions."""
        x, w = call.x, getattr(call, w_name)
        x_scale, w_scale = (getattr(call, name) for name in scales)
        if (x_scale is None) != (w_scale is None):
            raise ValueError("one scale is missing")  # the check has the public text
        size = (x.shape[0] * (call.top_k if up else 1), w.shape[1] // (2 if up else 1))
        out = allocate(size, dtype=x.dtype if x_scale is None else torch.bfloat16)
        routing = (call.sorted_token_ids, call.expert_ids, call.num_tokens_post_padded)
        weights = None if up else call.topk_weights
        activation = ACTIVATION_INDEX[call.activation] if up else 0
        rest = (call.block_size, activation, None, 0, rows_scale(x_scale, w_scale), w_scale)
        return (x, w, *routing, weights, out, *rest)

    def run(call: Call) -> Tensor:
        # Zeros for ids that are in no block, and for experts that are on another device.
        given = arguments(call, call.x.new_zeros)
        native(*given)
        return given[6]  # type: ignore[no-any-return]

    def indices(call: Call) -> Iterator[Index]:
        used, block = call.num_tokens_post_padded, call.block_size
        slots = call.sorted_token_ids.shape[0] // block * block
        number = between("num_tokens_post_padded", used, 0, slots)
        due = f"hold a multiple of `block_size` = {block} from 0 to {slots}"
        yield number._replace(wrong=lambda n: number.wrong(n) | (n % block != 0), due=due)
        blocks = int(used) // block  # only these are read
        yield places("expert_ids", call.expert_ids[:blocks], getattr(call, w_name).shape[0])
        elements = call.x.shape[0] * (call.top_k if up else 1)
        yield between("sorted_token_ids", call.sorted_token_ids[: blocks * block], 0, elements)

    def plugin(function: Callable[..., Any], call: Call) -> Any:
        if call.x_scale is not None:
            raise NotImplementedError("a registered backend does not take float8_e4m3fn")
        return function(*(getattr(call, name) for name in sixteen_bit))

    return Op(
        declared,
        sm90=Python(
            run,
            lambda call: dict(
                getattr(_C, f"{declared.name}_plan")(*arguments(call, call.x.new_empty))
            ),
            "a grouped product, rows gathered by the routing",
            language="cute",
            load=_C.moe_load,
        ),
        reference=lambda call: reference(**call.__dict__),
        method="a loop over the routing's blocks",
        indices=indices,
        out=False,
        plugin=plugin,
    )


_UP = _half(spec.MOE_UP, ref.moe_up, "w_up")
_DOWN = _half(spec.MOE_DOWN, ref.moe_down, "w_down")


@_UP.export
def moe_up(
    x: Tensor,
    w_up: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    top_k: int,
    block_size: int,
    *,
    activation: str = "silu",
    x_scale: Tensor | None = None,
    w_up_scale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The first half of :func:`tiercel.fused_moe`, with the activation, over routed tokens.

    Args:
        x: ``[T, H]`` bfloat16, float16 or, with scales, float8_e4m3fn.
        w_up: ``[E, 2 * I, H]``, the dtype of ``x``.
        sorted_token_ids: As from :func:`tiercel.moe_align_block_size`, int32, contiguous. Invalid
            numbers are padding.
        expert_ids: The same; a block of -1, or any other invalid expert, gives zeros.
        num_tokens_post_padded: The same; clamped to 0 and the number of slots.
        top_k: The number of experts per token: element e of the ids belongs to token e // top_k.
        block_size: As the routing was made with; the precompiled kernels take 64 and 128.
        activation: As for :func:`tiercel.fused_moe`.
        x_scale: For float8, as from :func:`tiercel.fp8_quantize`, contiguous: a factor per row
            ``[T, 1]`` or for all ``[1, 1]``; if the weights have block scales, per 1x128 values,
            ``[T, H / 128]``, rounded up.
        w_up_scale: For float8, float32, contiguous, as for :func:`tiercel.fused_moe`:
            ``[E, 2 * I]``, ``[E, 1]`` or, per block of 128x128, ``[E, 2 * I / 128, H / 128]``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[T * top_k, I]``, the dtype of ``x``, or bfloat16 for float8; zeros for ids that are in no
        block.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such activation or
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> routing = tiercel.moe_align_block_size(experts, 64, 64)
        >>> inner = tiercel.moe_up(x, w_up, *routing, 8, 64)
    """
    routing = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    options = (top_k, block_size, activation, x_scale, w_up_scale, backend)
    return _UP.pick()(x, w_up, *routing, *options)  # type: ignore[no-any-return]


@_DOWN.export
def moe_down(
    x: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    block_size: int,
    *,
    x_scale: Tensor | None = None,
    w_down_scale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The second half of :func:`tiercel.fused_moe`, times the routing weights.

    Args:
        x: ``[T * k, I]`` bfloat16 or float16, as from :func:`tiercel.moe_up`, or, with scales,
            float8_e4m3fn.
        w_down: ``[E, H, I]``, the dtype of ``x``.
        topk_weights: ``[T * k]`` float32, contiguous.
        sorted_token_ids: As from :func:`tiercel.moe_align_block_size`, int32, contiguous. Invalid
            numbers are padding.
        expert_ids: The same; a block of -1, or any other invalid expert, gives zeros.
        num_tokens_post_padded: The same; clamped to 0 and the number of slots.
        block_size: As the routing was made with; the precompiled kernels take 64 and 128.
        x_scale: As for :func:`tiercel.moe_up`: ``[T * k, 1]``, ``[1, 1]`` or ``[T * k, I / 128]``.
        w_down_scale: The same: ``[E, H]``, ``[E, 1]`` or ``[E, H / 128, I / 128]``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[T * k, H]``, the dtype of ``x``, or bfloat16 for float8; :func:`tiercel.moe_sum` adds
        them up. Zeros for ids that are in no block.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> outer = tiercel.moe_down(inner, w_down, weights.flatten(), *routing, 64)
    """
    routing = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    options = (block_size, x_scale, w_down_scale, backend)
    return _DOWN.pick()(x, w_down, topk_weights, *routing, *options)  # type: ignore[no-any-return]
