# SPDX-License-Identifier: Apache-2.0
"""The operators behind linear_act and gated_linear: one for each choice of optional tensors.

A schema's tensors come first and none is optional, so that autograd and subclasses see all of
them.
"""

from __future__ import annotations

from itertools import product
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
from tiercel.ops.linear import backward
from tiercel.ops.linear import reference as ref

_DTYPES = (torch.bfloat16, torch.float16)
# Precompiled, as Activation in linear_act.h counts; the reference's others are compiled where they
# are used, if TIERCEL_JIT=1 allows that.
INDEX = {"none": 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4}

_CUTE = ("TMA and wgmma with a fused epilogue; split K within a cluster for few rows", "cute")
_TORCH = ("torch.nn.functional.linear and the activation", "torch")


class Form(NamedTuple):
    """Which tensors an operator takes beside x and weight, and whether it returns sums too."""

    bias: bool = True
    residual: bool = False
    out: bool = False
    sums: bool = False


class Given(NamedTuple):
    """An operator's arguments."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    out: Tensor | None
    activation: str


def rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _split(form: Form, args: tuple[Any, ...]) -> Given:
    """`args` end with the activation and the backend."""
    x, weight, *rest = args[:-2]
    optional = [rest.pop(0) if there else None for there in form[:3]]
    return Given(x, weight, *optional, args[-2])


class Linear:
    """linear_act's operators, or those of gated_linear, which knows no residual.

    Args:
        name: The public operator.
        parts: Rows of the weight for a column of the result: 2 where one half gates the other.
        activations: What `activation` may be.
    """

    def __init__(self, name: str, parts: int, activations: tuple[str, ...]) -> None:
        self.name = name
        self.gated = parts == 2
        self._parts = parts
        self._activations = activations
        flags = (False, True)
        residuals = (False,) if self.gated else flags
        modes = ((False, False), (True, False), *(() if self.gated else ((False, True),)))
        self.operators = {
            form: self._declare(form)
            for form in (Form(b, r, *m) for b, r, m in product(flags, residuals, modes))
        }

    @property
    def main(self) -> Op:
        """The operator that stands for all of them."""
        return self.operators[Form()]

    # -- what was called ---------------------------------------------------------------------------

    def _operator_name(self, form: Form) -> str:
        parts = ("residual" * form.residual, "sums" * form.sums, "out" * form.out)
        return "_".join([self.name, *(["no_bias"] if not form.bias else []), *filter(None, parts)])

    def check_activation(self, activation: str) -> None:
        if activation not in self._activations:
            known = ", ".join(self._activations)
            raise ValueError(
                f"{self.name}: `activation` must be one of {known}, got {activation!r}"
            )

    def _columns(self, weight: Tensor) -> int:
        return weight.shape[0] // self._parts if weight.dim() else 0

    def _check(self, given: Given) -> None:
        name, (x, weight, bias, residual, out, activation) = self.name, given
        check_dtype(name, "x", x.dtype, _DTYPES)
        check_dtype(name, "weight", weight.dtype, (x.dtype,))
        if x.dim() < 1:
            raise ValueError(f"{name}: `x` must have at least 1 dimension, got 0")
        columns, n = self._columns(weight), "2N" if self.gated else "N"
        features = columns * self._parts
        if self.gated and weight.dim() and weight.shape[0] % 2:
            raise ValueError(
                f"{name}: `weight` must have an even number of rows [2N, K], got "
                f"{list(weight.shape)}"
            )
        check_shape(name, "weight", weight, (features, x.shape[-1]), f"[{n}, K]")
        check_same_device(name, "weight", weight, "x", x)
        if bias is not None:
            check_dtype(name, "bias", bias.dtype, (x.dtype,))
            check_shape(name, "bias", bias, (features,), f"[{n}]")
            check_same_device(name, "bias", bias, "x", x)
        for what, tensor in (("residual", residual), ("out", out)):
            if tensor is not None:
                check_dtype(name, what, tensor.dtype, (x.dtype,))
                check_shape(name, what, tensor, (*x.shape[:-1], columns), "[..., N]")
                check_same_device(name, what, tensor, "x", x)
        if out is not None:
            check_contiguous(name, "out", out)
        self.check_activation(activation)

    def _output(self, x: Tensor, weight: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self._columns(weight))
        return torch.empty(shape, dtype=x.dtype, device=x.device)

    # -- forward -----------------------------------------------------------------------------------

    def _launch(self, given: Given, out: Tensor, sums: Tensor | None) -> None:
        x, weight, bias, residual, _, activation = given
        index = INDEX.get(activation)
        tensors = (rows(x), weight, bias)
        if index is None:
            residual = None if residual is None else rows(residual)
            sums = None if sums is None else rows(sums)
            self._launch_compiled(*tensors, residual, rows(out), sums, activation)
        elif self.gated:
            _C.gated_linear(*tensors, rows(out), index)
        elif residual is None and sums is None:
            _C.linear_act(*tensors, rows(out), index)
        else:
            residual = None if residual is None else rows(residual).contiguous()
            sums = None if sums is None else rows(sums)
            _C.linear_act_extra(*tensors, residual, rows(out), sums, index)

    def _launch_compiled(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        sums: Tensor | None,
        activation: str,
    ) -> None:
        """An activation that is not precompiled, with the tiles that another one would have."""
        from tiercel.jit.cute_kernel import variant, why_not

        self.check_activation(activation)
        missing = why_not()
        if missing is not None:
            raise NotImplementedError(f"{self.name}: `activation` {activation!r}: {missing}")
        extra = residual is not None or sums is not None
        like = (x, weight, bias, residual, out, sums, INDEX["silu"])
        plan = (
            _C.linear_act_extra_plan(*like)
            if extra
            else _C.linear_act_plan(x, weight, bias, out, INDEX["silu"])
        )
        if plan["kernel"] == "none":
            return
        kernel = variant(
            "linear",
            "linear_cute",
            dtype="bf16" if x.dtype == torch.bfloat16 else "fp16",
            act=activation,
            tile_m=plan["tile_m"],
            tile_n=plan["tile_n"],
            pingpong=plan["pingpong"],
            split_k=plan["rows"] > 0,
            kind="extra" if extra else "plain",
        )
        kernel(
            # A split-K kernel loads only the rows of its tile.
            boxes={"x": (plan["rows"], 64)} if plan["rows"] else None,
            x=x,
            w=weight,
            bias=bias,
            residual=None if residual is None else residual.contiguous(),
            y=out,
            # A null pointer in a split-K kernel; the others have a map, and a flag beside it.
            sums=out if sums is None and not plan["rows"] else sums,
            m=x.shape[0],
            n=weight.shape[0],
            k=x.shape[1],
            group=plan["group"],
            save=int(sums is not None),
            x_scale=None,
            w_scale=None,
            x_step=0,
            w_step=0,
            rows=plan["rows"],
            splits=plan["splits"],
            blocks=plan["grid"],
        )

    def _plan(self, form: Form, given: Given) -> dict[str, Any]:
        x, weight, bias, residual, _, activation = given
        x = rows(x)
        out = self._output(x, weight)
        index = INDEX.get(activation)
        tensors = (x, weight, bias)
        if self.gated:
            return dict(_C.gated_linear_plan(*tensors, out, index or 0))
        if residual is None and not form.sums:
            plan = dict(_C.linear_act_plan(*tensors, out, index or 0))
        else:
            residual = None if residual is None else rows(residual)[: x.shape[0]].contiguous()
            sums = torch.empty_like(out) if form.sums and activation != "none" else None
            like = INDEX["silu"] if index is None else index
            plan = dict(_C.linear_act_extra_plan(*tensors, residual, out, sums, like))
        return plan if index is not None else plan | {"kernel": "compiled here (TIERCEL_JIT)"}

    def _why_not(self, form: Form, given: Given) -> Reason | None:
        reason = platform.why_not(given.x.device)
        if reason is not None:
            return reason
        if given.activation not in INDEX:
            from tiercel.jit.cute_kernel import why_not

            missing = why_not()
            if missing is not None:
                text = f"`activation` {given.activation!r}: {missing}"
                return Reason(NotImplementedError, text)
        try:
            self._plan(form, given._replace(x=rows(given.x)[:2]))  # two rows show the stride
        except NotImplementedError as error:
            return Reason(NotImplementedError, str(error).removeprefix(f"{self.name}: "))
        return None

    def reference(self, given: Given) -> Tensor:
        x, weight, bias, residual, _, activation = given
        if self.gated:
            return ref.gated_linear(x, weight, bias, activation=activation)
        return ref.linear_act(x, weight, bias, activation=activation, residual=residual)

    def _run(self, form: Form) -> Any:
        """sm90's `run`; the usual case without Python in between."""

        def run(*args: Any) -> Any:
            given = _split(form, args)
            out = given.out
            if out is None:
                shape = (*given.x.shape[:-1], self._columns(given.weight))
                out = empty(given.x, shape, given.x.dtype)
            # A result without activation is its own sums.
            apart = form.sums and given.activation != "none"
            sums = torch.empty_like(out) if apart else None
            self._launch(given, out, sums)
            if form.sums:
                return out, out.clone() if sums is None else sums
            return None if form.out else out

        if form.out or form.sums or self.gated:
            return run
        count = 4 + form.bias + form.residual
        x, weight, bias, residual, _, activation = _split(form, tuple(map(Argument, range(count))))
        takes = (x, weight, bias, Output(0), Choice(activation, INDEX))
        if form.residual:
            takes = (*takes[:3], residual, Output(0), None, takes[-1])
        return launcher(
            _C.linear_act_extra if form.residual else _C.linear_act,
            takes,
            count=count,
            dense=(residual,) if form.residual else (),
            outputs=(Like(x, rank=2, dims=((x, 0), (weight, 0))),),
            otherwise=run,
        )

    # -- declaration -------------------------------------------------------------------------------

    def _declare(self, form: Form) -> Op:
        def reference(*args: Any) -> Any:
            given = _split(form, args)
            result = self.reference(given).contiguous()
            if form.sums:
                plain = given._replace(activation="none", residual=None)
                return result, self.reference(plain).contiguous()
            if not form.out:
                return result
            given.out.copy_(result)  # type: ignore[union-attr]
            return None

        def fake(x: Tensor, weight: Tensor, *_: Any) -> Any:
            if form.out:
                return None
            made = self._output(x, weight)
            return (made, torch.empty_like(made)) if form.sums else made

        def save(ctx: Any, args: tuple[Any, ...], outputs: Any) -> None:
            given = _split(form, args)
            ctx.activation, ctx.backend = given.activation, args[-1]
            sums = None
            if form.sums:
                sums = outputs[1]
                ctx.mark_non_differentiable(sums)
            elif given.activation == "relu" and not (form.residual or self.gated):
                sums = outputs  # positive where its sums are
            ctx.save_for_backward(given.x, given.weight, given.bias, given.residual, sums)

        def gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
            found = backward.gradients(self, ctx, grad)
            wanted = (True, True, form.bias, form.residual)
            return tuple(g for g, there in zip(found, wanted, strict=True) if there)

        names = ["x", "weight", *(f for f, there in zip(form._fields, form, strict=True) if there)]
        names = [name for name in names if name not in ("out", "sums")]
        tensors = ", ".join([f"Tensor {name}" for name in names] + ["Tensor(a!) out"] * form.out)
        default = "silu" if self.gated else "gelu"
        result = "()" if form.out else "(Tensor out, Tensor sums)" if form.sums else "Tensor"
        return Op(
            self._operator_name(form),
            f"({tensors}, str activation='{default}', str? backend=None) -> {result}",
            check=lambda *args: self._check(_split(form, args)),
            fake=fake,
            sm90=Backend(
                "sm90",
                self._run(form),
                *_CUTE,
                why_not=lambda *args: self._why_not(form, _split(form, args)),
            ),
            ref=Backend("ref", reference, *_TORCH),
            autograd=None if form.out else Autograd(save, gradients),
            family=self.name,
            describe=lambda *args: self._plan(form, _split(form, args)),
            load=_C.linear_act_load if form == Form() else None,
        )
