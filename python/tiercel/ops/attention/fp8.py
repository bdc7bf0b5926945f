# SPDX-License-Identifier: Apache-2.0
"""Attention of float8_e4m3fn queries, keys and values: the operators behind ``attention``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Backend, Op
from tiercel.core import platform
from tiercel.core.checks import check_dtype, check_same_device, dtype_name
from tiercel.core.platform import Reason
from tiercel.ops.attention.backward import native_options
from tiercel.ops.attention.checks import (
    FLOAT8,
    OPTIONS,
    check_out,
    check_tensors,
    empty_lse,
    empty_out,
)
from tiercel.ops.attention.reference import attention as reference

_NAME = "attention"
DESCALES = ("q_descale", "k_descale", "v_descale")

# Below, `inputs` is (q, k, v), `outputs` (out, lse or None), `descales` three tensors or Nones and
# `options` (causal, window, scale, softcap), as in the operators' schemas.


def check_descales(
    op: str, q: Tensor, per_entry: tuple[int, int], descales: tuple[Tensor | None, ...]
) -> None:
    """`per_entry` is the batch and the heads of keys."""
    for name, scale in zip(DESCALES, descales, strict=True):
        if scale is None:
            continue
        check_dtype(op, name, scale.dtype, (torch.float32,))
        if scale.numel() != 1 and tuple(scale.shape) not in (per_entry[1:], per_entry):
            raise ValueError(
                f"{op}: `{name}` must have shape [B, Hk] = {list(per_entry)}, [Hk] or one "
                f"element, got {list(scale.shape)}"
            )
        check_same_device(op, name, scale, "q", q)


def _check_descales(inputs: tuple[Tensor, ...], descales: tuple[Tensor | None, ...]) -> None:
    q, k, _ = inputs
    check_descales(_NAME, q, (q.shape[0], k.shape[2]), descales)


def _native(
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, Tensor | None],
    descales: tuple[Tensor | None, ...],
    workspace: Tensor | None,
    options: tuple[Any, ...],
) -> tuple[Any, ...]:
    return (*inputs, *outputs, *descales, workspace, *native_options(inputs[0], *options))


def _launch(
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, Tensor | None],
    descales: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
) -> None:
    if inputs[1].shape[1] == 0:
        check_out((FLOAT8,), *inputs, *outputs)
        _check_descales(inputs, descales)
        outputs[0].zero_()
        if outputs[1] is not None:
            outputs[1].fill_(-math.inf)
        return
    plan = _C.attention_fp8_plan(*_native(inputs, outputs, descales, None, options))
    workspace = torch.empty(plan["workspace"], dtype=torch.uint8, device=inputs[0].device)
    _C.attention_fp8(*_native(inputs, outputs, descales, workspace, options))


def _plan(
    inputs: tuple[Tensor, ...], descales: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> dict[str, Any]:
    outputs = (empty_out(inputs[0]), None)
    return dict(_C.attention_fp8_plan(*_native(inputs, outputs, descales, None, options)))


def _why_not(
    inputs: tuple[Tensor, ...], descales: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> Reason | None:
    q, k, v = inputs
    reason = platform.why_not(q.device)
    if reason is not None or k.shape[1] == 0:
        return reason
    try:
        # One query shows the strides.
        _plan((q[:, :1], k, v), descales, options)
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


def _reference(
    inputs: tuple[Tensor, ...],
    descales: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    return_lse: bool,
) -> Any:
    names = (*DESCALES, "causal", "window", "scale", "softcap")
    named = dict(zip(names, (*descales, *options), strict=True))
    return reference(*inputs, **named, return_lse=return_lse)


_CUTE = ("TMA, e4m3 wgmma, persistent blocks; values transposed by a kernel before", "cute")
_TORCH = ("all scores in memory, float32", "torch")
_DESCALES = ", ".join(f"Tensor? {name}=None" for name in DESCALES)


def _operator(lse: bool, into: bool) -> Op:
    """With `into`, one that writes to tensors of the caller."""
    given = (1 + lse) if into else 0

    def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """inputs, outputs of the caller, descales, options."""
        rest = args[3 + given :]
        outputs = (args[3], args[4] if lse else None) if into else ()
        return args[:3], outputs, rest[:3], rest[3:7]

    def check(*args: Any) -> None:
        inputs, outputs, descales, _ = split(args)
        if into:
            check_out((FLOAT8,), *inputs, *outputs)
        else:
            check_tensors((FLOAT8,), *inputs)
        _check_descales(inputs, descales)

    def fake(*args: Any) -> Any:
        if into:
            return None
        return (empty_out(args[0]), empty_lse(args[0])) if lse else empty_out(args[0])

    def run(*args: Any) -> Any:
        inputs, outputs, *rest = split(args)
        if into:
            _launch(inputs, outputs, *rest)
            return None
        made = (empty_out(inputs[0]), empty_lse(inputs[0]) if lse else None)
        _launch(inputs, made, *rest)
        return made if lse else made[0]

    def run_reference(*args: Any) -> Any:
        inputs, outputs, *rest = split(args)
        results = _reference(inputs, *rest, lse)
        if not into:
            return results
        for output, result in zip(outputs, results if lse else (results,), strict=False):
            output.copy_(result)
        return None

    def why_not(*args: Any) -> Reason | None:
        inputs, _, *rest = split(args)
        return _why_not(inputs, *rest)

    def describe(*args: Any) -> dict[str, Any]:
        inputs, _, *rest = split(args)
        return _plan(inputs, *rest)

    writes = ("Tensor(a!) out, " + ("Tensor(b!) lse, " if lse else "")) if into else ""
    returns = "()" if into else "(Tensor, Tensor)" if lse else "Tensor"
    return Op(
        f"{_NAME}_fp8{'_lse' if lse else ''}{'_out' if into else ''}",
        f"(Tensor q, Tensor k, Tensor v, {writes}{_DESCALES}, {OPTIONS}) -> {returns}",
        check=check,
        fake=fake,
        sm90=Backend("sm90", run, *_CUTE, why_not=why_not),
        ref=Backend("ref", run_reference, *_TORCH),
        family=_NAME,
        describe=describe,
        load=None if lse or into else _C.attention_fp8_load,
    )


_OPERATORS = {(lse, into): _operator(lse, into) for lse in (False, True) for into in (False, True)}


def attention_fp8(
    inputs: tuple[Tensor, Tensor, Tensor],
    descales: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    return_lse: bool,
    out: Tensor | None,
) -> Any:
    """What :func:`tiercel.attention` does for float8_e4m3fn; `options` ends with the backend."""
    run = _OPERATORS[return_lse, out is not None]
    if out is None:
        return run(*inputs, *descales, *options)
    if not return_lse:
        run(*inputs, out, *descales, *options)
        return out
    lse = empty_lse(inputs[0])
    run(*inputs, out, lse, *descales, *options)
    return out, lse


def refuse_descales(q: Tensor, descales: tuple[Tensor | None, ...], op: str = _NAME) -> None:
    """Other dtypes have no factors."""
    for name, scale in zip(DESCALES, descales, strict=True):
        if scale is not None:
            raise ValueError(
                f"{op}: `{name}` must be None unless `q` is float8_e4m3fn, got a tensor and "
                f"`q` of {dtype_name(q.dtype)}"
            )
