# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: each token through the MLPs of its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel._op import Backend, Op
from tiercel._platform import Reason
from tiercel.ops.moe_halves import (
    DTYPES,
    INDEX,
    check_activation,
    empty_routing,
    reason_of,
)
from tiercel.ops.routing_align import align_sm90
from tiercel.ref import moe as ref

__all__ = ["fused_moe"]

_NAME = "fused_moe"


def _check(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_map: Tensor | None,
    backend: str | None,
) -> None:
    check_rank(_NAME, "x", x, 2)
    check_dtype(_NAME, "x", x.dtype, DTYPES)
    for name, tensor, rank in (("w_up", w_up, 3), ("w_down", w_down, 3)):
        check_rank(_NAME, name, tensor, rank)
        check_dtype(_NAME, name, tensor.dtype, (x.dtype,))
    tokens, hidden = x.shape
    experts, _, inner = w_down.shape
    check_shape(_NAME, "w_up", w_up, (experts, 2 * inner, hidden), "[E, 2 * I, H]")
    check_shape(_NAME, "w_down", w_down, (experts, hidden, inner), "[E, H, I]")
    check_rank(_NAME, "topk_ids", topk_ids, 2)
    check_dtype(_NAME, "topk_ids", topk_ids.dtype, (torch.int32, torch.int64))
    k = topk_ids.shape[1]
    check_shape(_NAME, "topk_ids", topk_ids, (tokens, k), "[T, k]")
    check_dtype(_NAME, "topk_weights", topk_weights.dtype, (torch.float32,))
    check_shape(_NAME, "topk_weights", topk_weights, (tokens, k), "[T, k]")
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        check_contiguous(_NAME, name, tensor)
    named = {"w_up": w_up, "w_down": w_down, "topk_weights": topk_weights, "topk_ids": topk_ids}
    if expert_map is not None:
        check_rank(_NAME, "expert_map", expert_map, 1)
        check_dtype(_NAME, "expert_map", expert_map.dtype, (torch.int32,))
        check_contiguous(_NAME, "expert_map", expert_map)
        named["expert_map"] = expert_map
    for name, tensor in named.items():
        check_same_device(_NAME, name, tensor, "x", x)
    check_activation(_NAME, activation)


def block_size(elements: int, experts: int) -> int:
    """Slots of a routing block: for many tokens, as many rows as a multiprocessor takes at a time;
    for few, half of that, since most are padding."""
    return 128 if elements > 48 * max(experts, 1) else 64


def _sm90(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_map: Tensor | None,
    backend: str | None,
) -> Tensor:
    tokens, hidden = x.shape
    k = topk_ids.shape[1]
    elements, experts = tokens * k, w_down.shape[0]
    block = block_size(elements, experts)
    everywhere = experts if expert_map is None else expert_map.shape[0]
    routing = align_sm90(topk_ids, block, everywhere, expert_map, False, False, None)
    inner = x.new_empty((elements, w_down.shape[2]))
    outer = x.new_empty((elements, hidden))
    out = x.new_empty((tokens, hidden))
    weights = topk_weights.view(-1)
    _C.moe_up(x, w_up, *routing, None, inner, block, INDEX[activation], None, 0)
    # Ids that are no expert's are in no block: with them at hand, the kernel zeroes their rows.
    _C.moe_down(inner, w_down, *routing, weights, outer, block, 0, topk_ids, everywhere)
    _C.moe_sum(outer.view(tokens, k, hidden), None, out)
    return out


def _plan(
    x: Tensor, w_up: Tensor, w_down: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any
) -> dict[str, Any]:
    elements, experts = topk_ids.numel(), w_down.shape[0]
    block = block_size(elements, experts)
    routing = empty_routing(x, elements, experts, block)
    inner, outer = x.new_empty((elements, w_down.shape[2])), x.new_empty((elements, x.shape[1]))
    up = _C.moe_up_plan(x, w_up, *routing, None, inner, block, 0, None, 0)
    down = _C.moe_down_plan(inner, w_down, *routing, topk_weights.view(-1), outer, block, 0, None, 0)
    return {"kernel": up["kernel"], "block_size": block, "up": dict(up), "down": dict(down)}


def _why_not(x: Tensor, *args: Any) -> Reason | None:
    return reason_of(lambda: _plan(x, *args), x)


def _reference(*args: Any) -> Tensor:
    *tensors, activation, expert_map, _ = args
    return ref.fused_moe(*tensors, activation=activation, expert_map=expert_map)


_OP = Op(
    _NAME,
    "(Tensor x, Tensor w_up, Tensor w_down, Tensor topk_weights, Tensor topk_ids,"
    " str activation='silu', Tensor? expert_map=None, str? backend=None) -> Tensor",
    check=_check,
    fake=lambda x, *args: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    sm90=Backend(
        "sm90",
        _sm90,
        "each active expert's weights streamed once, by warps that never wait for one another",
        "cuda",
        why_not=_why_not,
    ),
    ref=Backend("ref", _reference, "a loop over experts", "torch"),
    describe=lambda *args: _plan(*args[:5]),
    load=_C.moe_load,
)


@_OP.export
def fused_moe(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Each token through the gated MLPs of its experts, added up by their weights.

    ``sum over j of topk_weights[t, j] * (act(x[t] @ w_up[e].T) @ w_down[e].T)`` with ``e =
    topk_ids[t, j]``. The kernels are made for few tokens, where reading the active experts' weights
    is all that costs; they take any number, and are no match for a grouped product of thousands.
    Sums are float32; between the halves, and before the last sum, values have the dtype of ``x``.

    There is no derivative; :func:`tiercel.ref.fused_moe` has one. Works under torch.compile and
    torch.export, and in CUDA graphs; it never synchronises.

    Args:
        x: ``[T, H]`` bfloat16 or float16. The precompiled kernels take H and I that are multiples
            of 8 and at least 320, and rows at multiples of 16 bytes; ref takes others.
        w_up: ``[E, 2 * I, H]``, the dtype of ``x``: rows of the gate, then those it is for.
        w_down: ``[E, H, I]``, the dtype of ``x``.
        topk_weights: ``[T, k]`` float32, contiguous, as from :func:`tiercel.topk_softmax`.
        topk_ids: ``[T, k]`` int32 or int64, contiguous. Ids that are no expert's add nothing.
        activation: With a and b the two halves of a token's values inside an expert: ``"silu"``,
            ``"gelu"`` (by the error function) or ``"relu"`` of a, times b; or
            ``"gelu_residual"``, gelu(a) * (b + 1).
        expert_map: ``[experts everywhere]`` int32, for expert parallelism: an expert's place in
            ``w_up`` and ``w_down``, or -1 where it is on another device and adds nothing here.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[T, H]``, the dtype of ``x``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such activation or
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights, experts = tiercel.topk_softmax(router(x), 8, renormalize=True)
        >>> y = tiercel.fused_moe(x, w_up, w_down, weights, experts)
    """
    result: Tensor = _OP(x, w_up, w_down, topk_weights, topk_ids, activation, expert_map, backend)
    return result
