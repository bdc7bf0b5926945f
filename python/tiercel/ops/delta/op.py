# SPDX-License-Identifier: Apache-2.0
"""Linear attention by the gated delta rule: prompts, and decode steps with a pool of states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.eager import empty
from tiercel.core.index_checks import Index, between, part_bounds, places
from tiercel.core.op import Gradient, Native, Op
from tiercel.core.spec import Call, Spec
from tiercel.ops.delta import reference as ref
from tiercel.ops.delta import spec

__all__ = ["gated_delta_rule", "gated_delta_rule_decode"]

_INPUTS = ("q", "k", "v", "g", "beta")


def _decode_launch(native: Callable[..., Any], call: Call) -> Any:
    given = spec.GATED_DELTA_RULE_DECODE.values(call)
    given |= {"g": call.g.contiguous(), "beta": call.beta.contiguous()}
    return native(*given.values())


def _decode_indices(call: Call) -> list[Index]:
    found = [places("state_indices", call.state_indices, call.states.shape[0])]
    if call.accepted is not None:
        found.append(between("accepted", call.accepted, 0, call.q.shape[1]))
    return found


_DECODE = Op(
    spec.GATED_DELTA_RULE_DECODE,
    sm90=Native(
        _C.gated_delta_rule_decode,
        _C.gated_delta_rule_decode_plan,
        spec.GATED_DELTA_RULE_DECODE.names,
        "32 columns of a state in a block's registers; many states stream through shared memory",
        load=_C.gated_delta_rule_decode_load,
        contiguous=("g", "beta"),
        launch=_decode_launch,
    ),
    reference=lambda call: ref.gated_delta_rule_decode(**spec.GATED_DELTA_RULE_DECODE.values(call)),
    method="torch, a token after the other, in float64",
    indices=_decode_indices,
)


@_DECODE.export
def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    out: Tensor,
    state_indices: Tensor | None = None,
    *,
    accepted: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """A decode step of linear attention by the gated delta rule, with states in a pool.

    For each value head, token by token: ``S = exp(g) * S``, row by row where ``g`` has a gate per
    key channel; ``S += k (beta * (v - k^T S))^T``; ``out = scale * q^T S``. That is gated DeltaNet
    (Yang et al., 2024, arXiv:2412.06464) with one gate per head, and Kimi Delta Attention with one
    per channel. Arithmetic is float32. A state is read once, and written once or, with ``[B, T]``
    slots, once per token.

    There is no derivative: it is for inference. Works under torch.compile and in CUDA graphs; it
    never synchronises.

    Args:
        q: ``[B, T, Hk, K]``, bfloat16 or float16; T is 1, or several for speculative tokens. The
            precompiled kernels take K of 64 or 128, and strides that are multiples of 16 bytes,
            with a contiguous last dimension.
        k: The same.
        v: ``[B, T, Hv, V]``, the same; Hv is a multiple of Hk, and value head i reads key head
            ``i // (Hv // Hk)``. The precompiled kernels take V that is a multiple of 32.
        g: ``[B, T, Hv]`` or ``[B, T, Hv, K]`` float32: logarithms of the decays.
        beta: ``[B, T, Hv]``, float32 or the dtype of ``q``.
        states: ``[slots, Hv, K, V]``, float32 or bfloat16, written to. The precompiled kernels take
            contiguous states with any slot stride.
        out: Tensor to write results to, of the shape, dtype and device of ``v``, with strides as
            for ``q``.
        state_indices: int32, contiguous, all different. ``[B]``: the slot of each sequence's state;
            None: sequence i has slot i. ``[B, T]``: the slots of the states after each token; a
            sequence begins with the state in its column ``accepted - 1``. -1, or any other invalid
            slot, means a state of zeros that is not kept.
        accepted: ``[B]`` int32, contiguous: with ``[B, T]`` slots, how many tokens of the step
            before were kept. Clamped to 1 and T; None: 1.
        scale: Factor of the queries; None: ``K ** -0.5``.
        qk_l2norm: Divide the heads of ``q`` and ``k`` by their L2 norms first.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``(states, out)``, the arguments.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted.

    Example:
        >>> tiercel.gated_delta_rule_decode(q, k, v, g, beta, pool, out, slots, qk_l2norm=True)
    """
    _DECODE.pick()(
        *(q, k, v, g, beta, states, out, state_indices, accepted, scale, qk_l2norm, backend)
    )
    return states, out


def _launch(native: Callable[..., Any], call: Call) -> Any:
    given = {name: getattr(call, name) for name in _INPUTS}
    given |= {"g": call.g.contiguous(), "beta": call.beta.contiguous()}
    before = (*given.values(), call.initial_state, call.cu_seqlens, call.out)
    before = (*before, getattr(call, "final_state", None))
    plan = _C.gated_delta_rule_plan(*before, None, call.scale, call.qk_l2norm)
    if native is _C.gated_delta_rule_plan:
        return plan
    workspace = empty(call.q, (plan["workspace"],), torch.float32)
    return native(*before, workspace, call.scale, call.qk_l2norm)


def _indices(call: Call) -> list[Index]:
    return part_bounds("cu_seqlens", call.cu_seqlens, call.q.shape[1])


_RESULTS = spec.GATED_DELTA_RULE_BACKWARD.result_names


def _launch_backward(native: Callable[..., Any], call: Call) -> Any:
    given = {name: getattr(call, name) for name in ("grad", *_INPUTS)}
    given |= {name: given[name].contiguous() for name in ("grad", "g", "beta")}
    results = [getattr(call, name) for name in _RESULTS]
    if call.initial_state is None:
        results[-1] = None
    states = (call.grad_final, call.initial_state, call.cu_seqlens)
    before = (*given.values(), *states, *results)
    plan = _C.gated_delta_rule_backward_plan(*before, None, call.scale, call.qk_l2norm)
    if native is _C.gated_delta_rule_backward_plan:
        return plan
    workspace = empty(call.q, (plan["workspace"],), torch.float32)
    return native(*before, workspace, call.scale, call.qk_l2norm)


_BACKWARD = Op(
    spec.GATED_DELTA_RULE_BACKWARD,
    sm90=Native(
        _C.gated_delta_rule_backward,
        _C.gated_delta_rule_backward_plan,
        (
            *("grad", *_INPUTS, "grad_final", "initial_state", "cu_seqlens", *_RESULTS, None),
            *("scale", "qk_l2norm"),
        ),
        "chunks of 64 tokens: states before them and gradients behind them, then all else at once",
        load=_C.gated_delta_rule_backward_load,
        launch=_launch_backward,
        direct=False,
    ),
    reference=lambda call: ref.gated_delta_rule_backward(
        **spec.GATED_DELTA_RULE_BACKWARD.values(call)
    ),
    method="torch, a token after the other and back, in float64",
    indices=_indices,
    out=False,
)


def _save(ctx: Any, call: Call, results: Any) -> None:
    ctx.scale, ctx.qk_l2norm, ctx.backend = call.scale, call.qk_l2norm, call.backend
    given = (getattr(call, name) for name in _INPUTS)
    ctx.save_for_backward(*given, call.initial_state, call.cu_seqlens)


def _gradients(
    ctx: Any, grad: Tensor | None, grad_final: Tensor | None = None
) -> dict[str, Tensor | None]:
    if grad is None and grad_final is None:
        return {}
    *given, initial, starts = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(given[2], memory_format=torch.contiguous_format)
    if grad_final is not None:
        grad_final = grad_final.contiguous()
    options = (ctx.scale, ctx.qk_l2norm, ctx.backend)
    found = _BACKWARD(grad, *given, grad_final, initial, starts, *options)
    wanted = zip((*_INPUTS, "initial_state"), found, strict=True)
    return {name: each for name, each in wanted if ctx.wants[name]}


def _op(declared: Spec, with_state: bool) -> Op:
    takes = (*_INPUTS, "initial_state", "cu_seqlens", "out", "final_state", None)
    return Op(
        declared,
        sm90=Native(
            _C.gated_delta_rule,
            _C.gated_delta_rule_plan,
            (*takes, "scale", "qk_l2norm"),
            "chunks of 64 tokens: each solved on its own, then a state goes through them",
            load=_C.gated_delta_rule_load,
            launch=_launch,
            direct=False,
        ),
        reference=lambda call: ref.gated_delta_rule(
            **declared.values(call), output_final_state=with_state
        ),
        method="torch, a token after the other, in float64",
        gradient=Gradient(_save, _gradients),
        indices=_indices,
        out=False,
    )


_RULE = _op(spec.GATED_DELTA_RULE, with_state=False)
_WITH_STATE = _op(spec.WITH_STATE, with_state=True)


@_RULE.export
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention by the gated delta rule over prompts.

    Computes the recurrence of :func:`tiercel.gated_delta_rule_decode` for all tokens of each
    sequence, in chunks of 64 tokens on tensor cores. Few long sequences are split over the GPU.
    States are float32; the operands of products (copies of states, the tokens' updates and the
    matrices of a chunk) are rounded to the dtype of ``q``. With float16, no element of a state may
    exceed 65504.

    Differentiable in ``q``, ``k``, ``v``, ``g``, ``beta`` and ``initial_state``, through results
    and final states; gradients are reproducible. The backward recomputes the states. Works under
    torch.compile and in CUDA graphs; it never synchronises, except for gradients on ``ref`` with
    ``cu_seqlens``.

    Args:
        q: ``[B, T, Hk, K]``, bfloat16 or float16. The precompiled kernels take K of 64 or 128, and
            strides that are multiples of 16 bytes, with a contiguous last dimension.
        k: The same.
        v: ``[B, T, Hv, V]``, the same; Hv is a multiple of Hk, and value head i reads key head
            ``i // (Hv // Hk)``. The precompiled kernels take V that is a multiple of 16.
        g: ``[B, T, Hv]`` or ``[B, T, Hv, K]`` float32: logarithms of the decays. The precompiled
            kernels clamp them to -100.
        beta: ``[B, T, Hv]``, float32 or the dtype of ``q``.
        scale: Factor of the queries; None: ``K ** -0.5``.
        initial_state: ``[N, Hv, K, V]`` float32, contiguous: each sequence's first state; None:
            zeros. N is B, or with ``cu_seqlens`` the number of sequences.
        output_final_state: Whether to return the states after the last tokens too.
        cu_seqlens: ``[N + 1]`` int32, any stride: where each sequence starts, then where the last
            one ends; B is 1 then. It stays on the GPU and must not decrease. Tokens in no sequence
            give 0.
        qk_l2norm: Divide the heads of ``q`` and ``k`` by their L2 norms first.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[B, T, Hv, V]`` of the dtype of ``v``; with ``output_final_state`` a pair of it and the
        states ``[N, Hv, K, V]``, float32.

    Raises:
        TypeError: A dtype or type is not one of the above.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> out, state = tiercel.gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    """
    if not isinstance(output_final_state, bool):
        raise TypeError(
            "gated_delta_rule: `output_final_state` must be a bool, got "
            f"{type(output_final_state).__name__}"
        )
    op = _WITH_STATE if output_final_state else _RULE
    return op(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, backend)  # type: ignore[no-any-return]
