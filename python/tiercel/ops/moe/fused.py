# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: each token through the MLPs of its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.eager import empty
from tiercel.core.op import Gradient, Op, Python
from tiercel.core.spec import Call
from tiercel.ops._autocast import under_autocast
from tiercel.ops.moe import reference as ref
from tiercel.ops.moe import spec
from tiercel.ops.moe.halves import ACTIVATION_INDEX, rows_scale
from tiercel.ops.moe.tiling import SINGLE_LAUNCH, MoeTiles, choose, routed_by_kernels
from tiercel.ops.moe.training import WITH_GRADIENT, gradients, indices, save
from tiercel.ops.quant.spec import TILES
from tiercel.ops.routing.align import align_for_products, empty_lists, fill_lists

__all__ = ["fused_moe"]

GRANULARITIES = tuple(TILES)
_E4M3 = torch.float8_e4m3fn

Weights = tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def _single_launch_arguments(
    x: Tensor, weights: Weights, topk_weights: Tensor, topk_ids: Tensor, activation: str
) -> tuple[Any, ...]:
    """Those of the native function; the result is the last but one."""
    (w_up, up_scale), (w_down, down_scale) = weights
    out, index = x.new_empty(x.shape), ACTIVATION_INDEX[activation]
    return (x, w_up, w_down, up_scale, down_scale, topk_weights, topk_ids, out, index)


def run_single_launch(*given: Any) -> Tensor:
    """Few tokens with float8 weights, in one launch whose blocks wait for each other.

    Raises NotImplementedError, and launches nothing, where the kernel does not take these.
    """
    arguments = _single_launch_arguments(*given)
    _C.fused_moe_few_tokens(*arguments)
    return arguments[-2]  # type: ignore[no-any-return]


def single_launch_plan(*given: Any) -> dict[str, Any]:
    return dict(_C.fused_moe_few_tokens_plan(*_single_launch_arguments(*given)))


def _in_order(block: int, down_scale: Tensor | None) -> bool:
    """True if rows between the halves are in the routing's order. Those of one scale are not: the
    padding's, quantised and read too, would cost more than the copy engine saves."""
    return block == 128 and (down_scale is None or spec.block_scaled(down_scale))


def _quantizes(block: int, up_scale: Tensor | None, down_scale: Tensor | None) -> bool:
    """True if moe_up's rows are quantised as they are stored: its tiles have their scales whole.

    Its SiLU uses tanh.approx, and that of smaller blocks does not: the batch-invariant mode
    quantises in a launch of its own."""
    if _C.batch_invariant():
        return False
    return block == 128 and spec.block_scaled(up_scale) and spec.block_scaled(down_scale)


def _granularity(w_scale: Tensor) -> int:
    """The index in Fp8Granularity for a product's rows, by the scales of its weights."""
    return GRANULARITIES.index("1x128" if spec.block_scaled(w_scale) else "row")


def _empty_quantized(x: Tensor, w_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of `x` in float8 and their scales, as the weights' scales ask for."""
    rows, columns = x.shape
    groups = -(-columns // 128) if spec.block_scaled(w_scale) else 1
    return empty(x, (rows, columns), _E4M3), empty(x, (rows, groups), torch.float32)


def run(
    x: Tensor,
    weights: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_map: Tensor | None,
    choice: MoeTiles | None = None,
) -> Tensor:
    """The kernels one after the other, or the one that does it all; `choice` is the tuner's."""
    (w_up, up_scale), (w_down, down_scale) = weights
    tokens, hidden = x.shape
    k = topk_ids.shape[1]
    elements, experts = tokens * k, w_down.shape[0]
    if choice is None:
        in_blocks = spec.block_scaled(up_scale) or spec.block_scaled(down_scale)
        choice = choose(w_down, topk_ids, expert_map, in_blocks)
        if choice is SINGLE_LAUNCH:
            try:
                return run_single_launch(x, weights, topk_weights, topk_ids, activation)
            except NotImplementedError:  # of these strides, or on a share of a GPU
                choice = choose(w_down, topk_ids, expert_map, in_blocks, allow_single_launch=False)
    if choice is SINGLE_LAUNCH:
        return run_single_launch(x, weights, topk_weights, topk_ids, activation)
    block, up, down = choice
    global_experts = experts if expert_map is None else expert_map.shape[0]
    by_kernels = routed_by_kernels(elements, experts, block, expert_map)
    rows, scale = x, None
    if up_scale is not None:
        # Memory that the routing's kernels do not work in: they may still run when it is written.
        rows, scale = _empty_quantized(x, up_scale)
    counters = None  # of tiles that blocks of threads take
    if by_kernels and up_scale is not None:
        counters = x.new_empty(4, dtype=torch.int32)
    routing: tuple[Tensor | None, ...] = (None, None, counters)
    up_ids: tuple[Tensor | None, int] = (topk_ids, experts)
    if not by_kernels:
        routing = align_for_products(topk_ids, block, global_experts, expert_map)
        up_ids = (None, 0)
    if up_scale is not None:
        index = _granularity(up_scale)
        _C.fp8_quantize_between(x, rows, scale, counters, index, not by_kernels, False)
        scale = rows_scale(scale, up_scale)
    # Ids that are no expert's are in no block: with them at hand, `down` zeroes their rows.
    down_ids = (topk_ids, global_experts)
    # In the routing's order, `down` has a block's rows one below the other.
    intermediate_rows = elements
    if _in_order(block, down_scale):
        assert routing[0] is not None
        up_ids, intermediate_rows = down_ids, routing[0].shape[0]
    inner_scale = None
    if quantizes := _quantizes(block, up_scale, down_scale):
        inner = x.new_empty((intermediate_rows, w_down.shape[2]), dtype=w_down.dtype)
        groups = -(-w_down.shape[2] // 128)
        inner_scale = x.new_empty((intermediate_rows, groups), dtype=torch.float32)
    else:
        inner = x.new_empty((intermediate_rows, w_down.shape[2]))
    outer = x.new_empty((elements, hidden))
    out = x.new_empty((tokens, hidden))
    native_arguments = (
        None,
        inner,
        block,
        ACTIVATION_INDEX[activation],
        *up_ids,
        scale,
        up_scale,
        up,
        inner_scale,
    )
    _C.moe_up(rows, w_up, *routing, *native_arguments)
    rows, scale = inner, inner_scale
    if down_scale is not None and not quantizes:
        rows, scale = _empty_quantized(inner, down_scale)
        # The next launch begins with weights, but where it takes rows in the routing's order.
        _C.fp8_quantize_between(inner, rows, scale, None, _granularity(down_scale), False, True)
        scale = rows_scale(scale, down_scale)
        if _in_order(block, down_scale):  # without counters: nobody counts what is quantised
            assert routing[2] is not None
            routing = (*routing[:2], routing[2][:1])
    native_arguments = (topk_weights.view(-1), outer, block, 0, *down_ids, scale, down_scale, down)
    _C.moe_down(rows, w_down, *routing, *native_arguments)
    _C.moe_sum(outer.view(tokens, k, hidden), None, out)
    return out


def _check_routing(topk_ids: Tensor, block: int, experts: int, expert_map: Tensor | None) -> None:
    lists = empty_lists(topk_ids, topk_ids.numel(), experts, block)
    native = _C.moe_align_block_size_plan
    fill_lists(topk_ids, lists, block, experts, expert_map, native=native)


def _check_quantize(rows: Tensor, w_scale: Tensor) -> None:
    q, scale = _empty_quantized(rows, w_scale)
    _C.fp8_quantize_plan(rows, q, scale, None, _granularity(w_scale))


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
    in_blocks = spec.block_scaled(up_scale) or spec.block_scaled(down_scale)
    choice = choose(w_down, topk_ids, expert_map, in_blocks)
    if choice is SINGLE_LAUNCH:
        try:
            return single_launch_plan(x, (up, down), topk_weights, topk_ids, "silu")
        except NotImplementedError:
            choice = choose(w_down, topk_ids, expert_map, in_blocks, allow_single_launch=False)
    block, *tiles = choice
    global_experts = experts if expert_map is None else expert_map.shape[0]
    # It has to take so many experts.
    _check_routing(topk_ids[:0], block, global_experts, expert_map)
    routing: tuple[Tensor | None, ...] = (None, None, None)
    ids: tuple[Tensor | None, int] = (topk_ids, experts)
    intermediate_rows = elements
    if not routed_by_kernels(elements, experts, block, expert_map):
        lists = empty_lists(x, elements, experts, block)
        routing, ids = lists, (None, 0)
        if _in_order(block, down_scale):
            ids, intermediate_rows = (topk_ids, global_experts), lists[0].shape[0]
    inner, outer = (
        x.new_empty((intermediate_rows, w_down.shape[2])),
        x.new_empty((elements, x.shape[1])),
    )
    made = []
    for rows, w, scale, factors, out, plan, tile in (
        (x, w_up, up_scale, None, inner, _C.moe_up_plan, tiles[0]),
        (inner, w_down, down_scale, topk_weights.view(-1), outer, _C.moe_down_plan, tiles[1]),
    ):
        scales: tuple[Tensor | None, Tensor | None] = (None, None)
        if scale is not None:
            _check_quantize(rows[:2], scale)
            rows, factor = _empty_quantized(rows, scale)
            scales = (rows_scale(factor, scale), scale)
        rest = (factors, out, block, 0, *ids, *scales, tile)
        made.append(dict(plan(rows, w, *routing, *rest)))
    return {"kernel": made[0]["kernel"], "block_size": block, "up": made[0], "down": made[1]}


def _plan(call: Call) -> dict[str, Any]:
    weights = ((call.w_up, call.w_up_scale), (call.w_down, call.w_down_scale))
    return _plan_of(call.x, *weights, call.topk_weights, call.topk_ids, call.expert_map)


def _run(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_map: Tensor | None,
    w_up_scale: Tensor | None,
    w_down_scale: Tensor | None,
) -> Tensor:
    if (w_up_scale is None) != (w_down_scale is None):
        raise ValueError("one scale is missing")  # the check has the public text
    weights = ((w_up, w_up_scale), (w_down, w_down_scale))
    return run(x, weights, topk_weights, topk_ids, activation, expert_map)


def _save(ctx: Any, call: Call, out: Tensor) -> None:
    if call.w_up_scale is not None:
        raise RuntimeError(
            "fused_moe: there is no derivative with float8 weights, but a tensor requires grad"
        )
    save(ctx, call)


# The gradient of this operator makes the first product again. Where a gradient is wanted,
# `fused_moe` calls WITH_GRADIENT, which keeps it.
_FUSED_MOE = Op(
    spec.FUSED_MOE,
    sm90=Python(
        _run,
        _plan,
        "grouped products, rows gathered by the routing, weights streamed once",
        language="cute",
        load=_C.moe_load,
        positional=True,
    ),
    reference=lambda call: ref.fused_moe(**call.__dict__),
    method="a loop over experts",
    gradient=Gradient(_save, gradients),
    indices=indices,
    out=False,
)


def _wants(tensor: Any) -> bool:
    return bool(getattr(tensor, "requires_grad", False))


@_FUSED_MOE.export
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
    """Runs each token through the gated MLPs of its experts and adds up the results by weight.

    ``sum over j of topk_weights[t, j] * (act(x[t] @ w_up[e].T) @ w_down[e].T)`` with
    ``e = topk_ids[t, j]``. Sums are float32; between the halves, and before the last sum, values
    are rounded to the dtype of ``x``. With float8 weights, rows of ``x`` and rows between the
    halves are quantised as by :func:`tiercel.fp8_quantize`, with a scale per row, or per 128 values
    if the weights have block scales.

    Differentiable in ``x``, ``w_up``, ``w_down`` and ``topk_weights``, without float8. For the
    backward the forward keeps its inputs and the first product, ``[T * k, 2 * I]``, rounded to the
    dtype of ``x``. Works under torch.compile, torch.export, torch.autocast and activation
    checkpointing, and in CUDA graphs; it never synchronises, and its gradients are the same bits
    every time.

    Args:
        x: ``[T, H]`` bfloat16 or float16; bfloat16 with float8 weights. The precompiled kernels
            take H and I that are multiples of 8 (of 16 with float8, of 128 with scales of blocks),
            and row strides that are multiples of 16 bytes; ref takes others.
        w_up: ``[E, 2 * I, H]``, the dtype of ``x``, or float8_e4m3fn: the rows of the gate, then
            those of up.
        w_down: ``[E, H, I]``, the dtype of ``w_up``.
        topk_weights: ``[T, k]`` float32, contiguous, as from :func:`tiercel.topk_softmax`.
        topk_ids: ``[T, k]`` int32 or int64, contiguous. Invalid ids add nothing.
        activation: With a and b the two halves of a token's values inside an expert: ``"silu"``,
            ``"gelu"`` (by the error function) or ``"relu"`` of a, times b; or
            ``"gelu_residual"``, gelu(a) * (b + 1).
        expert_map: ``[experts everywhere]`` int32, for expert parallelism: an expert's index in
            ``w_up`` and ``w_down``, or -1 for an expert of another device, which adds nothing here.
            Any other invalid index adds nothing either.
        w_up_scale: For float8 weights, float32, contiguous: a factor per row ``[E, 2 * I]``, per
            expert ``[E, 1]``, or per block of 128x128 values ``[E, 2 * I / 128, H / 128]``, sizes
            rounded up.
        w_down_scale: The same, ``[E, H]``, ``[E, 1]`` or ``[E, H / 128, I / 128]``. Up to 4 tokens
            may then take one launch whose blocks wait for each other: it starts when the whole GPU
            is free.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[T, H]``, the dtype of ``x``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such activation or
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights, experts = tiercel.topk_softmax(router(x), 8, renormalize=True)
        >>> y = tiercel.fused_moe(x, w_up, w_down, weights, experts)
    """
    if w_up_scale is None:
        x, w_up, w_down = under_autocast(x, w_up, w_down)
    given = (x, w_up, w_down, topk_weights, topk_ids, activation, expert_map)
    result: Tensor
    if (
        torch.is_grad_enabled()
        and w_up_scale is None
        and w_down_scale is None
        and (_wants(x) or _wants(w_up) or _wants(w_down) or _wants(topk_weights))
        and not torch._C._are_functorch_transforms_active()
    ):
        result, *_ = WITH_GRADIENT.pick()(*given, backend)
        return result
    result = _FUSED_MOE.pick()(*given, w_up_scale, w_down_scale, backend)
    return result
