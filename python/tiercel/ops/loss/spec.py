# SPDX-License-Identifier: Apache-2.0
"""The declarations of cross_entropy and linear_cross_entropy."""

from __future__ import annotations

from dataclasses import replace

from tiercel.core.spec import FLOATS, INDICES, Bool, Call, DType, Float, Int, Numerics, Spec, Tensor


def _check(call: Call) -> None:
    if call.logits.shape[1] == 0:
        raise ValueError("cross_entropy: `logits` must have at least 1 column, got 0")
    _check_options("cross_entropy", call.logits.shape[0], call)


def _check_linear(call: Call) -> None:
    if call.weight.shape[0] == 0:
        raise ValueError("linear_cross_entropy: `weight` must have at least 1 row, got 0")
    _check_options("linear_cross_entropy", call.x.shape[0], call)


def _check_entropy(call: Call) -> None:
    _check_linear(call)
    if call.label_smoothing:
        raise ValueError(
            "linear_cross_entropy: `label_smoothing` must be 0 with `return_entropy`, "
            f"got {call.label_smoothing}"
        )


def _check_options(op: str, rows: int, call: Call) -> None:
    scale = call.scale
    if scale is not None and tuple(scale.shape) not in ((1,), (rows,)):
        raise ValueError(
            f"{op}: `scale` must have shape [1] or [T] = [{rows}], got {list(scale.shape)}"
        )
    if call.label_smoothing > 1:
        raise ValueError(f"{op}: `label_smoothing` must be from 0 to 1, got {call.label_smoothing}")
    if call.softcap is not None and not 0 < call.softcap < float("inf"):
        raise ValueError(f"{op}: `softcap` must be a positive number or None, got {call.softcap}")


_OPTIONS = (
    Int("ignore_index", -100),
    Float("label_smoothing", 0.0, at_least=0),
    Float("z_loss", 0.0, at_least=0),
    Float("softcap", None, optional=True),
)

CROSS_ENTROPY = Spec(
    "cross_entropy",
    Tensor("logits", "T V", FLOATS, strided=True),
    Tensor("target", "T", INDICES, strided=True),
    Tensor("weight", "V", ("float32", "logits"), optional=True),
    Tensor("scale", "*", "float32", strided=True, optional=True),
    *_OPTIONS,
    results=[Tensor("loss", "T", "float32", rtol=1e-5, atol=1e-5)],
    check=_check,
    limits="V up to 442365 (float32) or 884729",
    numerics=Numerics(
        4e-6,
        of="terms",
        sums="float32: lanes, then warps and blocks",
        batch_invariant=False,
        varies="how many blocks share a row, which is chosen by the number of rows",
    ),
)

# The loss and its gradient in one pass.
WITH_GRADIENT = CROSS_ENTROPY.changed(
    name="cross_entropy_with_gradient",
    results=[*CROSS_ENTROPY.results, Tensor("grad", "T V", "logits")],
    gradient_of="cross_entropy",
)

# Cross-entropy whose gradient overwrites the logits.
IN_PLACE = CROSS_ENTROPY.changed(
    name="cross_entropy_",
    arguments=(replace(CROSS_ENTROPY.tensors[0], written=True), *CROSS_ENTROPY.arguments[1:]),
    gradient_of="cross_entropy",
)

# 1 / (the sum of the weights of the targets that count), which makes a mean of a sum.
# The kernel reads no logits; their shape gives the number of classes.
MEAN = Spec(
    "cross_entropy_mean_scale",
    *CROSS_ENTROPY.tensors[:3],
    Int("ignore_index", -100),
    results=[Tensor("scale", "1", "float32")],
    gradient_of="cross_entropy",
)

# The logits are rounded to the dtype of x, and two products may round one of them differently: by
# 2**-8 of its size in bfloat16.
LINEAR = Spec(
    "linear_cross_entropy",
    Tensor("x", "T H", FLOATS, strided=True),
    Tensor("weight", "V H", "x", strided=True),
    Tensor("target", "T", INDICES, strided=True),
    Tensor("bias", "V", "x", strided=True, optional=True),
    Tensor("class_weight", "V", ("float32", "x"), optional=True),
    Tensor("scale", "*", "float32", strided=True, optional=True),
    *_OPTIONS,
    DType("accum_dtype", None, optional=True, choices=("float32", "x")),
    results=[Tensor("loss", "T", "float32", rtol=2**-8, atol=2**-5)],
    check=_check_linear,
    limits="as `cross_entropy`",
    numerics=Numerics(
        2**-8,
        of="terms",
        sums="logits rounded to the dtype, then as `cross_entropy`",
        batch_invariant=False,
        varies="the chunks of rows, and what `linear_act` depends on",
    ),
)


def _gradient(of: str) -> Tensor:
    """The gradient of an argument; it has no elements where there is none to compute."""

    def shape(call: Call) -> tuple[int, ...]:
        argument = getattr(call, of)
        return (
            tuple(argument.shape) if getattr(call, f"for_{of}") and argument is not None else (0,)
        )

    # PyTorch can be told that `weight.grad` is float32.
    instead = ("weight_grad_dtype", "float32") if of == "weight" else None
    return Tensor(f"grad_{of}", "*", "x", shape=shape, dtype_with=instead)


# The sum of the losses, divided by the sum of the targets' weights for a mean, and its gradients.
LINEAR_WITH_GRADIENT = LINEAR.changed(
    name="linear_cross_entropy_with_gradient",
    arguments=(
        *LINEAR.arguments,
        Bool("mean", False),
        *(Bool(f"for_{name}", True) for name in ("x", "weight", "bias")),
        DType("weight_grad_dtype", None, optional=True, choices=("float32",)),
    ),
    results=[
        Tensor("loss", "", "float32"),
        *(_gradient(name) for name in ("x", "weight", "bias")),
    ],
    gradient_of="linear_cross_entropy",
)

_ENTROPY = Tensor("entropy", "T", "float32", rtol=2**-8, atol=2**-5)

# The entropies of the rows' distributions, too.
LINEAR_AND_ENTROPY = LINEAR.changed(
    name="linear_cross_entropy_and_entropy",
    results=[*LINEAR.results, _ENTROPY],
    check=_check_entropy,
    gradient_of="linear_cross_entropy",
)

# `entropy_scale` is the gradient of the entropies.
LINEAR_AND_ENTROPY_WITH_GRADIENT = LINEAR_WITH_GRADIENT.changed(
    name="linear_cross_entropy_and_entropy_with_gradient",
    arguments=(
        *LINEAR_WITH_GRADIENT.arguments,
        Tensor("entropy_scale", "T", "float32", strided=True, optional=True),
    ),
    results=[*LINEAR_WITH_GRADIENT.results, _ENTROPY],
    check=_check_entropy,
)
