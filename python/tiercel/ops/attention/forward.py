# SPDX-License-Identifier: Apache-2.0
"""The operators of attention and attention_varlen, without and with `lse`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.op import Gradient, Native, Op
from tiercel.core.spec import Call, Spec
from tiercel.ops.attention import spec
from tiercel.ops.attention.backward import has_kernels
from tiercel.ops.attention.options import empty_lse, native_options, new_lse
from tiercel.ops.attention.sinks import gradient as sinks_gradient

_FLOAT8 = torch.float8_e4m3fn
_NO_DESCALES = (None, None, None)


@dataclass(frozen=True)
class Kernels:
    """Functions of `_C`, which want their arguments in different orders.

    `inputs` are q, k and v, `starts` the cu_seqlens and max_seqlens, if there are any, `outputs`
    are (out, lse or None), `more` the descales and a workspace or None, and `options` those of
    `native_options`, and the sinks for 16 bits.
    """

    run: Callable[..., Any]  # (inputs, starts, outputs, options)
    plan: Callable[..., Any]
    run_fp8: Callable[..., Any]  # (inputs, starts, outputs, more, options)
    plan_fp8: Callable[..., Any]
    description: str


def _load(device: int) -> None:
    _C.attention_load(device)
    _C.attention_fp8_load(device)


class Forward:
    """Calling it with the operator's arguments picks the operator and runs it.

    Args:
        declared: Without and with `lse`.
        kernels: The kernels.
        reference: (the operator's arguments by name, return_lse) -> the results.
        method: How the reference works, in a line.
        backward: The gradients' operator, which takes the gradient, q, k, v, cu_seqlens, the
            results, the gradient of `lse`, the options, whether in a fixed order, and the backend.
        without_kernels: (q, k, v and cu_seqlens, sinks, gradients of the results, other arguments)
            -> the gradients where there are no kernels.
    """

    def __init__(
        self,
        declared: tuple[Spec, Spec],
        kernels: Kernels,
        reference: Callable[..., Any],
        method: str,
        backward: Op,
        without_kernels: Callable[..., Any],
        **more: Any,
    ) -> None:
        self._name = declared[0].name
        self._starts = declared[0].names.index("causal") - 3
        self._kernels = kernels
        self._without_kernels = without_kernels
        self.backward = backward

        def operator(declared: Spec) -> Op:
            lse = "lse" in declared.result_names
            return Op(
                declared,
                sm90=Native(
                    self._run,
                    self._plan,
                    (*declared.names, "out", "lse", lse),
                    kernels.description,
                    language="cute",
                    load=_load,
                    returns=True,
                    sample=None if self._starts else _one_query,
                ),
                reference=lambda call: reference(**declared.values(call), return_lse=lse),
                method=method,
                gradient=Gradient(self._save, self._gradients),
                **more,
            )

        self.plain, self.lse = map(operator, declared)

    def __call__(self, given: tuple[Any, ...], return_lse: bool, out: Tensor | None = None) -> Any:
        if out is not None:
            if not return_lse:
                return self.plain.into()(out, *given)
            return self.lse.into()((out, new_lse(self.plain, *given)), *given)
        # The backward needs the logarithms: kept from the forward, they cost nothing.
        kept = torch.is_grad_enabled() and any(
            getattr(x, "requires_grad", False) for x in (*given[:3], given[-2])
        )
        if return_lse:
            return self.lse.pick()(*given)
        return self.lse.pick()(*given)[0] if kept else self.plain.pick()(*given)

    def _sees_nothing(self, k: Tensor, starts: tuple[Any, ...]) -> bool:
        """True if no query sees a key, so that there is nothing to compute."""
        if not starts:
            return k.shape[1] == 0
        return starts[0].shape[:1] == (1,) or k.shape[0] == 0 or 0 in starts[2:]

    def _run(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        n = self._starts
        starts, options, descales = rest[:n], rest[n : n + 4], rest[n + 4 : n + 7]
        sinks, out, lse, with_lse = rest[n + 7 :]
        float8, given = q.dtype == _FLOAT8, out is not None
        if not given:
            shape = (*q.shape[:-1], v.shape[-1])
            out = q.new_empty(shape, dtype=torch.bfloat16 if float8 else q.dtype)
            lse = empty_lse(q) if with_lse else None
        if self._sees_nothing(k, starts):
            self._check((q, k, v, *rest[: n + 8]), out, lse)
            out.zero_()
            if lse is not None:
                lse.fill_(-math.inf)
                if sinks is not None:
                    _add_sinks(lse, sinks, starts)
        else:
            native = native_options(q, *options)
            inputs, outputs = (q, k, v), (out, lse)
            if float8:
                _refuse_sinks(sinks)
                plan = self._kernels.plan_fp8(inputs, starts, outputs, (*descales, None), native)
                workspace = torch.empty(plan["workspace"], dtype=torch.uint8, device=q.device)
                more = (*descales, workspace)
                self._kernels.run_fp8(inputs, starts, outputs, more, native)
            else:
                _refuse(descales)
                self._kernels.run(inputs, starts, outputs, (*native, sinks))
        if given:
            return None
        return (out, lse) if with_lse else out

    def _plan(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> dict[str, Any]:
        n = self._starts
        starts, options, descales = rest[:n], rest[n : n + 4], rest[n + 4 : n + 7]
        if self._sees_nothing(k, starts):
            return {}
        sinks, out = rest[n + 7 : n + 9]
        inputs, outputs, native = (q, k, v), (out, None), native_options(q, *options)
        if q.dtype == _FLOAT8:
            _refuse_sinks(sinks)
            return dict(self._kernels.plan_fp8(inputs, starts, outputs, (*descales, None), native))
        _refuse(descales)
        return dict(self._kernels.plan(inputs, starts, outputs, (*native, sinks)))

    def _check(self, arguments: tuple[Any, ...], out: Tensor, lse: Tensor | None) -> None:
        """Checks what no kernel looks at."""
        declared = self.plain.spec if lse is None else self.lse.spec
        results = {"out": out} if lse is None else {"out": out, "lse": lse}
        declared.validate(Call(**dict(zip(declared.names, arguments, strict=True)), **results))

    def _save(self, ctx: Any, call: Call, results: Any) -> None:
        if call.q.dtype == _FLOAT8:
            raise RuntimeError(
                f"{self._name}: there is no derivative of float8_e4m3fn, but a tensor requires grad"
            )
        values = list(self.plain.spec.values(call).values())
        ctx.options = values[3 + self._starts : 7 + self._starts]
        ctx.longest = values[5 : 3 + self._starts]
        ctx.backend = call.backend
        kept = results if isinstance(results, tuple) else ()
        ctx.save_for_backward(*values[: 5 if self._starts else 3], call.sinks, *kept)

    def _gradients(self, ctx: Any, *grads: Tensor | None) -> dict[str, Tensor | None]:
        if all(grad is None for grad in grads):
            return {}
        saved = ctx.saved_tensors  # once: checkpoints hand them out a single time
        count = 5 if self._starts else 3
        inputs, sinks, results = saved[:count], saved[count], saved[count + 1 :]
        if has_kernels(self._name, inputs[0], inputs[2], ctx.backend):
            if not results:
                results = self.with_lse(inputs, *ctx.longest, *ctx.options, ctx.backend, sinks)
            order = torch.are_deterministic_algorithms_enabled()
            more = (ctx.options, order, ctx.backend, sinks)
            found = self.differentiate(inputs, results, grads, *more)
        else:
            found = self._without_kernels(inputs, sinks, grads, (*ctx.longest, *ctx.options))
        pairs = zip(("q", "k", "v", "sinks"), found, strict=False)
        return {name: grad if ctx.wants[name] else None for name, grad in pairs}

    def with_lse(self, inputs: tuple[Tensor, ...], *rest: Any) -> tuple[Tensor, Tensor]:
        """Both results again, of 16-bit inputs, for a backward; the backend and the sinks come
        last."""
        detached = (x.detach() for x in inputs)
        *others, backend, sinks = rest
        sinks = None if sinks is None else sinks.detach()
        found: tuple[Tensor, Tensor] = self.lse(*detached, *others, *_NO_DESCALES, sinks, backend)
        return found

    def differentiate(
        self,
        inputs: tuple[Tensor, ...],
        results: tuple[Tensor, Tensor],
        grads: tuple[Tensor | None, ...],
        options: tuple[Any, ...],
        deterministic: bool,
        backend: str | None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The gradients by the operators, that of the sinks last. The logarithms have the sinks
        already, so the other gradients do not need them."""
        grad, grad_lse = grads if len(grads) == 2 else (grads[0], None)
        if grad is None:
            grad = torch.zeros_like(results[0])
        more = (*results, grad_lse, *options, deterministic, backend)
        found: tuple[Tensor, ...] = self.backward(grad, *inputs, *more)
        if sinks is None:
            return found
        return *found, sinks_gradient(grads, results, sinks, backend)


def _one_query(call: Call) -> dict[str, Any]:
    return {"q": call.q[:, :1]}  # it shows the strides


def _refuse_sinks(sinks: Tensor | None) -> None:
    if sinks is not None:
        raise NotImplementedError(
            "`sinks` must be None for the float8_e4m3fn kernels, got a tensor"
        )


def _add_sinks(lse: Tensor, sinks: Tensor, starts: tuple[Any, ...]) -> None:
    """Writes the sinks to the logarithms of rows that see no key; not to those in no sequence."""
    if not starts:
        lse.copy_(sinks[:, None])
    elif starts[0].shape[0] > 1 and starts[2] != 0:
        row = torch.arange(lse.shape[-1], device=lse.device)
        inside = (row >= starts[0][0]) & (row < starts[0][-1])
        lse.copy_(torch.where(inside, sinks[:, None], lse))


def _refuse(descales: tuple[Any, ...]) -> None:
    if not descales[0] is descales[1] is descales[2] is None:
        raise ValueError(f"only float8_e4m3fn inputs have {', '.join(spec.DESCALES)}")
