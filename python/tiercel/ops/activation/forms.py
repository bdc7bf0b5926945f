# SPDX-License-Identifier: Apache-2.0
"""What the activations' operators share: one class declares all forms of a function.

A schema's tensors come first and none is optional, so that autograd and subclasses see all of
them: each combination of up, scale and out is an operator of its own, made from one table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiercel import _C
from tiercel._launcher import Argument, Choice, Like, Output, launcher
from tiercel._op import Autograd, Backend, Op
from tiercel.core import platform
from tiercel.core.checks import check_contiguous, check_dtype, check_same_device, check_shape
from tiercel.core.eager import empty
from tiercel.core.platform import Reason
from tiercel.ops._rows import rows
from tiercel.ops.activation import reference as ref

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn

_CUDA = ("16-byte vectors, several in flight a thread", "cuda")
_TORCH = ("torch.nn.functional in float32", "torch")


class Form(NamedTuple):
    """Which tensors an operator takes beside x."""

    up: bool = False
    scale: bool = False
    out: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, there in zip(self._fields, self, strict=True) if there)


class Activation:
    """A function's operators in all forms.

    Args:
        name: The public operator.
        gated: Whether the result is multiplied by a second factor.
        indices: The kernels' index of the function (ActivationFunction in activation.h), by the
            option `approximate`; a function without that option has the key None.
        reference: Its reference.
    """

    def __init__(
        self,
        name: str,
        *,
        gated: bool,
        indices: dict[str | None, int],
        reference: Callable[..., Tensor],
    ) -> None:
        self.name = name
        self._gated = gated
        self._indices = indices
        self._has_option = None not in indices
        self._reference = reference
        flags = (False, True)
        ups = flags if gated else (False,)
        self._forward = {
            (u, s, o): self._declare(Form(u, s, o)) for u in ups for s in flags for o in flags
        }
        self._backward = {up: self._declare_backward(up) for up in ups}

    @property
    def main(self) -> Op:
        """The operator that stands for all of them."""
        return self._forward[self._gated, False, False]

    def __call__(
        self,
        x: Tensor,
        up: Tensor | None,
        scale: Tensor | None,
        out: Tensor | None,
        *options: str | None,
    ) -> Tensor:
        """`options`: approximate, where the function has it, and the backend."""
        tensors = (x,) if up is None else (x, up)
        if scale is not None:
            if torch.is_grad_enabled() and any(getattr(t, "requires_grad", 0) for t in tensors):
                raise RuntimeError(
                    f"{self.name}: there is no derivative for a float8 result, but a tensor "
                    "requires grad"
                )
            tensors = (*tensors, scale)
        op = self._forward[up is not None, scale is not None, out is not None].pick()
        if out is None:
            result: Tensor = op(*tensors, *options)
            return result
        op(*tensors, out, *options)
        return out

    def _operator_name(self, form: Form) -> str:
        packed = ["packed"] if self._gated and not form.up else []
        parts = [*packed, *(["fp8"] if form.scale else []), *(["out"] if form.out else [])]
        return "_".join([self.name, *parts])

    def _schema(self, tensors: str, result: str) -> str:
        option = "str approximate='none', " if self._has_option else ""
        return f"({tensors}, {option}str? backend=None) -> {result}"

    # -- what was called ---------------------------------------------------------------------------

    def _split(self, form: Form, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """(x, up or None, scale or None, out or None, approximate or None)."""
        rest = list(args[1:])
        found = [rest.pop(0) if there else None for there in form]
        return args[0], *found, rest[0] if self._has_option else None

    def _index(self, approximate: str | None) -> int:
        index = self._indices.get(approximate)
        if index is None:
            known = " or ".join(repr(name) for name in self._indices)
            raise ValueError(f"{self.name}: `approximate` must be {known}, got {approximate!r}")
        return index

    def _columns(self, x: Tensor, up: Tensor | None) -> int:
        columns = x.shape[-1] if x.dim() else 1
        return columns // 2 if self._gated and up is None else columns

    def _check(
        self,
        x: Tensor,
        up: Tensor | None,
        scale: Tensor | None,
        out: Tensor | None,
        approximate: str | None,
    ) -> None:
        name = self.name
        check_dtype(name, "x", x.dtype, _DTYPES)
        if self._gated and up is None and (x.dim() == 0 or x.shape[-1] % 2):
            raise ValueError(
                f"{name}: `x` must have an even last dimension [..., 2N] where there is no `up`, "
                f"got {list(x.shape)}"
            )
        if up is not None:
            check_dtype(name, "up", up.dtype, (x.dtype,))
            check_shape(name, "up", up, x.shape, "that of `x`")
            check_same_device(name, "up", up, "x", x)
        if scale is not None:
            check_dtype(name, "scale", scale.dtype, (torch.float32,))
            if scale.numel() != 1:
                raise ValueError(
                    f"{name}: `scale` must have one element, got shape {list(scale.shape)}"
                )
            check_same_device(name, "scale", scale, "x", x)
        if out is not None:
            check_dtype(name, "out", out.dtype, (x.dtype if scale is None else FLOAT8,))
            shape = (*x.shape[:-1], self._columns(x, up)) if x.dim() else ()
            check_shape(name, "out", out, shape, "[..., N]")
            check_same_device(name, "out", out, "x", x)
            check_contiguous(name, "out", out)
        self._index(approximate)

    def _empty(self, x: Tensor, up: Tensor | None, scale: Tensor | None) -> Tensor:
        dtype = x.dtype if scale is None else FLOAT8
        if not self._gated or up is not None:
            return torch.empty(x.shape, dtype=dtype, device=x.device)
        return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=dtype, device=x.device)

    # -- forward -----------------------------------------------------------------------------------

    def _launch(
        self,
        x: Tensor,
        up: Tensor | None,
        scale: Tensor | None,
        out: Tensor,
        approximate: str | None,
    ) -> None:
        index = self._indices.get(approximate, -1)
        up = None if up is None else rows(up)
        _C.activation(rows(x), up, scale, out, index, self._gated)

    def _plan(self, form: Form, args: tuple[Any, ...]) -> dict[str, Any]:
        x, up, scale, out, approximate = self._split(form, args)
        index = self._index(approximate)
        out = self._empty(x, up, scale) if out is None else out
        up = None if up is None else rows(up)
        return dict(_C.activation_plan(rows(x), up, scale, out, index, self._gated))

    def _declare(self, form: Form) -> Op:
        split, launch = self._split, self._launch
        packed = self._gated and not form.up

        def sm90(*args: Any) -> Any:
            x, up, scale, out, approximate = split(form, args)
            if form.out:
                return launch(x, up, scale, out, approximate)
            sizes = x.shape
            if packed:
                if not sizes or sizes[-1] % 2:
                    self._check(x, up, scale, out, approximate)  # raises
                sizes = (*sizes[:-1], sizes[-1] // 2)
            out = empty(x, tuple(sizes), x.dtype if scale is None else FLOAT8)
            launch(x, up, scale, out, approximate)
            return out

        count = 1 + sum(form) + self._has_option + 1
        x, up, scale, out, approximate = split(form, tuple(map(Argument, range(count))))
        index = Choice(approximate, self._indices) if self._has_option else self._indices[None]
        made = (Like(x, 2 if packed else 1, FLOAT8 if form.scale else None),)
        run = launcher(
            _C.activation,
            (x, up, scale, out if form.out else Output(0), index, self._gated),
            count=count,
            dense=(x, up) if form.up else (x,),
            outputs=() if form.out else made,
            otherwise=sm90,
        )

        def reference(*args: Any) -> Any:
            x, up, scale, out, approximate = split(form, args)
            options = {"approximate": approximate} if self._has_option else {}
            inputs = (x, up) if self._gated else (x,)
            result = self._reference(*inputs, scale=scale, **options).contiguous()
            if not form.out:
                return result
            out.copy_(result)
            return None

        def fake(*args: Any) -> Any:
            return None if form.out else self._empty(*split(form, args)[:3])

        def save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
            x, up, _, _, ctx.approximate = split(form, args)
            ctx.backend = args[-1]
            ctx.save_for_backward(x, *([up] if form.up else []))

        def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
            return self._gradients(ctx, grad)

        out = ["Tensor(a!) out"] if form.out else []
        tensors = ["Tensor x", *(f"Tensor {name}" for name in form.names if name != "out"), *out]
        differentiable = not (form.scale or form.out)
        is_main = form == Form(up=self._gated)
        return Op(
            self._operator_name(form),
            self._schema(", ".join(tensors), "()" if form.out else "Tensor"),
            check=lambda *args: self._check(*split(form, args)),
            fake=fake,
            sm90=Backend("sm90", run, *_CUDA, why_not=lambda *args: _why_not(args[0])),
            ref=Backend("ref", reference, *_TORCH),
            autograd=Autograd(save, backward) if differentiable else None,
            family=self.name,
            describe=lambda *args: self._plan(form, args),
            load=self._load if is_main else None,
        )

    def _load(self, device: int) -> None:
        for index in self._indices.values():
            _C.activation_load(device, index, self._gated)

    # -- backward ----------------------------------------------------------------------------------

    def _gradients(self, ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if grad is None:
            return (None,) * len(inputs)
        options = (ctx.approximate,) if self._has_option else ()
        if torch.is_grad_enabled():  # of a gradient: PyTorch's formulas can be differentiated again
            named = {"approximate": ctx.approximate} if self._has_option else {}
            wanted = [t for t in inputs if t.requires_grad]
            result = self._reference(*inputs, **named)
            found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True))
            return tuple(next(found) if t.requires_grad else None for t in inputs)
        op = self._backward[len(inputs) == 2]
        grads = op(grad, *inputs, *options, ctx.backend)
        return grads if isinstance(grads, tuple) else (grads,)

    def _declare_backward(self, pair: bool) -> Op:
        def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
            grad, x, *rest = args
            up = rest.pop(0) if pair else None
            return grad, x, up, rest[0] if self._has_option else None

        def check(*args: Any) -> None:
            grad, x, up, approximate = split(args)
            self._check(x, up, None, None, approximate)
            check_dtype(self.name, "grad", grad.dtype, (x.dtype,))
            shape = (*x.shape[:-1], self._columns(x, up)) if x.dim() else ()
            check_shape(self.name, "grad", grad, shape, "[..., N]")
            check_same_device(self.name, "grad", grad, "x", x)

        def fake(*args: Any) -> Any:
            _, x, up, _ = split(args)
            made = [
                torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, up)[: 1 + pair]
            ]
            return tuple(made) if pair else made[0]

        def sm90(*args: Any) -> Any:
            grad, x, up, approximate = split(args)
            made = fake(*args)
            x_grad, up_grad = made if pair else (made, None)
            index = self._indices.get(approximate, -1)
            up = None if up is None else rows(up)
            _C.activation_backward(rows(grad), rows(x), up, x_grad, up_grad, index, self._gated)
            return made

        def reference(*args: Any) -> Any:
            grad, x, up, approximate = split(args)
            grads = ref.backward(self.name, grad, x, up, approximate)
            found = [g.contiguous() for g in grads]
            return tuple(found) if pair else found[0]

        packed = ["packed"] if self._gated and not pair else []
        return Op(
            "_".join([self.name, *packed, "backward"]),
            self._schema(
                "Tensor grad, Tensor x" + (", Tensor up" if pair else ""),
                "(Tensor x_grad, Tensor up_grad)" if pair else "Tensor",
            ),
            check=check,
            fake=fake,
            sm90=Backend("sm90", sm90, *_CUDA, why_not=lambda *args: _why_not(args[0])),
            ref=Backend("ref", reference, *_TORCH),
            family=self.name,
        )


def _why_not(x: Tensor) -> Reason | None:
    return platform.why_not(x.device)
