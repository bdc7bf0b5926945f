# SPDX-License-Identifier: Apache-2.0
"""The operators of linear_act and gated_linear, and what launches their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from tiercel import _C
from tiercel.core.op import Gradient, Lookup, Native, Op
from tiercel.core.spec import Call
from tiercel.ops.linear import backward, spec
from tiercel.ops.linear import reference as ref
from tiercel.ops.linear.contract import call_backend, call_backend_twice

# Precompiled, as Activation in linear_act.h counts; the others are compiled where they are used, if
# TIERCEL_JIT=1 allows that.
INDEX = {"none": 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4}

_DESCRIPTION = "TMA and wgmma with a fused epilogue; split K within a cluster for few rows"
_METHOD = "torch.nn.functional.linear and the activation"


def as_matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def two_rows(call: Call) -> dict[str, Any]:
    """They show the strides."""
    residual = getattr(call, "residual", None)
    return {
        "x": as_matrix(call.x)[:2],
        **({} if residual is None else {"residual": as_matrix(residual)[:2]}),
    }


def _matrices(call: Call) -> Call:
    """The call with its batch dimensions joined to one."""
    names = ("x", "residual", "out", "preactivation")
    given = {name: getattr(call, name, None) for name in names}
    joined = {name: as_matrix(tensor) for name, tensor in given.items() if tensor is not None}
    if "residual" in joined:
        joined["residual"] = joined["residual"].contiguous()
    return Call(**{**call.__dict__, **joined})


# -- linear_act ------------------------------------------------------------------------------------


def _launch(native: Callable[..., Any], call: Call) -> Any:
    call = _matrices(call)
    if call.activation not in INDEX:
        return _launch_compiled(call, plans=native is _C.linear_act_plan)
    return LINEAR_ACT.launch(native, call)


def _launch_with_preactivation(native: Callable[..., Any], call: Call) -> Any:
    if call.activation != "none":
        return _launch(native, call)
    # The kernels refuse to write the same values twice.
    given = dict(call.__dict__)
    preactivation = given.pop("preactivation")
    plan = _launch(native, Call(**given))
    return plan or _launch(native, Call(**{**given, "residual": None, "out": preactivation}))


def _launch_compiled(call: Call, plans: bool) -> Any:
    """An activation that is not precompiled, with the tiles that another one would have."""
    from tiercel.jit.cute_kernel import variant, why_not

    x, weight, bias, residual, out = call.x, call.weight, call.bias, call.residual, call.out
    spec.LINEAR_ACT.check_value("activation", call.activation)
    missing = why_not()
    if missing is not None:
        raise NotImplementedError(f"linear_act: `activation` {call.activation!r}: {missing}")
    preactivation = getattr(call, "preactivation", None)
    index = INDEX["silu"]
    plan = _C.linear_act_plan(x, weight, bias, residual, out, preactivation, index)
    if plans:
        return plan | {"kernel": "compiled here (TIERCEL_JIT)"}
    if plan["kernel"] == "none":
        return None
    kernel = variant(
        "linear",
        "linear_cute",
        dtype={"torch.bfloat16": "bf16", "torch.float16": "fp16"}[str(x.dtype)],
        act=call.activation,
        tile_m=plan["tile_m"],
        tile_n=plan["tile_n"],
        pingpong=plan["pingpong"],
        split_k=plan["rows"] > 0,
        kind="plain" if residual is None and preactivation is None else "extra",
    )
    kernel(
        # A split-K kernel loads only the rows of its tile.
        boxes={"x": (plan["rows"], 64)} if plan["rows"] else None,
        x=x,
        w=weight,
        bias=bias,
        residual=residual,
        y=out,
        # A null pointer in a split-K kernel; the others have a map, and a flag beside it.
        sums=out if preactivation is None and not plan["rows"] else preactivation,
        m=x.shape[0],
        n=weight.shape[0],
        k=x.shape[1],
        group=plan["group"],
        save=int(preactivation is not None),
        x_scale=None,
        w_scale=None,
        x_step=0,
        w_step=0,
        rows=plan["rows"],
        splits=plan["splits"],
        blocks=plan["grid"],
    )
    return None


def _reference(call: Call) -> Tensor:
    return ref.linear_act(
        call.x, call.weight, call.bias, activation=call.activation, residual=call.residual
    )


def _reference_with_preactivation(call: Call) -> tuple[Tensor, Tensor]:
    return _reference(call), ref.linear_act(call.x, call.weight, call.bias, activation="none")


_INDEX = Lookup("activation", INDEX)
_SM90 = Native(
    _C.linear_act,
    _C.linear_act_plan,
    ("x", "weight", "bias", "residual", "out", "preactivation", _INDEX),
    _DESCRIPTION,
    "cute",
    load=_C.linear_act_load,
    contiguous=("residual",),
    ranks={"x": 2},
    launch=_launch,
    sample=two_rows,
)

LINEAR_ACT = Op(
    spec.LINEAR_ACT,
    sm90=_SM90,
    reference=_reference,
    method=_METHOD,
    gradient=Gradient(backward.save, partial(backward.gradients, False)),
    plugin=call_backend,
)

LINEAR_ACT_PREACTIVATION = Op(
    spec.LINEAR_ACT_PREACTIVATION,
    # There is no direct call if a gradient is wanted.
    sm90=replace(_SM90, load=None, launch=_launch_with_preactivation, direct=False),
    reference=_reference_with_preactivation,
    method=_METHOD,
    gradient=Gradient(backward.save, partial(backward.gradients, False)),
    out=False,
    plugin=call_backend_twice,
)


# -- gated_linear ----------------------------------------------------------------------------------

GATED_LINEAR = Op(
    spec.GATED_LINEAR,
    sm90=Native(
        _C.gated_linear,
        _C.gated_linear_plan,
        ("x", "weight", "bias", "out", _INDEX),
        _DESCRIPTION,
        "cute",
        ranks={"x": 2},
        launch=lambda native, call: GATED_LINEAR.launch(native, _matrices(call)),
        sample=two_rows,
    ),
    reference=lambda call: ref.gated_linear(
        call.x, call.weight, call.bias, activation=call.activation
    ),
    method=_METHOD,
    gradient=Gradient(backward.save, partial(backward.gradients, True)),
)


def _launch_gated_fp8(native: Callable[..., Any], call: Call) -> Any:
    call = _matrices(call)
    call.x_scale = as_matrix(call.x_scale)
    call.weight_scale = call.weight_scale.contiguous()
    return GATED_LINEAR_FP8.launch(native, call)


GATED_LINEAR_FP8 = Op(
    spec.GATED_LINEAR_FP8,
    sm90=Native(
        _C.gated_linear_fp8,
        _C.gated_linear_fp8_plan,
        ("x", "weight", "x_scale", "weight_scale", "bias", "out", _INDEX),
        "TMA and wgmma; each 128 of K is scaled into float32 sums, gated in the epilogue",
        "cute",
        ranks={"x": 2},
        launch=_launch_gated_fp8,
        sample=lambda call: {**two_rows(call), "x_scale": as_matrix(call.x_scale)[:2]},
    ),
    reference=lambda call: ref.gated_linear_fp8(
        call.x, call.weight, call.x_scale, call.weight_scale, call.bias, activation=call.activation
    ),
    method=_METHOD,
)
