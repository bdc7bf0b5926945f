# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts with 4-bit weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Op, Python
from tiercel.core.spec import Call
from tiercel.ops.gemv.spec import FORMATS
from tiercel.ops.moe import reference as ref
from tiercel.ops.moe.spec import W4_ACTIVATIONS, W4_MOE
from tiercel.ops.moe.training import indices
from tiercel.ops.quant.spec import TILES
from tiercel.ops.routing.align import empty_lists, fill_lists

__all__ = ["w4_moe"]

_FORMAT_INDEX = {name: index for index, name in enumerate(FORMATS)}
_ROW = list(TILES).index("row")  # in Fp8Granularity
_ACTIVATION_INDEX = {name: index for index, name in enumerate(W4_ACTIVATIONS)}

# Up to so many ids there is no routing: each id is a block. w4_moe.cc would take 16.
_DIRECT_IDS = 4


def _block_size(elements: int, experts: int, has_middle: bool) -> int:
    """The fastest by what was measured; weights are read once in a block. `has_middle`: there are
    kernels for blocks of 64."""
    rows = elements / max(experts, 1)
    # Sums have another order in larger blocks.
    if _C.batch_invariant() or rows <= (10 if has_middle else 20):
        return 8 if rows <= 3 else 16 if rows <= 10 else 32
    return 64 if has_middle and rows <= 48 else 128


def _route(
    topk_ids: Tensor,
    experts: int,
    expert_map: Tensor | None,
    has_middle: bool,
    align: Callable[..., Any],
) -> tuple[tuple[Tensor | None, ...], int]:
    if topk_ids.numel() <= _DIRECT_IDS and expert_map is None:
        return (None, None, None), 0
    block = _block_size(topk_ids.numel(), experts, has_middle)
    lists = empty_lists(topk_ids, topk_ids.numel(), experts, block)
    fill_lists(topk_ids, lists, block, experts, expert_map, native=align)
    return lists, block


def _products(
    x: Tensor,
    w_up: Tensor,
    w_up_scale: Tensor,
    w_down: Tensor,
    w_down_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    format: str,  # noqa: A002
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    interleaved: bool,
    expert_map: Tensor | None,
    up_zero_point: Tensor | None,
    down_zero_point: Tensor | None,
    up_global_scale: Tensor | None,
    down_global_scale: Tensor | None,
    x_scale: Tensor | None,
    *,
    align: Callable[..., Any],
    up: Callable[..., Any],
    quantize: Callable[[Tensor, Tensor, Tensor], None],
    down: Callable[..., Any],
) -> tuple[Tensor, Any, Any]:
    """The experts' rows [T * k, H], and what the native functions return. `quantize`: one launch
    between the products, of float8 `x`."""
    experts = w_down.shape[0] if expert_map is None else expert_map.shape[0]
    has_middle = format != "int4" and x.dtype == torch.bfloat16
    routing, block = _route(topk_ids, experts, expert_map, has_middle, align)
    dtype = x.dtype if x_scale is None else torch.bfloat16
    inner = x.new_empty((topk_ids.numel(), 2 * w_down.shape[2]), dtype=dtype)
    outer = x.new_empty((topk_ids.numel(), x.shape[1]), dtype=dtype)
    rest = (block, experts, _FORMAT_INDEX[format])
    gate = (_ACTIVATION_INDEX[activation], interleaved, alpha, limit)
    weight = (w_up, w_up_scale, up_zero_point, up_global_scale, up_bias, x_scale)
    first = up(x, *weight, topk_ids, *routing, inner, *rest, *gate)
    if x_scale is not None:
        rows, x_scale = torch.empty_like(inner, dtype=x.dtype), _row_scales(inner)
        quantize(inner, rows, x_scale)
        inner = rows
    weight = (w_down, w_down_scale, down_zero_point, down_global_scale, down_bias, x_scale)
    second = down(inner, *weight, topk_ids, *routing, outer, *rest)
    return outer, first, second


def _row_scales(rows: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], 1), dtype=torch.float32)


def _quantize(x: Tensor, q: Tensor, scale: Tensor) -> None:
    # The next launch begins with the routing and with weights.
    _C.fp8_quantize_between(x, q, scale, None, _ROW, False, True)


def _quantize_plan(x: Tensor, q: Tensor, scale: Tensor) -> None:
    _C.fp8_quantize_plan(x, q, scale, None, _ROW)


def _run(x: Tensor, *arguments: Any) -> Tensor:
    outer, _, _ = _products(
        x,
        *arguments,
        align=_C.moe_align_block_size,
        up=_C.w4_moe_up,
        quantize=_quantize,
        down=_C.w4_moe_down,
    )
    out = outer.new_empty(x.shape)
    weights = arguments[4]
    _C.moe_sum(outer.view(*weights.shape, x.shape[1]), weights, out)
    return out


def _plan(call: Call) -> dict[str, Any]:
    _, up, down = _products(
        *(getattr(call, name) for name in W4_MOE.names),
        align=_C.moe_align_block_size_plan,
        up=_C.w4_moe_up_plan,
        quantize=_quantize_plan,
        down=_C.w4_moe_down_plan,
    )
    return {"kernel": up["kernel"], "up": dict(up), "down": dict(down)}


_W4_MOE = Op(
    W4_MOE,
    sm90=Python(
        _run,
        _plan,
        "tensor cores on weights decoded in registers, rows gathered by the routing",
        load=_C.w4_moe_load,
        positional=True,
    ),
    reference=lambda call: ref.w4_moe(**call.__dict__),
    method="a loop over experts",
    indices=indices,
    out=False,
)


@_W4_MOE.export
def w4_moe(
    x: Tensor,
    w_up: Tensor,
    w_up_scale: Tensor,
    w_down: Tensor,
    w_down_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    format: str = "mxfp4",  # noqa: A002
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float = 0.0,
    interleaved: bool = False,
    expert_map: Tensor | None = None,
    up_zero_point: Tensor | None = None,
    down_zero_point: Tensor | None = None,
    up_global_scale: Tensor | None = None,
    down_global_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """:func:`tiercel.fused_moe` with 4-bit weights.

    Weights have the formats of :func:`tiercel.w4_linear`, one matrix per expert, and there may be
    biases. With N = 2 * I rows of ``w_up``, or I without a gate,

    ``sum over j of topk_weights[t, j] * (act(x[t] @ up[e].T + up_bias[e]) @ down[e].T +
    down_bias[e])`` with ``e = topk_ids[t, j]``.

    gpt-oss's experts need ``activation="silu_residual"``, ``alpha=1.702``, ``limit=7`` and
    ``interleaved=True``; :func:`tiercel.ref.moe.pack_w4_experts` makes the arguments from the
    checkpoint's tensors.

    Sums are float32; between the halves, and before the last sum, values are rounded to the dtype
    of the result.

    With ``x_scale``, activations are float8 and products run at the tensor cores' float8 rate:
    ``x`` as :func:`tiercel.fp8_quantize` makes it, and what is between the halves quantised by row
    in a launch of its own, with the largest magnitude of a row as 448. This is meant for many
    tokens; with few, the weights' bytes decide the time.

    There is no derivative. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, H]`` bfloat16 or float16, or float8_e4m3fn with ``x_scale``. The precompiled
            kernels take H and I that are multiples of 64, row strides that are multiples of 16
            bytes, and MXFP4 with bfloat16 or float8 only; ref takes others.
        w_up: ``[E, N, H / 2]`` uint8 or float4_e2m1fn_x2, two values per byte, the first in its low
            half.
        w_up_scale: Contiguous: ``[E, N, H / 32]`` uint8 (mxfp4), ``[E, N, H / 16]`` float8_e4m3fn
            (nvfp4) or ``[E, N, H / group]`` of the result's dtype (int4), groups of 32, 64 or
            128.
        w_down: ``[E, H, I / 2]``, as ``w_up``.
        w_down_scale: The same for ``w_down``.
        topk_weights: ``[T, k]`` float32, contiguous, as from :func:`tiercel.topk_softmax`.
        topk_ids: ``[T, k]`` int32 or int64, contiguous. Invalid ids add nothing.
        format: ``"mxfp4"``, ``"nvfp4"`` or ``"int4"``, as for :func:`tiercel.w4_linear`; not
            ``"nvfp4"`` with ``x_scale``.
        up_bias: ``[E, N]`` of the result's dtype, contiguous, in the order of the rows of ``w_up``.
        down_bias: ``[E, H]``, the same.
        activation: With a the gate and b the up projection: ``"silu"``, a * sigmoid(alpha * a) * b;
            ``"silu_residual"``, a * sigmoid(alpha * a) * (b + 1); ``"gelu"`` (by the error
            function) or ``"relu"`` of a, times b; or, without a gate, ``"relu_squared"``.
        alpha: For the two with a sigmoid.
        limit: Upper bound of a; b is clamped to -limit and limit. 0: no limit.
        interleaved: Whether the rows of ``w_up`` alternate between gate and up; otherwise all gates
            come first.
        expert_map: ``[experts everywhere]`` int32, as for :func:`tiercel.fused_moe`.
        up_zero_point: For int4: whole numbers from 0 to 15 in the dtype and the shape of the
            scales, contiguous; None is 8.
        down_zero_point: The same for ``w_down``.
        up_global_scale: ``[E]`` float32, contiguous; None is 1.
        down_global_scale: The same for ``w_down``.
        x_scale: Factor of a float8 ``x``: float32, contiguous, one element or one per row, in any
            shape.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[T, H]`` of x's dtype, or bfloat16 with ``x_scale``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such format, activation
            or backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights, experts = tiercel.topk_softmax(router(x), 4, renormalize=True)
        >>> y = tiercel.w4_moe(x, w_up, up_scale, w_down, down_scale, weights, experts)
    """
    given = (x, w_up, w_up_scale, w_down, w_down_scale, topk_weights, topk_ids, format)
    gate = (up_bias, down_bias, activation, alpha, limit, interleaved, expert_map)
    rest = (up_zero_point, down_zero_point, up_global_scale, down_global_scale, x_scale, backend)
    return _W4_MOE.pick()(*given, *gate, *rest)  # type: ignore[no-any-return]
