# SPDX-License-Identifier: Apache-2.0
"""The declarations of softmax_online and log_softmax."""

from __future__ import annotations

from tiercel.core.spec import FLOATS, Call, Float, Int, Numerics, Spec, Tensor

_OPTIONS = (Int("dim", -1), Float("scale", None, optional=True))


def _mask(*dtypes: str) -> Tensor:
    return Tensor("mask", "*", dtypes, strided=True, optional=True)


def _spec(name: str, atol: float) -> Spec:
    def check(call: Call) -> None:
        x, dim, mask = call.x, call.dim, call.mask
        if not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"{name}: `dim` must be from {-x.dim()} to {x.dim() - 1}, got {dim} "
                f"for shape {list(x.shape)}"
            )
        if mask is not None:
            sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
            if mask.dim() > x.dim() or any(m not in (1, n) for m, n in sizes):
                raise ValueError(
                    f"{name}: `mask` must broadcast to the shape of `x`, {list(x.shape)}, "
                    f"got {list(mask.shape)}"
                )

    return Spec(
        name,
        Tensor("x", "... N", FLOATS, strided=True),
        *_OPTIONS,
        _mask("bool", "float32", "x"),
        # One rounding to bfloat16, 2**-9, on either side.
        results=[Tensor("out", "... N", "x", rtol=8e-3, atol=atol)],
        check=check,
        limits="last dimension only",
        numerics=Numerics(
            4e-6,
            of="argument",
            sums="float32: lanes, then warps and blocks",
            batch_invariant=False,
            varies="how many threads and blocks share a row, which is chosen by the number of rows",
        ),
    )


def _backward(name: str) -> Spec:
    return Spec(
        f"{name}_backward",
        Tensor("grad", "... N", FLOATS, strided=True),
        Tensor("y", "... N", "grad", strided=True),
        *_OPTIONS,
        _mask("bool"),
        results=[Tensor("x_grad", "... N", "y")],
        gradient_of=name,
    )


SOFTMAX_ONLINE = _spec("softmax_online", 1e-7)
LOG_SOFTMAX = _spec("log_softmax", 1e-5)
BACKWARD = {name: _backward(name) for name in ("softmax_online", "log_softmax")}
