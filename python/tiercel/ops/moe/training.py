# SPDX-License-Identifier: Apache-2.0
"""fused_moe with gradients: grouped products between kernels that move rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.eager import DIRECT, route
from tiercel.core.index_checks import Index, part_bounds, places
from tiercel.core.op import Gradient, Op, Python
from tiercel.core.spec import Call
from tiercel.ops.moe import reference as ref
from tiercel.ops.moe import spec
from tiercel.ops.moe.halves import ACTIVATION_INDEX
from tiercel.ops.routing.align import empty_lists, fill_lists

# GroupedKind of grouped_gemm.h.
_PLAIN, _GRAD_X, _GRAD_WEIGHT = range(3)


def indices(call: Call) -> list[Index]:
    experts = call.w_up.shape[0]
    global_experts = experts if call.expert_map is None else call.expert_map.shape[0]
    return [
        places("topk_ids", call.topk_ids, global_experts),
        places("expert_map", call.expert_map, experts),
    ]


def _all_indices(call: Call) -> list[Index]:
    """Those that the forward made, too."""
    found, rows = indices(call), call.topk_ids.numel()
    if call.places is not None:
        found += [places("places", call.places, rows), *part_bounds("offsets", call.offsets, rows)]
    return found


def _readable(x: Tensor) -> Tensor:
    """Rows as the kernels take them: a gradient may be one expanded number."""
    fits = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


class _Rows:
    """The elements of topk_ids in the order of their experts."""

    def __init__(self, at: Tensor, offsets: Tensor) -> None:
        self.at, self.offsets = at, offsets
        self.count = at.numel()

    @classmethod
    def of(cls, call: Call) -> _Rows:
        """Sorts them, unless the call has the lists."""
        if getattr(call, "places", None) is not None:
            return cls(call.places, call.offsets)
        ids, expert_map, experts = call.topk_ids, call.expert_map, call.w_up.shape[0]
        global_experts = experts if expert_map is None else expert_map.shape[0]
        lists = empty_lists(ids, ids.numel(), global_experts, 1)
        fill_lists(ids, lists, 1, global_experts, expert_map, ignore_invalid_experts=True)
        at = torch.full_like(ids, -1, dtype=torch.int32)
        offsets = ids.new_empty(experts + 1, dtype=torch.int32)
        _C.moe_places(*lists[:2], at, offsets)
        return cls(at, offsets)

    def spread(self, x: Tensor) -> Tensor:
        """Tokens' rows for each of their experts."""
        out = x.new_empty((self.count, x.shape[1]))
        _C.moe_spread(_readable(x), self.at, out)
        return out

    def collect(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """The sums of tokens' rows, by their weights."""
        out = rows.new_empty((self.at.shape[0], rows.shape[1]))
        _C.moe_collect(rows, self.at, weights, out)
        return out

    def multiply(self, rows: Tensor, w: Tensor) -> Tensor:
        out = rows.new_empty((self.count, w.shape[1]))
        _C.grouped_gemm(rows, w, self.offsets, out, _PLAIN)
        return out

    def gradient_of_rows(self, grad: Tensor, w: Tensor) -> Tensor:
        out = grad.new_empty((self.count, w.shape[2]))
        _C.grouped_gemm(grad, w, self.offsets, out, _GRAD_X)
        return out

    def gradient_of_weights(self, grad: Tensor, rows: Tensor) -> Tensor:
        out = grad.new_empty((self.offsets.shape[0] - 1, grad.shape[1], rows.shape[1]))
        _C.grouped_gemm(grad, rows, self.offsets, out, _GRAD_WEIGHT)
        return out


def _forward(call: Call) -> tuple[Tensor, ...]:
    rows = _Rows.of(call)
    pre = rows.multiply(rows.spread(call.x), call.w_up)
    inner = pre.new_empty((rows.count, call.w_down.shape[2]))
    _C.moe_gate(pre, rows.at, inner, ACTIVATION_INDEX[call.activation])
    outer = rows.multiply(inner, call.w_down)
    return rows.collect(outer, call.topk_weights), pre, rows.at, rows.offsets


def _backward(call: Call) -> tuple[Tensor, ...]:
    """Large tensors go as soon as they have been read."""
    x, grad = call.x, call.grad
    found = dict.fromkeys(spec.GRADIENTS[:3], x.new_empty(0))
    rows, pre = _Rows.of(call), call.pre
    own = pre is None or call.overwrites_pre
    if pre is None:
        pre = rows.multiply(rows.spread(x), call.w_up)
    outer = rows.spread(grad)
    inner = rows.gradient_of_rows(outer, call.w_down)
    grad_pre = pre if own else torch.empty_like(pre)
    grad_weights = torch.empty_like(call.topk_weights)
    index = ACTIVATION_INDEX[call.activation]
    # `inner` becomes what the second matrices' rows were multiplied with, by the weights. A thread
    # has read what it writes, so that both may stay in their place.
    _C.moe_gate_backward(inner, pre, rows.at, call.topk_weights, grad_pre, grad_weights, index)
    if call.for_w_down:
        found["w_down"] = rows.gradient_of_weights(outer, inner)
    del outer, inner, pre
    if call.for_w_up:
        found["w_up"] = rows.gradient_of_weights(grad_pre, rows.spread(x))
    if call.for_x:
        found["x"] = rows.collect(rows.gradient_of_rows(grad_pre, call.w_up), None)
    none = grad_weights.new_empty(0)
    return *found.values(), grad_weights if call.for_topk_weights else none


def _plan(call: Call) -> dict[str, Any]:
    """The products' plans; they say if there are kernels for these sizes."""
    ids, experts = call.topk_ids, call.w_up.shape[0]
    backward = "grad" in call
    count, (_, hidden, inner) = ids.numel(), call.w_down.shape
    offsets = ids.new_empty(experts + 1, dtype=torch.int32)
    outer, pre, middle = (
        call.x.new_empty((count, columns)) for columns in (hidden, 2 * inner, inner)
    )
    products = {
        "up": (outer, call.w_up, pre, _PLAIN),
        "down": (middle, call.w_down, outer, _PLAIN),
    }
    if backward:
        products = {
            "grad_rows": (pre, call.w_up, outer, _GRAD_X),
            "grad_inner": (outer, call.w_down, middle, _GRAD_X),
            "grad_w_up": (pre, outer, torch.empty_like(call.w_up), _GRAD_WEIGHT),
            "grad_w_down": (outer, middle, torch.empty_like(call.w_down), _GRAD_WEIGHT),
        }
    plans = {
        name: dict(_C.grouped_gemm_plan(a, b, offsets, out, kind))
        for name, (a, b, out, kind) in products.items()
    }
    return {"kernel": next(iter(plans.values()))["kernel"], **plans}


def _sm90(run: Callable[[Call], Any]) -> Python:
    return Python(
        run,
        _plan,
        "grouped products of rows in the order of their experts",
        language="cute",
        load=_C.moe_rows_load,
    )


def save(ctx: Any, call: Call, saved: tuple[Tensor | None, ...] = (None, None, None)) -> None:
    ctx.activation, ctx.backend = call.activation, call.backend
    tensors = (call.x, call.w_up, call.w_down, call.topk_weights, call.topk_ids, call.expert_map)
    ctx.save_for_backward(*tensors, *saved)


def _save_results(ctx: Any, call: Call, results: Any) -> None:
    ctx.mark_non_differentiable(*results[1:])
    save(ctx, call, results[1:])


def gradients(ctx: Any, grad: Tensor | None, *_: Any) -> dict[str, Tensor | None]:
    if grad is None:
        return {}
    *inputs, topk_ids, expert_map, pre, at, offsets = ctx.saved_tensors
    wanted = {name: ctx.wants[name] for name in spec.GRADIENTS}
    if torch.is_grad_enabled():  # PyTorch's formulas can be differentiated again
        result = ref.fused_moe(*inputs, topk_ids, activation=ctx.activation, expert_map=expert_map)
        of = {n: t for (n, w), t in zip(wanted.items(), inputs, strict=True) if w}
        found = torch.autograd.grad(
            result, list(of.values()), grad, create_graph=True, materialize_grads=True
        )
        return dict(zip(of, found, strict=True))
    x, *weights = inputs
    backend = ctx.backend if ctx.backend in ("sm90", "ref") else None
    given = (x, grad, *weights, topk_ids, pre, at, offsets, ctx.activation, expert_map)
    # The graph ends with this backward unless it is kept; where something watches, nobody knows.
    kept = torch._C._autograd._get_current_graph_task_keep_graph()
    overwrites = pre is not None and not kept and route(pre, grad) == DIRECT
    found = _BACKWARD(*given, *wanted.values(), overwrites, backend)
    if overwrites:
        torch._C._increment_version([pre])
    return {name: t if wanted[name] else None for name, t in zip(wanted, found, strict=True)}


WITH_GRADIENT = Op(
    spec.FUSED_MOE_WITH_GRADIENT,
    sm90=_sm90(_forward),
    reference=lambda call: ref.fused_moe_with_gradient(**call.__dict__),
    method="a loop over experts",
    gradient=Gradient(_save_results, gradients),
    indices=indices,
    out=False,
)
_BACKWARD = Op(
    spec.FUSED_MOE_BACKWARD,
    sm90=_sm90(_backward),
    reference=lambda call: ref.fused_moe_backward(**call.__dict__),
    method="a loop over experts",
    indices=_all_indices,
    out=False,
)
