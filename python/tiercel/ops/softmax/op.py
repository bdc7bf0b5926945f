# SPDX-License-Identifier: Apache-2.0
"""softmax and its logarithm, with scale and mask in the same kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._launcher import Argument, Choice, Like, Output, launcher
from tiercel._op import Autograd, Backend, Op
from tiercel.core import platform
from tiercel.core.checks import (
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
    dtype_name,
)
from tiercel.core.eager import empty
from tiercel.core.platform import Reason
from tiercel.ops._rows import rows
from tiercel.ops.softmax import reference as ref

__all__ = ["log_softmax", "softmax_online"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CUDA = ("a row in registers of lanes, a block or a cluster; one read, one write", "cuda")
_TORCH = ("torch.softmax in float32", "torch")


class _Softmax:
    """A function's operators: with and without mask and `out`, forward and backward."""

    def __init__(self, name: str, log: bool, reference: Callable[..., Tensor]) -> None:
        self.name = name
        self._log = log
        self._reference = reference
        flags = (False, True)
        self.forward = {(m, out): self._declare(m, out) for m in flags for out in flags}
        self._backward = {m: self._declare_backward(m) for m in flags}

    def __call__(
        self,
        x: Tensor,
        mask: Tensor | None,
        out: Tensor | None,
        dim: int,
        scale: float | None,
        backend: str | None,
    ) -> Tensor:
        op = self.forward[mask is not None, out is not None]
        if out is not None:
            tensors = (x, out) if mask is None else (x, mask, out)
            op(*tensors, dim, scale, backend)
            return out
        result: Tensor = (
            op.pick()(x, dim, scale, backend)
            if mask is None
            else op.pick()(x, mask, dim, scale, backend)
        )
        return result

    def _check(
        self, x: Tensor, mask: Tensor | None, out: Tensor | None, dim: int, scale: float | None
    ) -> None:
        name = self.name
        check_dtype(name, "x", x.dtype, _DTYPES)
        if x.dim() == 0:
            raise ValueError(f"{name}: `x` must have at least 1 dimension, got 0 (shape [])")
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"{name}: `dim` must be an int, got {type(dim).__name__}")
        if not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"{name}: `dim` must be from {-x.dim()} to {x.dim() - 1}, got {dim} "
                f"for shape {list(x.shape)}"
            )
        if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
            raise TypeError(f"{name}: `scale` must be a float, got {type(scale).__name__}")
        if mask is not None:
            if mask.dtype not in (torch.bool, torch.float32, x.dtype):
                raise TypeError(
                    f"{name}: `mask` must have dtype bool, float32 or that of `x`, "
                    f"got {dtype_name(mask.dtype)}"
                )
            sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
            if mask.dim() > x.dim() or any(m not in (1, n) for m, n in sizes):
                raise ValueError(
                    f"{name}: `mask` must broadcast to the shape of `x`, {list(x.shape)}, "
                    f"got {list(mask.shape)}"
                )
            check_same_device(name, "mask", mask, "x", x)
        if out is not None:
            check_dtype(name, "out", out.dtype, (x.dtype,))
            check_shape(name, "out", out, x.shape, "that of `x`")
            check_same_device(name, "out", out, "x", x)
            check_contiguous(name, "out", out)

    def _launch(
        self, x: Tensor, mask: Tensor | None, out: Tensor, dim: int, scale: float | None
    ) -> None:
        _last_dimension(self.name, x, dim)
        if mask is not None and mask.shape != x.shape:
            mask = mask.expand(x.shape)
        _C.softmax(rows(x), mask, out, 1.0 if scale is None else scale, self._log)

    def _plan(
        self, x: Tensor, mask: Tensor | None, dim: int, scale: float | None
    ) -> dict[str, Any]:
        _last_dimension(self.name, x, dim)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        mask = None if mask is None else mask.expand(x.shape)
        return dict(_C.softmax_plan(rows(x), mask, out, 1.0 if scale is None else scale, self._log))

    def _why_not(
        self, x: Tensor, mask: Tensor | None, dim: int, scale: float | None
    ) -> Reason | None:
        reason = platform.why_not(x.device)
        if reason is not None:
            return reason
        try:
            self._plan(x, mask, dim, scale)
        except NotImplementedError as error:
            return Reason(NotImplementedError, str(error).removeprefix(f"{self.name}: "))
        return None

    def _declare(self, masked: bool, into_out: bool) -> Op:
        def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
            """(x, mask or None, out or None, dim, scale)."""
            x, *rest = args
            mask = rest.pop(0) if masked else None
            out = rest.pop(0) if into_out else None
            return x, mask, out, rest[0], rest[1]

        def without_out(args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, mask, _, dim, scale = split(args)
            return x, mask, dim, scale

        def sm90(*args: Any) -> Any:
            x, mask, out, dim, scale = split(args)
            if into_out:
                return self._launch(x, mask, out, dim, scale)
            out = empty(x, tuple(x.shape), x.dtype)
            self._launch(x, mask, out, dim, scale)
            return out

        run: Callable[..., Any] = sm90
        if not masked:  # a mask may have to be expanded
            x, _, out, dim, scale = split(tuple(map(Argument, range(4 + into_out))))
            run = launcher(
                _C.softmax,
                # The last dimension alone is the plain case.
                (x, None, out if into_out else Output(0), scale, Choice(dim, {-1: self._log})),
                count=4 + into_out,
                dense=(x,),
                outputs=() if into_out else (Like(x),),
                otherwise=sm90,
            )

        def reference(*args: Any) -> Any:
            x, mask, out, dim, scale = split(args)
            result = self._reference(x, dim, scale=scale, mask=mask).contiguous()
            if not into_out:
                return result
            out.copy_(result)
            return None

        def fake(*args: Any) -> Any:
            x = args[0]
            return None if into_out else torch.empty(x.shape, dtype=x.dtype, device=x.device)

        def save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
            _, mask, _, ctx.dim, ctx.scale = split(args)
            ctx.backend = args[-1]
            ctx.save_for_backward(output, mask)

        names = ["Tensor x"] + ["Tensor mask"] * masked + ["Tensor(a!) out"] * into_out
        return Op(
            "_".join([self.name, *["no_mask"] * (not masked), *["out"] * into_out]),
            f"({', '.join(names)}, int dim=-1, float? scale=None, str? backend=None) -> "
            + ("()" if into_out else "Tensor"),
            check=lambda *args: self._check(*split(args)),
            fake=fake,
            sm90=Backend("sm90", run, *_CUDA, why_not=lambda *a: self._why_not(*without_out(a))),
            ref=Backend("ref", reference, *_TORCH),
            autograd=None if into_out else Autograd(save, self._gradients),
            family=self.name,
            describe=lambda *args: self._plan(*without_out(args)),
            load=_C.softmax_load if masked and not into_out else None,
        )

    def _gradients(self, ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        y, mask = ctx.saved_tensors
        if grad is None:
            return None, None
        keep = mask if mask is not None and mask.dtype == torch.bool else None
        if torch.is_grad_enabled():  # of a gradient: PyTorch can differentiate its own formulas
            x_grad = self._formula(grad, y, keep, ctx.dim, ctx.scale)
        elif keep is None:
            x_grad = self._backward[False](grad, y, ctx.dim, ctx.scale, ctx.backend)
        else:
            x_grad = self._backward[True](grad, y, keep, ctx.dim, ctx.scale, ctx.backend)
        if mask is None or not mask.requires_grad:
            return (x_grad,) if mask is None else (x_grad, None)
        added = self._formula(grad, y, None, ctx.dim, None)
        return x_grad, added.sum_to_size(mask.shape).to(mask.dtype)

    def _formula(
        self, grad: Tensor, y: Tensor, keep: Tensor | None, dim: int, scale: float | None
    ) -> Tensor:
        wide_y, wide_grad = (t if t.dtype == torch.float64 else t.float() for t in (y, grad))
        if self._log:
            result = wide_grad - wide_y.exp() * wide_grad.sum(dim, keepdim=True)
        else:
            result = wide_y * (wide_grad - (wide_grad * wide_y).sum(dim, keepdim=True))
        if scale is not None:
            result = result * scale
        return (result if keep is None else result.masked_fill(~keep, 0.0)).to(y.dtype)

    def _declare_backward(self, masked: bool) -> Op:
        def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
            """(grad, y, mask or None, dim, scale)."""
            grad, y, *rest = args
            return grad, y, rest.pop(0) if masked else None, rest[0], rest[1]

        def check(*args: Any) -> None:
            grad, y, mask, dim, scale = split(args)
            self._check(y, mask, None, dim, scale)
            check_dtype(self.name, "grad", grad.dtype, (y.dtype,))
            check_shape(self.name, "grad", grad, y.shape, "that of `x`")
            check_same_device(self.name, "grad", grad, "x", y)

        def sm90(*args: Any) -> Tensor:
            grad, y, mask, dim, scale = split(args)
            _last_dimension(self.name, y, dim)
            x_grad = torch.empty(y.shape, dtype=y.dtype, device=y.device)
            mask = None if mask is None else mask.expand(y.shape)
            factor = 1.0 if scale is None else scale
            _C.softmax_backward(rows(grad), rows(y), mask, x_grad, factor, self._log)
            return x_grad

        def why_not(*args: Any) -> Reason | None:
            _, y, mask, dim, scale = split(args)
            return self._why_not(y, mask, dim, scale)

        return Op(
            f"{self.name}{'_no_mask' * (not masked)}_backward",
            f"(Tensor grad, Tensor y{', Tensor mask' * masked}, int dim=-1, float? scale=None, "
            "str? backend=None) -> Tensor",
            check=check,
            fake=lambda *args: torch.empty(
                args[1].shape, dtype=args[1].dtype, device=args[1].device
            ),
            sm90=Backend("sm90", sm90, *_CUDA, why_not=why_not),
            ref=Backend("ref", lambda *args: self._formula(*split(args)).contiguous(), *_TORCH),
            family=self.name,
        )


def _last_dimension(name: str, x: Tensor, dim: int) -> None:
    if dim not in (-1, x.dim() - 1):
        raise NotImplementedError(
            f"{name}: the kernels work along the last dimension, got dim {dim} of {x.dim()}"
        )


_SOFTMAX = _Softmax("softmax_online", False, ref.softmax_online)
_LOG_SOFTMAX = _Softmax("log_softmax", True, ref.log_softmax)


@_SOFTMAX.forward[True, False].export
def softmax_online(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``softmax(scale * x + mask)``, each row read once.

    Maximum and sum are taken together, as in Milakov and Gimelshein, 2018, arXiv:1805.02867, and
    the row stays in registers until it is written. Arithmetic is float32; the result is rounded
    once. NaN and infinities are as from :func:`torch.softmax`: a row that holds NaN or +inf, or
    nothing but -inf (one that is masked altogether), is NaN.

    Differentiable in ``x`` and in a floating ``mask``; a score that a bool mask takes out has the
    gradient 0. Works under torch.compile and torch.export, and in CUDA graphs; it never
    synchronises.

    Args:
        x: ``[..., N]``; float32, bfloat16 or float16. Rows may be apart; where they are at several
            distances, or elements are not neighbours, a copy is made.
        dim: The dimension that sums to 1. The precompiled kernels take the last one, others run on
            ref.
        scale: A number that ``x`` is multiplied by first; 0 runs on ref.
        mask: Broadcasts to the shape of ``x``, on its device. bool: where it is False the score
            counts as -inf. float32 or the dtype of ``x``: added to the scaled scores.
        out: To write to: contiguous, of the shape, dtype and device of ``x``, perhaps ``x`` itself.
            Then no gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        TypeError: A dtype or type is not one of the above.
        ValueError: A shape, stride, dimension or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weights = tiercel.softmax_online(scores, scale=head_dim**-0.5, mask=causal)
    """
    return _SOFTMAX(x, mask, out, dim, scale, backend)


@_LOG_SOFTMAX.forward[True, False].export
def log_softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``log(softmax(scale * x + mask))``, each row read once.

    As :func:`tiercel.softmax_online` in everything else: arguments, gradients, special values. A
    score that the mask takes out gives -inf.

    Args:
        x: ``[..., N]``; float32, bfloat16 or float16.
        dim: The dimension whose exponentials sum to 1.
        scale: A number that ``x`` is multiplied by first.
        mask: Broadcasts to the shape of ``x``; bool, float32 or the dtype of ``x``.
        out: To write to: contiguous, of the shape, dtype and device of ``x``.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        TypeError: A dtype or type is not one of the above.
        ValueError: A shape, stride, dimension or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> loss = -tiercel.log_softmax(logits).gather(-1, labels[:, None]).mean()
    """
    return _LOG_SOFTMAX(x, mask, out, dim, scale, backend)
