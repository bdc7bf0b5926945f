# SPDX-License-Identifier: Apache-2.0
"""The declarations of the activations."""

from __future__ import annotations

from tiercel.core.spec import FLOATS, Call, Dim, Numerics, Scalar, Spec, Str, Tensor

GATED = ("silu_and_mul", "gelu_and_mul", "relu_and_mul")
PLAIN = ("silu", "gelu", "relu")


def _options(name: str) -> tuple[Scalar, ...]:
    return (Str("approximate", "none", choices=("none", "tanh")),) if "gelu" in name else ()


def _check_scale(name: str, call: Call) -> None:
    if call.scale is not None and call.scale.numel() != 1:
        shape = list(call.scale.shape)
        raise ValueError(f"{name}: `scale` must have one element, got shape {shape}")


def _check_halves(name: str, call: Call) -> None:
    if call.up is None and call.x.shape[-1] % 2:
        raise ValueError(
            f"{name}: `x` must have an even last dimension [..., 2N] where there is no `up`, "
            f"got {list(call.x.shape)}"
        )


# Two roundings to bfloat16, 2**-9 each, before and after the product.
def _result(dims: str) -> Tensor:
    with_scale = ("scale", "float8_e4m3fn")
    return Tensor("out", dims, "x", dtype_with=with_scale, rtol=8e-3, atol=1e-5)


_SCALE = Tensor("scale", "*", "float32", strided=True, optional=True)
_X = Tensor("x", "... C", FLOATS, strided=True)
_UP = Tensor("up", "... C", "x", strided=True, optional=True, shape_text="that of `x`")
# Without `up`, x has the gate in its first half and the factor in the second.
_COLUMNS = {"N": Dim("x", -1, divisor=2, unless="up")}


def _gated(name: str) -> Spec:
    def check(call: Call) -> None:
        _check_halves(name, call)
        _check_scale(name, call)

    arguments = (_X, _UP, *_options(name), _SCALE)
    return Spec(
        name,
        *arguments,
        results=[_result("... N")],
        dims=_COLUMNS,
        check=check,
        numerics=Numerics(4e-6, of="argument"),
    )


def _plain(name: str) -> Spec:
    return Spec(
        name,
        Tensor("x", "...", FLOATS, strided=True),
        *_options(name),
        _SCALE,
        results=[_result("...")],
        check=lambda call: _check_scale(name, call),
        numerics=Numerics(4e-6, of="argument"),
    )


def _gated_backward(name: str, again: bool = False) -> Spec:
    """The second result is empty without `up`; the third one is that of the forward, `again`."""

    def check(call: Call) -> None:
        _check_halves(name, call)
        columns = call.x.shape[-1] if call.up is not None else call.x.shape[-1] // 2
        if call.grad.shape[-1] != columns:
            raise ValueError(
                f"{name}: `grad` must have shape [..., N] = {[*call.x.shape[:-1], columns]}, "
                f"got {list(call.grad.shape)}"
            )

    return Spec(
        f"{name}_backward_and_result" if again else f"{name}_backward",
        Tensor("grad", "... N", FLOATS, strided=True),
        Tensor("x", "... C", "grad", strided=True),
        _UP,
        *_options(name),
        results=[
            Tensor("x_grad", "... C", "x"),
            Tensor("up_grad", "*", "x"),
            *[Tensor("out", "... N", "x")] * again,
        ],
        check=check,
        gradient_of=name,
    )


def _plain_backward(name: str) -> Spec:
    return Spec(
        f"{name}_backward",
        Tensor("grad", "...", FLOATS, strided=True),
        Tensor("x", "...", "grad", strided=True),
        *_options(name),
        results=[Tensor("x_grad", "...", "x")],
        gradient_of=name,
    )


SPECS = {name: _gated(name) for name in GATED} | {name: _plain(name) for name in PLAIN}
BACKWARD = {name: _gated_backward(name) for name in GATED}
BACKWARD |= {name: _plain_backward(name) for name in PLAIN}
BACKWARD_AND_RESULT = {name: _gated_backward(name, again=True) for name in GATED}
