# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the two halves of the MLPs, over tokens that are routed already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C, _platform
from tiercel._checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel._op import Backend, Op
from tiercel._platform import Reason
from tiercel.ops.routing_align import slots_for
from tiercel.ref import moe as ref

__all__ = ["moe_down", "moe_up"]

DTYPES = (torch.bfloat16, torch.float16)
# As MoeActivation in moe_mlp.h counts.
INDEX = {name: index for index, name in enumerate(ref.ACTIVATIONS)}
# Of the launchers' arguments: topk_ids and how many experts there are; scales of x and of weights.
NO_IDS, NO_SCALES = (None, 0), (None, None)
_ROUTING = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")


def check_activation(op: str, activation: str) -> None:
    if activation not in INDEX:
        known = ", ".join(INDEX)
        raise ValueError(f"{op}: `activation` must be one of {known}, got {activation!r}")


def empty_routing(x: Tensor, elements: int, experts: int, block: int) -> tuple[Tensor, ...]:
    """Of the sizes that the routing has: for plans."""
    slots = slots_for(elements, experts, block)
    sizes = (slots, -(-slots // block), 1)
    return tuple(torch.empty(size, dtype=torch.int32, device=x.device) for size in sizes)


def reason_of(plan: Callable[[], Any], x: Tensor) -> Reason | None:
    """Why the kernels do not take arguments that are right."""
    reason = _platform.why_not(x.device)
    if reason is not None:
        return reason
    try:
        plan()
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).partition(": ")[2])
    return None


def _check_half(op: str, x: Tensor, name: str, w: Tensor, routing: Any, block: int) -> None:
    check_rank(op, "x", x, 2)
    check_dtype(op, "x", x.dtype, DTYPES)
    check_rank(op, name, w, 3)
    check_dtype(op, name, w.dtype, (x.dtype,))
    check_shape(op, name, w, (*w.shape[:2], x.shape[1]), "[E, rows, columns of x]")
    check_same_device(op, name, w, "x", x)
    for label, tensor in zip(_ROUTING, routing, strict=True):
        check_rank(op, label, tensor, 1)
        check_dtype(op, label, tensor.dtype, (torch.int32,))
        check_contiguous(op, label, tensor)
        check_same_device(op, label, tensor, "x", x)
    if block < 1:
        raise ValueError(f"{op}: `block_size` must be at least 1, got {block}")
    blocks = -(-routing[0].shape[0] // block)
    check_shape(op, "expert_ids", routing[1], (blocks,), "[slots / block_size]")
    check_shape(op, "num_tokens_post_padded", routing[2], (1,), "[1]")


# ------------------------------------------------------------------------------------------- up

_UP = "moe_up"


def _check_up(x: Tensor, w: Tensor, *rest: Any) -> None:
    *routing, top_k, block, activation, _ = rest
    _check_half(_UP, x, "w_up", w, routing, block)
    if w.shape[1] % 2:
        raise ValueError(f"{_UP}: `w_up` must have two halves of rows, got {list(w.shape)}")
    if top_k < 1:
        raise ValueError(f"{_UP}: `top_k` must be at least 1, got {top_k}")
    check_activation(_UP, activation)


def _up_output(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    top_k = rest[3]
    size = (x.shape[0] * top_k, w.shape[1] // 2)
    return torch.empty(size, dtype=x.dtype, device=x.device)


def _up_arguments(x: Tensor, w: Tensor, *rest: Any) -> tuple[Any, ...]:
    *routing, _, block, activation, _ = rest
    return (
        x,
        w,
        *routing,
        None,
        _up_output(x, w, *rest),
        block,
        INDEX[activation],
        *NO_IDS,
        *NO_SCALES,
    )


def _up_sm90(*args: Any) -> Tensor:
    arguments = _up_arguments(*args)
    arguments[6].zero_()  # of ids that are in no block, and of experts that are elsewhere
    _C.moe_up(*arguments)
    result: Tensor = arguments[6]
    return result


def _up_plan(*args: Any) -> dict[str, Any]:
    return dict(_C.moe_up_plan(*_up_arguments(*args)))


def _up_reference(*args: Any) -> Tensor:
    *rest, activation, _ = args
    return ref.moe_up(*rest, activation=activation)


_CUTE = ("a grouped product, rows gathered by the routing", "cute")
_TORCH = ("a loop over the routing's blocks", "torch")
_TENSORS = ", ".join(f"Tensor {name}" for name in _ROUTING)

_UP_OP = Op(
    _UP,
    f"(Tensor x, Tensor w_up, {_TENSORS}, int top_k, int block_size,"
    " str activation='silu', str? backend=None) -> Tensor",
    check=_check_up,
    fake=_up_output,
    sm90=Backend(
        "sm90", _up_sm90, *_CUTE, why_not=lambda *args: reason_of(lambda: _up_plan(*args), args[0])
    ),
    ref=Backend("ref", _up_reference, *_TORCH),
    describe=_up_plan,
    load=_C.moe_load,
)


@_UP_OP.export
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
    backend: str | None = None,
) -> Tensor:
    """The first half of :func:`tiercel.fused_moe`, with the activation, over routed tokens.

    Args:
        x: ``[T, H]`` bfloat16 or float16.
        w_up: ``[E, 2 * I, H]``, the dtype of ``x``.
        sorted_token_ids: As from :func:`tiercel.moe_align_block_size`, int32, contiguous.
        expert_ids: The same; -1 leaves a block's rows zeros.
        num_tokens_post_padded: The same.
        top_k: Experts of a token: element e of the ids is token e / top_k's.
        block_size: As the routing was made with; the precompiled kernels take 64 and 128.
        activation: As of :func:`tiercel.fused_moe`.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[T * top_k, I]``, the dtype of ``x``; zeros for ids that are in no block.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such activation or
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> routing = tiercel.moe_align_block_size(experts, 64, 64)
        >>> inner = tiercel.moe_up(x, w_up, *routing, 8, 64)
    """
    routing = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    result: Tensor = _UP_OP(x, w_up, *routing, top_k, block_size, activation, backend)
    return result


# ----------------------------------------------------------------------------------------- down

_DOWN = "moe_down"


def _check_down(x: Tensor, w: Tensor, weights: Tensor, *rest: Any) -> None:
    *routing, block, _ = rest
    _check_half(_DOWN, x, "w_down", w, routing, block)
    check_dtype(_DOWN, "topk_weights", weights.dtype, (torch.float32,))
    check_shape(_DOWN, "topk_weights", weights, (x.shape[0],), "[T * k]")
    check_contiguous(_DOWN, "topk_weights", weights)
    check_same_device(_DOWN, "topk_weights", weights, "x", x)


def _down_output(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    return torch.empty((x.shape[0], w.shape[1]), dtype=x.dtype, device=x.device)


def _down_arguments(x: Tensor, w: Tensor, weights: Tensor, *rest: Any) -> tuple[Any, ...]:
    *routing, block, _ = rest
    return (x, w, *routing, weights, _down_output(x, w), block, 0, *NO_IDS, *NO_SCALES)


def _down_sm90(*args: Any) -> Tensor:
    arguments = _down_arguments(*args)
    arguments[6].zero_()
    _C.moe_down(*arguments)
    result: Tensor = arguments[6]
    return result


def _down_plan(*args: Any) -> dict[str, Any]:
    return dict(_C.moe_down_plan(*_down_arguments(*args)))


_DOWN_OP = Op(
    _DOWN,
    f"(Tensor x, Tensor w_down, Tensor topk_weights, {_TENSORS}, int block_size,"
    " str? backend=None) -> Tensor",
    check=_check_down,
    fake=_down_output,
    sm90=Backend(
        "sm90",
        _down_sm90,
        *_CUTE,
        why_not=lambda *args: reason_of(lambda: _down_plan(*args), args[0]),
    ),
    ref=Backend("ref", lambda *args: ref.moe_down(*args[:-1]), *_TORCH),
    describe=_down_plan,
    load=_C.moe_load,
)


@_DOWN_OP.export
def moe_down(
    x: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    block_size: int,
    *,
    backend: str | None = None,
) -> Tensor:
    """The second half of :func:`tiercel.fused_moe`, times the routing weights.

    Args:
        x: ``[T * k, I]`` bfloat16 or float16, as from :func:`tiercel.moe_up`.
        w_down: ``[E, H, I]``, the dtype of ``x``.
        topk_weights: ``[T * k]`` float32, contiguous.
        sorted_token_ids: As from :func:`tiercel.moe_align_block_size`, int32, contiguous.
        expert_ids: The same; -1 leaves a block's rows zeros.
        num_tokens_post_padded: The same.
        block_size: As the routing was made with; the precompiled kernels take 64 and 128.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[T * k, H]``, the dtype of ``x``: :func:`tiercel.moe_sum` adds them up. Zeros for ids that
        are in no block.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> outer = tiercel.moe_down(inner, w_down, weights.flatten(), *routing, 64)
    """
    routing = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    result: Tensor = _DOWN_OP(x, w_down, topk_weights, *routing, block_size, backend)
    return result
