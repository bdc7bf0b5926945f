# SPDX-License-Identifier: Apache-2.0
"""Short causal convolutions of prompts and of steps with a pool of states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index, part_bounds, places
from tiercel.core.op import Gradient, Lookup, Native, Op
from tiercel.core.spec import Call
from tiercel.ops._rows import rows
from tiercel.ops.conv import reference as ref
from tiercel.ops.conv import spec

__all__ = ["causal_conv1d", "causal_conv1d_update"]

_SILU = Lookup("activation", {None: False, "silu": True})


def _starts(call: Call) -> list[Index]:
    return part_bounds("cu_seqlens", call.cu_seqlens, call.x.shape[-2])


def _launch_of(takes: tuple[str, ...]) -> Callable[..., Any]:
    """Calls with rows at one distance; results have such rows already."""

    def launch(native: Callable[..., Any], call: Call) -> Any:
        given = {name: getattr(call, name) for name in takes}
        given["x"] = rows(call.x)
        if "grad" in given:
            given["grad"] = rows(call.grad)
        return native(*given.values(), call.activation == "silu")

    return launch


_TAKES = ("x", "weight", "bias", "cu_seqlens", "out")
_BACKWARD_TAKES = ("grad", "x", "weight", "bias", "cu_seqlens", "dx", "sums")

_BACKWARD = Op(
    spec.CAUSAL_CONV1D_BACKWARD,
    sm90=Native(
        _C.causal_conv1d_backward,
        _C.causal_conv1d_backward_plan,
        (*_BACKWARD_TAKES, _SILU),
        "a thread has channels and rows; sums of parts of the rows, which are added in order",
        load=_C.causal_conv1d_load,
        contiguous=("grad", "x"),
        launch=_launch_of(_BACKWARD_TAKES),
    ),
    reference=lambda call: ref.causal_conv1d_backward(**spec.CAUSAL_CONV1D_BACKWARD.values(call)),
    method="torch's derivative of the reference",
    indices=_starts,
    out=False,
)


def _save(ctx: Any, call: Call, out: Tensor) -> None:
    ctx.activation, ctx.backend, ctx.width = call.activation, call.backend, call.weight.shape[1]
    ctx.save_for_backward(call.x, call.weight, call.bias, call.cu_seqlens)


def _gradients(ctx: Any, grad: Tensor | None) -> dict[str, Tensor | None]:
    if grad is None:
        return {}
    x, weight, bias, starts = ctx.saved_tensors
    dx, sums = _BACKWARD(grad, x, weight, bias, starts, ctx.activation, ctx.backend)
    total = sums.sum(0)
    return {
        "x": dx if ctx.wants["x"] else None,
        "weight": total[:-1].t().to(weight.dtype) if ctx.wants["weight"] else None,
        "bias": total[-1].to(bias.dtype) if ctx.wants["bias"] else None,
    }


_CONV = Op(
    spec.CAUSAL_CONV1D,
    sm90=Native(
        _C.causal_conv1d,
        _C.causal_conv1d_plan,
        (*_TAKES, _SILU),
        "a thread has four channels and up to 32 rows, which it reads once",
        load=_C.causal_conv1d_load,
        contiguous=("x",),
        launch=_launch_of(_TAKES),
    ),
    reference=lambda call: ref.causal_conv1d(**spec.CAUSAL_CONV1D.values(call)),
    method="torch, a tap after the other, in float32",
    gradient=Gradient(_save, _gradients),
    indices=_starts,
)


@_CONV.export
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Convolves each channel of sequences with a short causal filter.

    ``out[t] = activation(bias + sum_j weight[:, W - 1 - j] * x[t - j])`` for j below W, with zeros
    before a sequence. Arithmetic is float32, and results are rounded once.

    Differentiable in ``x``, ``weight`` and ``bias``, except with ``out``; gradients are
    reproducible. Works under torch.compile and torch.export, and in CUDA graphs; it never
    synchronises.

    Args:
        x: ``[..., T, D]``, sequences of T tokens, or with ``cu_seqlens`` ``[1, T, D]`` or
            ``[T, D]``; float32, bfloat16 or float16. The precompiled kernels take D that is a
            multiple of 4, aligned to four elements; fastest with a single token stride.
        weight: ``[D, W]``, contiguous, of the dtype of ``x``; W is 2, 3 or 4.
        bias: ``[D]``, the same, or None.
        activation: ``"silu"`` or None.
        cu_seqlens: ``[N + 1]`` int32, any stride: where each sequence starts, then where the last
            one ends. It stays on the GPU and must not decrease. Rows in no sequence give 0.
        out: Tensor to write to, of the shape, dtype and device of ``x``.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> qkv = tiercel.causal_conv1d(qkv, conv.weight.squeeze(1), activation="silu")
    """
    if out is None:
        return _CONV.pick()(x, weight, bias, cu_seqlens, activation, backend)  # type: ignore[no-any-return]
    return _CONV.into()(out, x, weight, bias, cu_seqlens, activation, backend)  # type: ignore[no-any-return]


_UPDATE_TAKES = spec.CAUSAL_CONV1D_UPDATE.names[:-1]


def _update_indices(call: Call) -> list[Index]:
    return [places("state_indices", call.state_indices, call.states.shape[0]), *_starts(call)]


_UPDATE = Op(
    spec.CAUSAL_CONV1D_UPDATE,
    sm90=Native(
        _C.causal_conv1d_update,
        _C.causal_conv1d_update_plan,
        (*_UPDATE_TAKES, _SILU),
        "as causal_conv1d's; the thread that has a sequence's first row replaces its state",
        load=_C.causal_conv1d_load,
        contiguous=("x",),
        launch=_launch_of(_UPDATE_TAKES),
    ),
    reference=lambda call: ref.causal_conv1d_update(**spec.CAUSAL_CONV1D_UPDATE.values(call)),
    method="torch, a tap after the other, in float32",
    indices=_update_indices,
)


@_UPDATE.export
def causal_conv1d_update(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    has_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`tiercel.causal_conv1d` with a pool of states, for chunked prompts and decode steps.

    A sequence's state is its last W - 1 inputs, the newest one last. It precedes the first token,
    and is replaced by the last inputs. A sequence without tokens keeps its state.

    There is no derivative: it is for inference. Works under torch.compile and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[B, T, D]``, T tokens of each sequence, or with ``cu_seqlens`` ``[1, T, D]``; otherwise
            as for :func:`tiercel.causal_conv1d`.
        states: ``[slots, W - 1, D]`` of the dtype of ``x``, written to: a pool. The precompiled
            kernels take contiguous states aligned to four elements, with any slot stride.
        weight: ``[D, W]``, contiguous, of the dtype of ``x``; W is 2, 3 or 4.
        out: Tensor to write results to, of the shape, dtype and device of ``x``; not ``x``. The
            precompiled kernels take a single row stride, aligned to four elements.
        bias: ``[D]`` as ``weight``, or None.
        state_indices: ``[N]`` int32, contiguous: each sequence's slot, all different; None:
            sequence i has slot i. -1, or any other invalid slot, means a state of zeros that is not
            kept.
        has_state: ``[N]`` bool, contiguous: where it is False the sequence begins with zeros,
            whatever its state holds. None: all have a state.
        cu_seqlens: ``[N + 1]`` int32, as for :func:`tiercel.causal_conv1d`.
        activation: ``"silu"`` or None.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``(states, out)``, the arguments.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; or a
            gradient is wanted.

    Example:
        >>> tiercel.causal_conv1d_update(qkv, pool, weight, out, state_indices=slots)
    """
    _UPDATE.pick()(
        *(x, states, weight, out, bias, state_indices, has_state, cu_seqlens, activation, backend)
    )
    return states, out
