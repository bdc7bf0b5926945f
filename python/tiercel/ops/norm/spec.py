# SPDX-License-Identifier: Apache-2.0
"""The declarations of rms_norm and layer_norm."""

from __future__ import annotations

from typing import Any

from tiercel.core.spec import FLOATS, Bool, DType, Float, Numerics, Spec, Tensor

_PARAMETER = ("x", "float32")


def _norm(name: str, eps: float) -> Spec:
    return Spec(
        name,
        Tensor("x", "... N", FLOATS, strided=True),
        Tensor("weight", "N", _PARAMETER, optional=True),
        Tensor("bias", "N", _PARAMETER, optional=True),
        Tensor("residual", "... N", "x", strided=True, optional=True),
        Float("eps", eps, at_least=0),
        # bfloat16 rounds by 2**-9, the sum with residual first: 2**-9 of what is then normalised.
        results=[
            Tensor("out", "... N", "x", rtol=1.6e-2, atol=2e-2),
            Tensor("residual_out", "... N", "x", rtol=8e-3, atol=8e-3, comes_with="residual"),
        ],
        check=lambda call: _check_columns(name, call.x),
        out_text="with `residual`, ",
        limits="N up to 131072",
        numerics=Numerics(
            4e-6,
            of="terms",
            sums="float32: lanes, then warps and blocks; with a residual, of the rounded sum",
            batch_invariant=False,
            varies="how many threads and blocks share a row, which is chosen by the number of rows",
        ),
    )


def _check_columns(name: str, x: Any) -> None:
    if x.shape[-1] < 1:
        raise ValueError(f"{name}: `x` must have at least 1 column, got {list(x.shape)}")


def _backward(name: str) -> Spec:
    """The gradients of x, weight and bias; those that are not wanted are empty."""
    return Spec(
        f"{name}_backward",
        Tensor("x", "... N", FLOATS, strided=True),
        Tensor("weight", "N", _PARAMETER, optional=True),
        Tensor("grad", "... N", "x", strided=True),
        Tensor("grad_residual", "... N", "x", strided=True, optional=True),
        Bool("weight_grad"),
        Bool("bias_grad"),
        DType("bias_dtype"),
        Float("eps", at_least=0),
        results=[
            Tensor("grad_x", "... N", "x"),
            Tensor("grad_weight", "N", "weight"),
            Tensor("grad_bias", "N", "bias_dtype"),
        ],
        gradient_of=name,
    )


RMS_NORM = _norm("rms_norm", 1e-6)
LAYER_NORM = _norm("layer_norm", 1e-5)
BACKWARD = {spec.name: _backward(spec.name) for spec in (RMS_NORM, LAYER_NORM)}
