# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing: adding up the outputs of each token's experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._launcher import Argument, Like, Output, launcher
from tiercel._op import Autograd, Backend, Op
from tiercel.core import platform
from tiercel.core.checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.eager import empty
from tiercel.core.platform import Reason
from tiercel.ops.routing import reference as ref

__all__ = ["moe_sum"]

_NAME = "moe_sum"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check(x: Tensor, weights: Tensor | None, out: Tensor | None) -> None:
    check_rank(_NAME, "x", x, 3)
    check_dtype(_NAME, "x", x.dtype, _DTYPES)
    rows, k, columns = x.shape
    if weights is not None:
        check_rank(_NAME, "weights", weights, 2)
        check_dtype(_NAME, "weights", weights.dtype, (torch.float32,))
        check_shape(_NAME, "weights", weights, (rows, k), "[T, k]")
        check_same_device(_NAME, "weights", weights, "x", x)
        check_contiguous(_NAME, "weights", weights)
    if out is not None:
        check_rank(_NAME, "out", out, 2)
        check_dtype(_NAME, "out", out.dtype, (x.dtype,))
        check_shape(_NAME, "out", out, (rows, columns), "[T, H]")
        check_same_device(_NAME, "out", out, "x", x)
        check_contiguous(_NAME, "out", out)


def _output(x: Tensor) -> Tensor:
    return torch.empty(x.shape[0], x.shape[2], dtype=x.dtype, device=x.device)


def _sm90(x: Tensor, weights: Tensor | None) -> Tensor:
    out: Tensor = empty(x, (x.shape[0], x.shape[2]), x.dtype)
    _C.moe_sum(x, weights, out)
    return out


def _plan(x: Tensor, weights: Tensor | None) -> dict[str, Any]:
    return dict(_C.moe_sum_plan(x, weights, _output(x)))


def _save(ctx: Any, x: Tensor, weights: Tensor | None) -> None:
    ctx.k, ctx.dtype = x.shape[1], x.dtype
    ctx.save_for_backward(x if weights is not None else None, weights)


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if grad is None:
        return None, None
    x, weights = ctx.saved_tensors
    if weights is None:
        return grad[:, None, :].expand(-1, ctx.k, -1), None
    wants = ctx.needs_input_grad[1:]  # after the flag that says how to run
    wide = grad.float()
    grad_x = (wide[:, None, :] * weights[:, :, None]).to(ctx.dtype) if wants[0] else None
    grad_weights = torch.einsum("tkh,th->tk", x.float(), wide) if wants[1] else None
    return grad_x, grad_weights


_CUDA = ("a vector of the output a thread, all experts' loads at once", "cuda")
_TORCH = ("torch.sum in float32", "torch")


# The schema's tensors come first and none is optional, so that all of them are looked at: there is
# an operator with weights and one without, and each with `out`.
def _operator(weighted: bool, into: bool) -> Op:
    def split(args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, *rest = args[:-1]
        return x, rest[0] if weighted else None, rest[-1] if into else None

    def sm90(*args: Any) -> Tensor | None:
        x, weights, out = split(args)
        if out is None:
            return _sm90(x, weights)
        _C.moe_sum(x, weights, out)
        return None

    count = 1 + weighted + into + 1
    x, weights, out = split(tuple(map(Argument, range(count))))
    run = launcher(
        _C.moe_sum,
        (x, weights, out if into else Output(0)),
        count=count,
        outputs=() if into else (Like(x, rank=3, dims=((x, 0), (x, 2))),),
        otherwise=sm90,
    )

    def reference(*args: Any) -> Tensor | None:
        x, weights, out = split(args)
        result = ref.moe_sum(x, weights)
        if out is None:
            return result
        out.copy_(result)
        return None

    def why_not(*args: Any) -> Reason | None:
        return platform.why_not(args[0].device)

    def save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, *split(args)[:2])

    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad)[: 2 if weighted else 1]

    return Op(
        f"{_NAME}{'' if weighted else '_no_weights'}{'_out' if into else ''}",
        f"(Tensor x{', Tensor weights' if weighted else ''}{', Tensor(a!) out' if into else ''},"
        f" str? backend=None) -> {'()' if into else 'Tensor'}",
        check=lambda *args: _check(*split(args)),
        fake=lambda *args: None if into else _output(args[0]),
        sm90=Backend("sm90", run, *_CUDA, why_not=why_not),
        ref=Backend("ref", reference, *_TORCH),
        autograd=None if into else Autograd(save, backward),
        family=_NAME,
        describe=lambda *args: _plan(*split(args)[:2]),
        load=_C.moe_sum_load if weighted and not into else None,
    )


_SUM = _operator(weighted=True, into=False)
_PLAIN = _operator(weighted=False, into=False)
_SUM_OUT = _operator(weighted=True, into=True)
_PLAIN_OUT = _operator(weighted=False, into=True)


@_SUM.export
def moe_sum(
    x: Tensor,
    weights: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Adds up the outputs of each token's experts, with a weight each where there are some.

    The last step of a mixture of experts: ``out[t] = sum over j of weights[t, j] * x[t, j]``. Sums
    are float32, in the order of j, and rounded once.

    Differentiable in ``x`` and ``weights``. Works under torch.compile and torch.export, and in CUDA
    graphs; it never synchronises.

    Args:
        x: ``[T, k, H]``, float32, bfloat16 or float16, any strides; fastest where rows of H are
            contiguous and begin at multiples of 16 bytes.
        weights: ``[T, k]`` float32, contiguous, or None for a plain sum.
        out: ``[T, H]`` to write to, contiguous, of the dtype and on the device of ``x``. Then no
            gradient flows.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[T, H]``, the dtype of ``x``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> hidden = tiercel.moe_sum(expert_outputs, weights)
    """
    if out is None:
        result: Tensor = (
            _PLAIN.pick()(x, backend) if weights is None else _SUM.pick()(x, weights, backend)
        )
        return result
    if weights is None:
        _PLAIN_OUT(x, out, backend)
    else:
        _SUM_OUT(x, weights, out, backend)
    return out
