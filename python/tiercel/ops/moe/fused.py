# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: each token through the MLPs of its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Backend, Op
from tiercel.core.checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.index_checks import Index, places
from tiercel.core.platform import Reason
from tiercel.ops.moe import reference as ref
from tiercel.ops.moe import single_launch
from tiercel.ops.moe.choice import FEW, Choice, choose, routed_by_kernels
from tiercel.ops.moe.halves import (
    DTYPES,
    INDEX,
    NO_IDS,
    NO_SCALES,
    block_scaled,
    check_activation,
    check_weights_scale,
    empty_routing,
    of_rows,
    reason_of,
)
from tiercel.ops.quant.op import empty_quantized as quantize_outputs
from tiercel.ops.quant.op import quantize_overlapped, quantize_plan
from tiercel.ops.routing.align import align_for_products, align_plan

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
    _check_rest(x, w_up, w_down, topk_weights, topk_ids, activation, expert_map, x.dtype)


def _check_rest(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_map: Tensor | None,
    of_weights: torch.dtype,
) -> None:
    for name, tensor, rank in (("w_up", w_up, 3), ("w_down", w_down, 3)):
        check_rank(_NAME, name, tensor, rank)
        check_dtype(_NAME, name, tensor.dtype, (of_weights,))
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


def _indices(w: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> list[Index]:
    everywhere = w.shape[0] if expert_map is None else expert_map.shape[0]
    return [places("topk_ids", topk_ids, everywhere), places("expert_map", expert_map, w.shape[0])]


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
    weights = ((w_up, None), (w_down, None))
    return run(x, weights, topk_weights, topk_ids, activation, expert_map)


def _in_order(block: int, down_scale: Tensor | None) -> bool:
    """Whether rows between the halves are in the routing's order. Those of one scale are not: the
    padding's, quantised and read too, would cost more than the copy engine saves."""
    return block == 128 and (down_scale is None or block_scaled(down_scale))


def _quantizes(block: int, up_scale: Tensor | None, down_scale: Tensor | None) -> bool:
    """Whether moe_up's rows are quantised as they are stored: its tiles have their scales whole."""
    return block == 128 and block_scaled(up_scale) and block_scaled(down_scale)


def _granularity(scale: Tensor) -> str:
    """Of a product's rows, by the scales of its weights."""
    return "1x128" if block_scaled(scale) else "row"


def run(
    x: Tensor,
    weights: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_map: Tensor | None,
    choice: Choice | None = None,
) -> Tensor:
    """The kernels one after the other, or the one that does it all; `choice` is the tuner's."""
    (w_up, up_scale), (w_down, down_scale) = weights
    tokens, hidden = x.shape
    k = topk_ids.shape[1]
    elements, experts = tokens * k, w_down.shape[0]
    if choice is None:
        in_blocks = block_scaled(up_scale) or block_scaled(down_scale)
        choice = choose(w_down, topk_ids, expert_map, in_blocks)
        if choice is FEW:
            try:
                return single_launch.run(x, weights, topk_weights, topk_ids, activation)
            except NotImplementedError:  # of these strides, or on a share of a GPU
                choice = choose(w_down, topk_ids, expert_map, in_blocks, one_launch=False)
    if choice is FEW:
        return single_launch.run(x, weights, topk_weights, topk_ids, activation)
    block, up, down = choice
    everywhere = experts if expert_map is None else expert_map.shape[0]
    by_kernels = routed_by_kernels(elements, experts, block, expert_map)
    rows, scale = x, None
    if up_scale is not None:
        # Memory that the routing's kernels do not work in: they may still run when it is written.
        rows, scale = quantize_outputs(x, _granularity(up_scale))
    counters = None  # of tiles that blocks of threads take
    if by_kernels and up_scale is not None:
        counters = x.new_empty(4, dtype=torch.int32)
    routing: tuple[Tensor | None, ...] = (None, None, counters)
    of_up: tuple[Tensor | None, int] = (topk_ids, experts)
    if not by_kernels:
        routing = align_for_products(topk_ids, block, everywhere, expert_map)
        of_up = NO_IDS
    if up_scale is not None:
        granularity = _granularity(up_scale)
        quantize_overlapped(x, (rows, scale), granularity, not by_kernels, False, counters)
        scale = of_rows(scale, up_scale)
    # Ids that are no expert's are in no block: with them at hand, `down` zeroes their rows.
    named = (topk_ids, everywhere)
    # In the routing's order, `down` has a block's rows one below the other.
    between = elements
    if _in_order(block, down_scale):
        assert routing[0] is not None
        of_up, between = named, routing[0].shape[0]
    inner_scale = None
    if quantizes := _quantizes(block, up_scale, down_scale):
        inner = x.new_empty((between, w_down.shape[2]), dtype=w_down.dtype)
        groups = -(-w_down.shape[2] // 128)
        inner_scale = x.new_empty((between, groups), dtype=torch.float32)
    else:
        inner = x.new_empty((between, w_down.shape[2]))
    outer = x.new_empty((elements, hidden))
    out = x.new_empty((tokens, hidden))
    factors = (None, inner, block, INDEX[activation], *of_up, scale, up_scale, up, inner_scale)
    _C.moe_up(rows, w_up, *routing, *factors)
    rows, scale = inner, inner_scale
    if down_scale is not None and not quantizes:
        rows, scale = quantize_outputs(inner, _granularity(down_scale))
        # The next launch begins with weights, but where it takes rows in the routing's order.
        quantize_overlapped(inner, (rows, scale), _granularity(down_scale), False, True)
        scale = of_rows(scale, down_scale)
        if _in_order(block, down_scale):  # without counters: nobody counts what is quantised
            assert routing[2] is not None
            routing = (*routing[:2], routing[2][:1])
    factors = (topk_weights.view(-1), outer, block, 0, *named, scale, down_scale, down)
    _C.moe_down(rows, w_down, *routing, *factors)
    _C.moe_sum(outer.view(tokens, k, hidden), None, out)
    return out


def _plan(
    x: Tensor, w_up: Tensor, w_down: Tensor, topk_weights: Tensor, topk_ids: Tensor, *rest: Any
) -> dict[str, Any]:
    return _plan_of(x, (w_up, None), (w_down, None), topk_weights, topk_ids, rest[1])


def _plan_of(
    x: Tensor,
    up: Any,
    down: Any,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
) -> dict[str, Any]:
    (w_up, up_scale), (w_down, down_scale) = up, down
    elements, experts = topk_ids.numel(), w_down.shape[0]
    in_blocks = block_scaled(up_scale) or block_scaled(down_scale)
    choice = choose(w_down, topk_ids, expert_map, in_blocks)
    if choice is FEW:
        try:
            return single_launch.plan(x, (up, down), topk_weights, topk_ids, "silu")
        except NotImplementedError:
            choice = choose(w_down, topk_ids, expert_map, in_blocks, one_launch=False)
    block, *tiles = choice
    everywhere = experts if expert_map is None else expert_map.shape[0]
    # It has to take so many experts.
    align_plan(topk_ids[:0], block, everywhere, expert_map, False, False, None)
    routing: tuple[Tensor | None, ...] = (None, None, None)
    ids: tuple[Tensor | None, int] = (topk_ids, experts)
    between = elements
    if not routed_by_kernels(elements, experts, block, expert_map):
        lists = empty_routing(x, elements, experts, block)
        routing, ids = lists, NO_IDS
        if _in_order(block, down_scale):
            ids, between = (topk_ids, everywhere), lists[0].shape[0]
    inner, outer = x.new_empty((between, w_down.shape[2])), x.new_empty((elements, x.shape[1]))
    made = []
    for rows, w, scale, factors, out, plan, tile in (
        (x, w_up, up_scale, None, inner, _C.moe_up_plan, tiles[0]),
        (inner, w_down, down_scale, topk_weights.view(-1), outer, _C.moe_down_plan, tiles[1]),
    ):
        scales: tuple[Tensor | None, Tensor | None] = NO_SCALES
        if scale is not None:
            quantize_plan(rows[:2], _granularity(scale))  # it has to take these rows
            rows, factor = quantize_outputs(rows, _granularity(scale))
            scales = (of_rows(factor, scale), scale)
        rest = (factors, out, block, 0, *ids, *scales, tile)
        made.append(dict(plan(rows, w, *routing, *rest)))
    return {"kernel": made[0]["kernel"], "block_size": block, "up": made[0], "down": made[1]}


def _why_not(x: Tensor, *args: Any) -> Reason | None:
    return reason_of(lambda: _plan(x, *args), x)


def _reference(*args: Any) -> Tensor:
    *tensors, activation, expert_map, _ = args
    return ref.fused_moe(*tensors, activation=activation, expert_map=expert_map)


_CUTE = ("grouped products, rows gathered by the routing, weights streamed once", "cute")

_OP = Op(
    _NAME,
    "(Tensor x, Tensor w_up, Tensor w_down, Tensor topk_weights, Tensor topk_ids,"
    " str activation='silu', Tensor? expert_map=None, str? backend=None) -> Tensor",
    check=_check,
    fake=lambda x, *args: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    sm90=Backend(
        "sm90",
        _sm90,
        *_CUTE,
        why_not=_why_not,
    ),
    ref=Backend("ref", _reference, "a loop over experts", "torch"),
    describe=_plan,
    load=_C.moe_load,
    indices=lambda *args: _indices(args[1], args[4], args[6]),
)


def _check_fp8(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_up_scale: Tensor,
    w_down_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_map: Tensor | None,
    backend: str | None,
) -> None:
    check_rank(_NAME, "x", x, 2)
    check_dtype(_NAME, "x", x.dtype, (torch.bfloat16,))
    rest = (topk_weights, topk_ids, activation, expert_map)
    _check_rest(x, w_up, w_down, *rest, torch.float8_e4m3fn)
    for name, scale, w in (
        ("w_up_scale", w_up_scale, w_up),
        ("w_down_scale", w_down_scale, w_down),
    ):
        check_weights_scale(_NAME, name, scale, w, x)


def _fp8_plan(x: Tensor, w_up: Tensor, w_down: Tensor, *rest: Any) -> dict[str, Any]:
    up_scale, down_scale, topk_weights, topk_ids, _, expert_map, *_ = rest
    weights = ((w_up, up_scale), (w_down, down_scale))
    return _plan_of(x, *weights, topk_weights, topk_ids, expert_map)


def _run_fp8(x: Tensor, w_up: Tensor, w_down: Tensor, *rest: Any) -> Tensor:
    up_scale, down_scale, *more, _ = rest
    return run(x, ((w_up, up_scale), (w_down, down_scale)), *more)


def _fp8_reference(*args: Any) -> Tensor:
    x, w_up, w_down, up_scale, down_scale, weights, ids, activation, expert_map, _ = args
    return ref.fused_moe(
        *(x, w_up, w_down, weights, ids),
        activation=activation,
        expert_map=expert_map,
        w_up_scale=up_scale,
        w_down_scale=down_scale,
    )


_FP8_OP = Op(
    f"{_NAME}_fp8",
    "(Tensor x, Tensor w_up, Tensor w_down, Tensor w_up_scale, Tensor w_down_scale,"
    " Tensor topk_weights, Tensor topk_ids, str activation='silu', Tensor? expert_map=None,"
    " str? backend=None) -> Tensor",
    check=_check_fp8,
    fake=lambda x, *args: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    sm90=Backend(
        "sm90",
        _run_fp8,
        *_CUTE,
        why_not=lambda *args: reason_of(lambda: _fp8_plan(*args), args[0]),
    ),
    ref=Backend("ref", _fp8_reference, "a loop over experts", "torch"),
    describe=_fp8_plan,
    family=_NAME,
    indices=lambda *args: _indices(args[1], args[6], args[8]),
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
    w_up_scale: Tensor | None = None,
    w_down_scale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Each token through the gated MLPs of its experts, added up by their weights.

    ``sum over j of topk_weights[t, j] * (act(x[t] @ w_up[e].T) @ w_down[e].T)`` with ``e =
    topk_ids[t, j]``. Sums are float32; between the halves, and before the last sum, values have
    the dtype of ``x``. With float8 weights, rows of ``x``, and rows between the halves, are
    quantised to float8 as :func:`tiercel.fp8_quantize` does, with a scale a row, or of 128
    values where the weights have scales of blocks.

    There is no derivative; :func:`tiercel.ref.fused_moe` has one. Works under torch.compile and
    torch.export, and in CUDA graphs; it never synchronises.

    Args:
        x: ``[T, H]`` bfloat16 or float16; bfloat16 with float8 weights. The precompiled kernels
            take H and I that are multiples of 8 (of 16 with float8, of 128 with scales of blocks),
            and rows at multiples of 16 bytes; ref takes others.
        w_up: ``[E, 2 * I, H]``, the dtype of ``x``, or float8_e4m3fn: rows of the gate, then those
            it is for.
        w_down: ``[E, H, I]``, the dtype of ``w_up``.
        topk_weights: ``[T, k]`` float32, contiguous, as from :func:`tiercel.topk_softmax`.
        topk_ids: ``[T, k]`` int32 or int64, contiguous. Ids that are no expert's add nothing.
        activation: With a and b the two halves of a token's values inside an expert: ``"silu"``,
            ``"gelu"`` (by the error function) or ``"relu"`` of a, times b; or
            ``"gelu_residual"``, gelu(a) * (b + 1).
        expert_map: ``[experts everywhere]`` int32, for expert parallelism: an expert's place in
            ``w_up`` and ``w_down``, or -1 where it is on another device and adds nothing here, nor
            does any other number that is no place.
        w_up_scale: Of float8 weights, float32, contiguous: a factor a row ``[E, 2 * I]``, one an
            expert ``[E, 1]``, or one a block of 128x128 values ``[E, 2 * I / 128, H / 128]``, sizes
            rounded up.
        w_down_scale: The same, ``[E, H]``, ``[E, 1]`` or ``[E, H / 128, I / 128]``. Up to 4 tokens
            may then take one launch whose blocks wait for each other: it starts when the whole GPU
            is free.
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
    rest = (topk_weights, topk_ids, activation, expert_map, backend)
    if w_up_scale is None and w_down_scale is None:
        plain: Tensor = _OP(x, w_up, w_down, *rest)
        return plain
    if w_up_scale is None or w_down_scale is None:
        missing = "w_up_scale" if w_up_scale is None else "w_down_scale"
        raise ValueError(f"{_NAME}: `{missing}` must be given where the other scale is, got None")
    result: Tensor = _FP8_OP(x, w_up, w_down, w_up_scale, w_down_scale, *rest)
    return result
