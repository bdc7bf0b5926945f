# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy whose forward also makes the gradient, for large vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core import platform
from tiercel.core.dispatch import ExplainRequest
from tiercel.core.eager import DIRECT, route
from tiercel.core.index_checks import Index
from tiercel.core.op import Gradient, Native, Op
from tiercel.core.spec import Call, Spec
from tiercel.ops._rows import rows
from tiercel.ops.loss import reference as ref
from tiercel.ops.loss import spec

__all__ = ["cross_entropy"]

METHOD = "torch.log_softmax in float32"


def target_rule(target: Tensor, count: int, ignored: int) -> list[Index]:
    def wrong(values: Tensor) -> Tensor:
        return ((values < 0) | (values >= count)) & (values != ignored)

    due = f"hold classes from 0 to {count - 1}, or {ignored} for none"
    return [Index("target", target, wrong, due)]


def _target_rule(call: Call) -> list[Index]:
    return target_rule(call.target, call.logits.shape[1], call.ignore_index)


def _native(grad: str) -> Native:
    """The kernel that writes the gradient to the argument or result `grad`, if there is one."""
    takes = ("logits", "target", "weight", "scale", "loss", "grad")
    options = ("ignore_index", "label_smoothing", "z_loss", "softcap")

    def launch(native: Callable[..., Any], call: Call) -> Any:
        given = {name: getattr(call, name, None) for name in takes}
        given["logits"] = rows(call.logits)
        if grad == "logits":
            given["grad"] = given["logits"]
        if call.weight is not None:
            given["weight"] = call.weight.float()
        if call.scale is not None:
            given["scale"] = call.scale.contiguous()
        result = native(*given.values(), *(getattr(call, name) for name in options))
        if native is _C.cross_entropy and grad == "logits" and given["grad"] is not call.logits:
            call.logits.copy_(given["grad"])
        return result

    return Native(
        _C.cross_entropy,
        _C.cross_entropy_plan,
        (*takes[:-1], grad, *options),
        "a row in the shared memory of a cluster: one read, and one write of the gradient",
        load=_C.cross_entropy_load,
        contiguous=("logits", "scale"),
        rearranged=("weight",),
        launch=launch,
    )


def _op(declared: Spec, grad: str, **more: Any) -> Op:
    return Op(
        declared,
        sm90=_native(grad),
        method=METHOD,
        indices=_target_rule,
        **more,
    )


def _options(call: Call) -> tuple[Any, ...]:
    return tuple(spec.CROSS_ENTROPY.values(call).values())


def _both(call: Call) -> tuple[Tensor, Tensor]:
    return ref.losses(*_options(call)), ref.gradient(*_options(call))


def _both_in_place(call: Call) -> Tensor:
    loss, grad = _both(call)
    call.logits.copy_(grad)
    return loss


def scaled(grad: Tensor, by: Tensor, backend: str | None, owned: bool) -> Tensor:
    """The gradient of the rows' losses times the losses' gradients, in place where nobody reads it
    again. The kernel reads and writes nothing where these are 1, as they are in
    ``loss.backward()``."""
    if by.shape[0] and by.stride(0) == 0:  # of a sum: the same for all rows
        by = by[:1]
    kept = not owned and torch._C._autograd._get_current_graph_task_keep_graph()
    on_gpu = grad.get_device() in platform.ready and backend in (None, "auto", "sm90")
    # The kernel needs contiguous rows; a gradient in place has the strides of the logits.
    if on_gpu and not kept and rows(grad) is grad and route(grad, by) == DIRECT:
        _C.cross_entropy_rescale(grad, by.contiguous())
        torch._C._increment_version([grad])
        return grad
    return (grad * by[:, None]).to(grad.dtype)


def _save_logits(ctx: Any, call: Call, loss: Tensor) -> None:
    ctx.options, ctx.backend = _options(call)[4:], call.backend
    ctx.save_for_backward(call.logits, call.target, call.weight, call.scale)


def _from_logits(ctx: Any, by: Tensor | None) -> dict[str, Tensor | None]:
    if by is None:
        return {}
    if torch.is_grad_enabled():  # PyTorch can differentiate its own formula
        grad = ref.gradient(*ctx.saved_tensors, *ctx.options)
        return {"logits": (grad * by[:, None]).to(grad.dtype)}
    _, grad = _WITH_GRADIENT(*ctx.saved_tensors, *ctx.options, ctx.backend)
    return {"logits": scaled(grad, by, ctx.backend, owned=True)}


def _save_gradient(ctx: Any, call: Call, results: Any) -> None:
    ctx.backend = call.backend
    if isinstance(results, tuple):
        ctx.mark_non_differentiable(results[1])
    ctx.save_for_backward(results[1] if isinstance(results, tuple) else call.logits)


def _from_gradient(ctx: Any, by: Tensor | None, _: Any = None) -> dict[str, Tensor | None]:
    if by is None:
        return {}
    if torch.is_grad_enabled():
        raise RuntimeError(
            "cross_entropy: the forward has made the gradient, which has none itself; "
            "torch.ops.tiercel.cross_entropy has a second derivative"
        )
    (grad,) = ctx.saved_tensors
    return {"logits": scaled(grad, by, ctx.backend, owned=False)}


CROSS_ENTROPY = _op(
    spec.CROSS_ENTROPY,
    "grad",
    reference=lambda call: ref.losses(*_options(call)),
    gradient=Gradient(_save_logits, _from_logits),
    out=False,
)
_WITH_GRADIENT = _op(
    spec.WITH_GRADIENT,
    "grad",
    reference=_both,
    gradient=Gradient(_save_gradient, _from_gradient),
    out=False,
)
IN_PLACE = _op(
    spec.IN_PLACE,
    "logits",
    reference=_both_in_place,
    gradient=Gradient(_save_gradient, _from_gradient),
    out=False,
)
_MEAN = Op(
    spec.MEAN,
    sm90=Native(
        _C.cross_entropy_mean_scale,
        _C.cross_entropy_mean_scale_plan,
        ("target", "weight", "scale", "ignore_index"),
        "one block adds the weights",
        rearranged=("weight",),
        launch=lambda native, call: native(
            call.target,
            None if call.weight is None else call.weight.float(),
            call.scale,
            call.ignore_index,
        ),
    ),
    reference=lambda call: ref.mean_scale(call.target, call.weight, call.ignore_index),
    method="torch.sum",
    indices=_target_rule,
    out=False,
)


def check_reduction(op: str, reduction: str) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(
            f"{op}: `reduction` must be one of 'none', 'mean', 'sum', got {reduction!r}"
        )


def constant(tensor: Tensor | None) -> Tensor | None:
    return tensor.detach() if isinstance(tensor, Tensor) and tensor.requires_grad else tensor


@CROSS_ENTROPY.export
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    inplace: bool = False,
    backend: str | None = None,
) -> Tensor:
    """The cross-entropy of rows of logits; the forward computes the gradient in the same pass.

    :func:`torch.nn.functional.cross_entropy` with class indices, in float32 whatever the dtype of
    the logits, with an optional z-loss and softcap. If a gradient is needed, one kernel reads the
    logits once and writes the gradient once; the backward only multiplies it by the gradient of the
    loss, if that is not 1. Works under torch.compile and torch.export, and in CUDA graphs; it never
    synchronises.

    Args:
        logits: ``[T, V]``; float32, bfloat16 or float16, any strides. The kernels take V up to
            442365 in float32 and 884729 in 16 bits.
        target: ``[T]``, int32 or int64: the class of each row. A row of ``ignore_index`` has loss
            and gradient 0, whatever its logits; with any other value outside of ``[0, V)`` both are
            NaN.
        weight: ``[V]``, contiguous, float32 or the dtype of ``logits``: a factor for each class, as
            in PyTorch, or None. No gradient flows to it.
        scale: ``[1]`` or ``[T]``, float32, factor of each row's loss and gradient before the
            reduction, or None: weights of tokens, or 1 / (the number of tokens in an accumulated
            batch) with ``reduction="sum"``. No gradient flows to it.
        ignore_index: The target of the rows that do not count.
        reduction: ``"mean"``: the sum over the sum of the targets' weights, NaN if no row counts;
            ``"sum"``; or ``"none"``: a loss for each row.
        label_smoothing: From 0 to 1, as in PyTorch.
        z_loss: The factor of ``logsumexp(logits)**2``, which is added to each row's loss.
        softcap: Replaces the logits by ``softcap * tanh(logits / softcap)``, or None.
        inplace: Whether the gradient may overwrite ``logits``, which must not be read afterwards.
            If no gradient is needed, nothing is overwritten.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The loss, float32: a scalar, or ``[T]`` with ``reduction="none"``.

    Raises:
        TypeError: A dtype or type is not one of the above.
        ValueError: A shape, stride, device or value does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take such rows.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it;
            ``inplace`` with a leaf; a second derivative is asked for.

    Example:
        >>> loss = tiercel.cross_entropy(head(hidden), labels, z_loss=1e-4, inplace=True)
        >>> loss.backward()
    """
    check_reduction("cross_entropy", reduction)
    if not isinstance(inplace, bool):
        raise TypeError(f"cross_entropy: `inplace` must be a bool, got {type(inplace).__name__}")
    weight, scale = constant(weight), constant(scale)
    op, plain = CROSS_ENTROPY, logits
    if torch.is_grad_enabled() and isinstance(logits, Tensor) and logits.requires_grad:
        op, plain = _WITH_GRADIENT, logits.detach()
        if inplace:
            if logits.is_leaf:
                raise RuntimeError(
                    "cross_entropy: `inplace` must be False for a leaf that requires grad: its "
                    "gradient cannot take the place of its values"
                )
            op = IN_PLACE
    # `explain` asks for the operator that makes the loss.
    if reduction == "mean" and type(backend) is not ExplainRequest:
        mean = _MEAN(plain, target, weight, ignore_index, backend)
        if scale is None:
            scale = mean
        elif isinstance(scale, Tensor) and (scale.dtype, scale.device) == (mean.dtype, mean.device):
            scale = mean * scale  # the operator refuses any other
    results = op(
        logits, target, weight, scale, ignore_index, label_smoothing, z_loss, softcap, backend
    )
    loss: Tensor = results[0] if op is _WITH_GRADIENT else results
    if reduction == "none":
        return loss
    if reduction == "mean" and loss.shape[0] == 0:
        return loss.sum() * torch.nan
    return loss.sum()
