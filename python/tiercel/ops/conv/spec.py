# SPDX-License-Identifier: Apache-2.0
"""The declarations of causal_conv1d."""

from __future__ import annotations

import math
from typing import Any

from tiercel.core.spec import FLOATS, Call, Numerics, Spec, Str, Tensor

WIDTHS = (2, 3, 4)

_WEIGHT = Tensor("weight", "D W", "x")
_BIAS = Tensor("bias", "D", "x", optional=True)
_STARTS = Tensor("cu_seqlens", "B1", "int32", strided=True, optional=True, shape_text="[N + 1]")
_ACTIVATION = Str("activation", None, optional=True, choices=("silu",))


def _check_width(op: str, call: Call) -> None:
    width = call.weight.shape[1]
    if width not in WIDTHS:
        raise ValueError(f"{op}: `weight` must have 2, 3 or 4 taps [D, W], got {width}")


def _check_starts(op: str, call: Call) -> None:
    if call.cu_seqlens is None:
        return
    if call.cu_seqlens.shape[0] == 0:
        raise ValueError(f"{op}: `cu_seqlens` must have at least one element, got none")
    if any(size != 1 for size in call.x.shape[:-2]):
        raise ValueError(
            f"{op}: `x` must have shape [1, T, D] with `cu_seqlens`, got {list(call.x.shape)}"
        )


def _check(call: Call) -> None:
    _check_width("causal_conv1d", call)
    _check_starts("causal_conv1d", call)


def _sequences(call: Call) -> Any:
    """The number of sequences of an update."""
    if call.cu_seqlens is None:
        return call.x.shape[0]
    return call.cu_seqlens.shape[0] - 1 if call.cu_seqlens.dim() == 1 else None


def _inputs(call: Call) -> Any:
    """The number of inputs in a state."""
    return call.weight.shape[1] - 1 if call.weight.dim() == 2 else None


def _check_update(call: Call) -> None:
    _check_width("causal_conv1d_update", call)
    _check_starts("causal_conv1d_update", call)


# Sums of at most five products in float32, rounded to bfloat16 (2**-9); silu is approximate.
_OUT = {"rtol": 1e-2, "atol": 1e-5}

CAUSAL_CONV1D = Spec(
    "causal_conv1d",
    Tensor("x", "... T D", FLOATS, strided=True),
    _WEIGHT,
    _BIAS,
    _STARTS,
    _ACTIVATION,
    results=[Tensor("out", "... T D", "x", strided=True, **_OUT)],
    check=_check,
    limits="D a multiple of 4",
    numerics=Numerics(4e-6, of="terms", sums="float32: taps in order"),
)

CAUSAL_CONV1D_UPDATE = Spec(
    "causal_conv1d_update",
    Tensor("x", "B T D", FLOATS, strided=True),
    Tensor("states", "slots W1 D", "x", True, written=True, shape_text="[slots, W - 1, D]"),
    _WEIGHT,
    Tensor("out", "B T D", "x", strided=True, written=True),
    _BIAS,
    Tensor("state_indices", "N", "int32", optional=True, shape_text="[N]"),
    Tensor("has_state", "N", "bool", optional=True, shape_text="[N]"),
    _STARTS,
    _ACTIVATION,
    dims={"N": _sequences, "W1": _inputs},
    check=_check_update,
    limits="D a multiple of 4, contiguous states",
    numerics=Numerics(4e-6, of="terms", sums="float32: taps in order"),
)

# A thread's four channels, and enough of them for the GPU, each with at least 16 rows.
_THREADS, _LEAST_ROWS, _CHANNELS = 132 * 1024, 16, 4


def parts(call: Call) -> Any:
    """Into how many parts of the rows the gradients of weight and bias are summed."""
    *outer, columns = call.x.shape
    rows = math.prod(outer)
    wanted = _THREADS * _CHANNELS // max(columns, 1)
    return min(-(-rows // _LEAST_ROWS), max(wanted, 1))


CAUSAL_CONV1D_BACKWARD = Spec(
    "causal_conv1d_backward",
    Tensor("grad", "... T D", "x", strided=True),
    Tensor("x", "... T D", FLOATS, strided=True),
    _WEIGHT,
    _BIAS,
    _STARTS,
    _ACTIVATION,
    results=[
        Tensor("dx", "... T D", "x", strided=True),
        Tensor(
            "sums",
            "*",
            "float32",
            shape=lambda call: (parts(call), call.weight.shape[1] + 1, call.x.shape[-1]),
        ),
    ],
    gradient_of="causal_conv1d",
)
