# SPDX-License-Identifier: Apache-2.0
"""The operators of one activation: forward, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.eager import empty
from tiercel.core.op import Gradient, Lookup, Native, Op
from tiercel.core.spec import Call
from tiercel.ops._rows import rows
from tiercel.ops.activation import reference as ref
from tiercel.ops.activation import spec
from tiercel.ops.activation.contract import flat_gate

_DESCRIPTION = "16-byte vectors, several in flight a thread"
_METHOD = "torch.nn.functional in float32"


class Activation:
    """A function's operators.

    Args:
        name: The public op.
        functions: The kernels' number of the function (ActivationFunction in activation.h), by the
            option `approximate`; a function without that option has the key None.
    """

    def __init__(self, name: str, functions: dict[str | None, int]) -> None:
        self.name = name
        self._gated = name in spec.GATED
        self._has_option = None not in functions
        self._functions = functions
        self._function: Any = functions.get(None, Lookup("approximate", functions))
        self.forward = Op(
            spec.SPECS[name],
            sm90=Native(
                _C.activation,
                _C.activation_plan,
                ("x", "up", "scale", "out", self._function, self._gated),
                _DESCRIPTION,
                load=self._load,
                contiguous=("x", "up"),
                launch=self._launch,
            ),
            reference=self._reference,
            method=_METHOD,
            gradient=Gradient(self._save, self._gradients),
            plugin=lambda backend, call: flat_gate(backend, call, self._gated),
        )
        self._backward = self._gradient(spec.BACKWARD[name], again=False)
        if self._gated:
            # A layer that does not keep the result needs this in its backward.
            self._gradient(spec.BACKWARD_AND_RESULT[name], again=True)

    def _gradient(self, declared: spec.Spec, again: bool) -> Op:
        return Op(
            declared,
            sm90=Native(
                partial(self._run_backward, again),
                lambda *args: {},  # it takes all
                declared.names,
                _DESCRIPTION,
                returns=True,
            ),
            reference=partial(self._reference_backward, again),
            method=_METHOD,
            out=False,
            fake=partial(self._empty_gradients, again),
        )

    def _load(self, device: int) -> None:
        for function in self._functions.values():
            _C.activation_load(device, function, self._gated)

    def _options(self, call: Any) -> dict[str, str]:
        return {"approximate": call.approximate} if self._has_option else {}

    def _number(self, call: Call) -> int:
        return self._functions.get(getattr(call, "approximate", None), -1)

    def _launch(self, native: Callable[..., Any], call: Call) -> Any:
        up = getattr(call, "up", None)
        tensors = (rows(call.x), None if up is None else rows(up), call.scale, call.out)
        return native(*tensors, self._number(call), self._gated)

    def _refuse_float8(self, call: Call) -> None:
        if call.scale is not None:
            raise RuntimeError(
                f"{self.name}: there is no derivative for a float8 result, but a tensor "
                "requires grad"
            )

    def _reference(self, call: Call) -> Tensor:
        if torch.is_grad_enabled() and call.x.requires_grad:  # inside torch.func.grad
            self._refuse_float8(call)
        inputs = (call.x, call.up) if self._gated else (call.x,)
        result: Tensor = getattr(ref, self.name)(*inputs, scale=call.scale, **self._options(call))
        return result

    # -- the gradient ------------------------------------------------------------------------------

    def _save(self, ctx: Any, call: Call, result: Tensor) -> None:
        self._refuse_float8(call)
        ctx.approximate, ctx.backend = getattr(call, "approximate", None), call.backend
        ctx.save_for_backward(call.x, getattr(call, "up", None))

    def _gradients(self, ctx: Any, grad: Tensor | None) -> dict[str, Tensor | None]:
        x, up = ctx.saved_tensors
        if grad is None:
            return {}
        if torch.is_grad_enabled():  # of a gradient: PyTorch's formulas can be differentiated again
            inputs = {"x": x} if up is None else {"x": x, "up": up}
            wanted = {name: t for name, t in inputs.items() if t.requires_grad}
            result = getattr(ref, self.name)(*inputs.values(), **self._options(ctx))
            found = torch.autograd.grad(result, tuple(wanted.values()), grad, create_graph=True)
            return dict(zip(wanted, found, strict=True))
        options = (*self._options(ctx).values(), ctx.backend)
        if not self._gated:
            return {"x": self._backward(grad, x, *options)}
        x_grad, up_grad = self._backward(grad, x, up, *options)
        return {"x": x_grad, "up": None if up is None else up_grad}

    def _empty_gradients(self, again: bool, call: Call) -> Any:
        x_grad = call.x.new_empty(call.x.shape)
        if not self._gated:
            return x_grad
        up_grad = call.x.new_empty(0 if call.up is None else call.up.shape)
        return (x_grad, up_grad, call.x.new_empty(call.grad.shape)) if again else (x_grad, up_grad)

    # Positional arguments: the generic path from a declaration takes longer than the launch.
    def _run_backward(self, again: bool, grad: Tensor, x: Tensor, *rest: Any) -> Any:
        up, *option = rest if self._gated else (None, *rest)
        x_grad = empty(x, tuple(x.shape), x.dtype)
        up_grad = None if up is None else empty(x, tuple(up.shape), x.dtype)
        out = empty(x, tuple(grad.shape), x.dtype) if again else None
        _C.activation_backward(
            rows(grad),
            rows(x),
            None if up is None else rows(up),
            x_grad,
            up_grad,
            out,
            self._functions.get(option[0] if option else None, -1),
            self._gated,
        )
        if not self._gated:
            return x_grad
        if up_grad is None:
            up_grad = empty(x, (0,), x.dtype)
        return (x_grad, up_grad) if out is None else (x_grad, up_grad, out)

    def _reference_backward(self, again: bool, call: Call) -> Any:
        approximate = getattr(call, "approximate", None)
        up = getattr(call, "up", None)
        found = ref.backward(self.name, call.grad, call.x, up, approximate)
        if self._gated and up is None:
            found = (*found, call.x.new_empty(0))
        if again:
            found = (*found, getattr(ref, self.name)(call.x, up, **self._options(call)))
        return found
