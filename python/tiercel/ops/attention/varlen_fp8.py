# SPDX-License-Identifier: Apache-2.0
"""attention_varlen of float8_e4m3fn: the operators behind it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Backend, Op
from tiercel.core import platform
from tiercel.core.platform import Reason
from tiercel.ops.attention.backward import native_options
from tiercel.ops.attention.checks import FLOAT8, OPTIONS, check_packed, no_tiles
from tiercel.ops.attention.fp8 import DESCALES, check_descales
from tiercel.ops.attention.indices import packed_indices
from tiercel.ops.attention.reference import attention_varlen as reference

_NAME = "attention_varlen"

# The operators' arguments: q, k, v, both cu_seqlens, both max_seqlens; three descales; causal,
# window, scale, softcap; the backend.


def _check(*args: Any) -> None:
    check_packed(*args[:7], dtypes=(FLOAT8,))
    q, k, starts = args[0], args[1], args[3]
    check_descales(_NAME, q, (starts.shape[0] - 1, k.shape[1]), args[7:10])


def _outputs(q: Tensor, lse: bool) -> tuple[Tensor, Tensor | None]:
    sums = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    return torch.empty(q.shape, dtype=torch.bfloat16, device=q.device), sums if lse else None


def _native(outputs: tuple[Tensor, Tensor | None], workspace: Tensor | None, *args: Any) -> Any:
    options = native_options(args[0], *args[10:14])
    return (*args[:3], *outputs, *args[7:10], workspace, *options, *args[3:7])


def _run(lse: bool, *args: Any) -> Any:
    outputs = _outputs(args[0], lse)
    if no_tiles(*args):
        _check(*args)
        outputs[0].zero_()
        if outputs[1] is not None:
            outputs[1].fill_(-math.inf)
    else:
        plan = _C.attention_varlen_fp8_plan(*_native(outputs, None, *args))
        workspace = torch.empty(plan["workspace"], dtype=torch.uint8, device=args[0].device)
        _C.attention_varlen_fp8(*_native(outputs, workspace, *args))
    return outputs if lse else outputs[0]


def _plan(*args: Any) -> dict[str, Any]:
    return dict(_C.attention_varlen_fp8_plan(*_native(_outputs(args[0], False), None, *args)))


def _why_not(*args: Any) -> Reason | None:
    reason = platform.why_not(args[0].device)
    if reason is not None or no_tiles(*args):
        return reason
    try:
        _plan(*args)
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{_NAME}: "))
    return None


def _reference(lse: bool, *args: Any) -> Any:
    names = (*DESCALES, "causal", "window", "scale", "softcap")
    return reference(*args[:7], **dict(zip(names, args[7:14], strict=True)), return_lse=lse)


_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, "
    f"{', '.join(f'Tensor? {name}=None' for name in DESCALES)}, {OPTIONS}) -> "
)


def _operator(lse: bool) -> Op:
    return Op(
        f"{_NAME}_fp8{'_lse' if lse else ''}",
        _SCHEMA + ("(Tensor, Tensor)" if lse else "Tensor"),
        check=_check,
        fake=lambda q, *_: _outputs(q, lse) if lse else _outputs(q, lse)[0],
        sm90=Backend(
            "sm90",
            lambda *args: _run(lse, *args[:-1]),
            "as attention's of float8_e4m3fn; tensor maps that end where a sequence does",
            "cute",
            why_not=_why_not,
        ),
        ref=Backend(
            "ref",
            lambda *args: _reference(lse, *args[:-1]),
            "one sequence after the other, all scores of it in memory, float32",
            "torch",
        ),
        family=_NAME,
        indices=packed_indices,
        describe=_plan,
        load=None if lse else _C.attention_fp8_load,
    )


_OPERATORS = (_operator(False), _operator(True))


def attention_varlen_fp8(
    inputs: tuple[Any, ...],
    descales: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    return_lse: bool,
) -> Any:
    """What :func:`tiercel.attention_varlen` does for float8_e4m3fn; `options` ends with the
    backend."""
    return _OPERATORS[return_lse](*inputs, *descales, *options)
