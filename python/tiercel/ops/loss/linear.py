# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a linear layer's results, which never holds all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core import platform
from tiercel.core.index_checks import Index
from tiercel.core.op import Gradient, Op, Python
from tiercel.core.spec import Call
from tiercel.ops._autocast import under_autocast
from tiercel.ops._gradient import grad_dtype
from tiercel.ops._rows import rows
from tiercel.ops.loss import reference as ref
from tiercel.ops.loss import spec
from tiercel.ops.loss.chunks import add_targets, divide, losses, options_of, with_gradient
from tiercel.ops.loss.op import check_reduction, constant, scaled, target_rule

__all__ = ["linear_cross_entropy"]

_METHOD = "torch.mm, torch.log_softmax in float32; a chunk of rows at a time"


# The kernels.


def _ready(call: Call) -> Call:
    """The arguments as the kernels and the products take them."""
    given = dict(call.__dict__)
    if call.class_weight is not None:
        given["class_weight"] = call.class_weight.float()
    for name in ("scale", "entropy_scale"):
        if getattr(call, name, None) is not None:
            given[name] = given[name].contiguous()
    given["x"], given["weight"] = rows(call.x), rows(call.weight)
    return Call(**given)


def _mean_scale(target: Tensor, class_weight: Tensor | None, ignore_index: int) -> Tensor:
    scale = torch.empty(1, dtype=torch.float32, device=target.device)
    _C.cross_entropy_mean_scale(target, class_weight, scale, ignore_index)
    return scale


def _at_targets(sums: Tensor, x: Tensor, target: Tensor, by: Tensor, memory: int) -> None:
    places, order = target.int().sort(stable=True)
    _C.target_rows(sums, x, places, order, by)


def add_rows(sums: Tensor, x: Tensor, target: Tensor, ignore_index: int | None) -> None:
    """Adds each row of x to the row of `sums` that its target names, in float32, rounded once.

    Both are of one 16-bit dtype, `sums` is contiguous; all targets are rows of `sums`.
    """
    x = rows(x)
    by = torch.ones_like(target, dtype=torch.float32)
    ignored = None if ignore_index is None else target == ignore_index
    if platform.why_not(sums.device) is None:
        _at_targets(sums, x, target if ignored is None else target.masked_fill(ignored, -1), by, 0)
        return
    if ignored is not None:
        by = by.masked_fill(ignored, 0)
    add_targets(sums, x, target.long(), by, x.nbytes)


def _load(device: int) -> None:
    _C.cross_entropy_load(device)
    _C.target_rows_load(device)


def _sm90(gradient: bool, entropy: bool = False) -> Python:
    launch = _C.cross_entropy_and_entropy if entropy else _C.cross_entropy

    def run(call: Call) -> Any:
        call = _ready(call)
        if gradient:
            return with_gradient(call, launch, _mean_scale, _at_targets, entropy)
        return losses(call, launch, entropy)

    def plan(call: Call) -> dict[str, Any]:
        """The kernel's plan says if it takes such rows."""
        chunks = divide(call, gradient and call.for_weight)
        one = call.x.new_empty(1, call.weight.shape[0])
        logits = one.expand(chunks.rows, -1)
        loss = call.x.new_empty(chunks.rows, dtype=torch.float32)
        target = call.target[: chunks.rows]
        own = (logits, target, None, None, loss, logits if gradient else None, *options_of(call))
        more = (loss, loss if gradient else None)
        if entropy:
            plan = dict(_C.cross_entropy_and_entropy_plan(*own, *more))
        else:
            plan = dict(_C.cross_entropy_plan(*own))
        kept = str(call.weight.dtype).removeprefix("torch.")
        if chunks.wide or chunks.apart:
            kept = "float32" if chunks.wide else f"{kept}, float32 at targets"
        sums = {"weight_gradient": kept} if gradient else {}
        return {"chunks": chunks.count, "chunk_rows": chunks.rows, **sums, **plan}

    return Python(
        run,
        plan,
        "cuBLAS products around a kernel that reads a chunk's logits once and writes their "
        "gradient in their place",
        load=_load,
    )


# Plain PyTorch.


def _fill(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    scale: Tensor | None,
    loss: Tensor,
    grad: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    entropy: Tensor | None = None,
    entropy_scale: Tensor | None = None,
) -> None:
    options = (ignore_index, label_smoothing, z_loss, softcap)
    loss.copy_(ref.losses(logits, target, class_weight, scale, *options))
    if entropy is not None:
        entropy.copy_(ref.entropies(logits, target, ignore_index, softcap))
    if grad is not None:
        given = (logits, target, class_weight, scale, *options, entropy_scale)
        grad.copy_(ref.gradient(*given))


def _reference(call: Call, entropy: bool = False) -> Any:
    """Differentiable, so that it cannot write to tensors that are there."""
    most = max(divide(call, False).rows, 1)
    parts = [
        _reference_part(call, slice(at, at + most), entropy)
        for at in range(0, max(call.x.shape[0], 1), most)
    ]
    found = tuple(torch.cat(each) for each in zip(*parts, strict=True))
    return found if entropy else found[0]


def _reference_part(call: Call, at: slice, entropy: bool) -> tuple[Tensor, ...]:
    scale, target = call.scale, call.target[at]
    if scale is not None and scale.shape[0] > 1:
        scale = scale[at]
    logits = torch.nn.functional.linear(call.x[at], call.weight, call.bias)
    loss = ref.losses(logits, target, call.class_weight, scale, *options_of(call))
    if not entropy:
        return (loss,)
    return loss, ref.entropies(logits, target, call.ignore_index, call.softcap)


def _target_rule(call: Call) -> list[Index]:
    return target_rule(call.target, call.weight.shape[0], call.ignore_index)


# Derivatives.

_TENSORS = ("x", "weight", "target", "bias", "class_weight", "scale")


def _save_arguments(ctx: Any, call: Call, results: Any) -> None:
    ctx.options, ctx.backend = (*options_of(call), call.accum_dtype), call.backend
    ctx.weight_grad_dtype = grad_dtype(call.weight)
    ctx.save_for_backward(*(getattr(call, name) for name in _TENSORS))


def _from_arguments(
    ctx: Any, by: Tensor | None, by_entropy: Tensor | None = None
) -> dict[str, Tensor | None]:
    """Makes the logits again, and their gradient with the gradients of the losses, and of the
    entropies, in it."""
    if by is None:
        if by_entropy is None:
            return {}
        by = torch.zeros_like(by_entropy)
    x, weight, target, bias, class_weight, scale = ctx.saved_tensors
    wanted = {name: ctx.wants[name] for name in ("x", "weight", "bias")}
    if scale is not None:
        by = by * scale
    if torch.is_grad_enabled():  # PyTorch can differentiate its own formula
        logits = torch.nn.functional.linear(x, weight, bias)
        grad = ref.gradient(logits, target, class_weight, by, *ctx.options[:-1], by_entropy)
        return {
            "x": grad @ weight if wanted["x"] else None,
            "weight": grad.t() @ x if wanted["weight"] else None,
            "bias": grad.sum(0) if wanted["bias"] else None,
        }
    given = (x, weight, target, bias, class_weight, by, *ctx.options, False, *wanted.values())
    if by_entropy is None:
        _, *grads = _WITH_GRADIENT(*given, ctx.weight_grad_dtype, ctx.backend)
    else:
        more = (ctx.weight_grad_dtype, by_entropy, ctx.backend)
        _, *grads, _ = _AND_ENTROPY_WITH_GRADIENT(*given, *more)
    return {name: grad if wanted[name] else None for name, grad in zip(wanted, grads, strict=True)}


def _save_gradients(ctx: Any, call: Call, results: Any) -> None:
    ctx.backend = call.backend
    ctx.mark_non_differentiable(*results[1:])
    ctx.save_for_backward(*results[1:4])


def _from_gradients(ctx: Any, by: Tensor | None, *_: Any) -> dict[str, Tensor | None]:
    if by is None:
        return {}
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy: the forward has made the gradients, which have none themselves; "
            'reduction="none" has a second derivative'
        )
    found: dict[str, Tensor | None] = {}
    for name, grad in zip(("x", "weight", "bias"), ctx.saved_tensors, strict=True):
        if ctx.wants[name]:
            matrix = grad if grad.dim() == 2 else grad[None]
            found[name] = scaled(matrix, by.view(1), ctx.backend, owned=False).view(grad.shape)
    return found


_LOSSES = Op(
    spec.LINEAR,
    sm90=_sm90(False),
    reference=_reference,
    method=_METHOD,
    gradient=Gradient(_save_arguments, _from_arguments),
    indices=_target_rule,
    out=False,
)
_WITH_GRADIENT = Op(
    spec.LINEAR_WITH_GRADIENT,
    sm90=_sm90(True),
    reference=lambda call: with_gradient(call, _fill, ref.mean_scale),
    method=_METHOD,
    gradient=Gradient(_save_gradients, _from_gradients),
    indices=_target_rule,
    out=False,
)

_AND_ENTROPY = Op(
    spec.LINEAR_AND_ENTROPY,
    sm90=_sm90(False, entropy=True),
    reference=lambda call: _reference(call, entropy=True),
    method=_METHOD,
    gradient=Gradient(_save_arguments, _from_arguments),
    indices=_target_rule,
    out=False,
)
_AND_ENTROPY_WITH_GRADIENT = Op(
    spec.LINEAR_AND_ENTROPY_WITH_GRADIENT,
    sm90=_sm90(True, entropy=True),
    reference=lambda call: with_gradient(call, _fill, ref.mean_scale, entropy=True),
    method=_METHOD,
    gradient=Gradient(_save_gradients, _from_gradients),
    indices=_target_rule,
    out=False,
)


@_LOSSES.export
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    scale: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    accum_dtype: torch.dtype | None = None,
    return_entropy: bool = False,
    group: Any = None,
    backend: str | None = None,
) -> Any:
    """The cross-entropy of ``x @ weight.T + bias``, without ever storing all logits.

    This is :func:`tiercel.cross_entropy` of a language model's output layer, whose logits are often
    the largest tensor of a training step. The logits are computed a chunk of rows at a time. If a
    gradient is needed, the forward also computes those of ``x``, ``weight`` and ``bias`` from each
    chunk; the backward only multiplies them by the gradient of the loss, if that is not 1.
    Temporary tensors take the memory of 2048 rows of logits, or of half the weight's gradient where
    that is more; not more than that gradient, or 512 MiB. The products are cuBLAS's. Works under
    torch.compile, torch.autocast and activation checkpointing, and in CUDA graphs; it never
    synchronises.

    Outside of compiled graphs, a 16-bit leaf ``weight`` with ``weight.grad_dtype = torch.float32``,
    where PyTorch has that, gets an unrounded float32 gradient, for accumulation over several
    backwards.

    Args:
        x: ``[T, H]``; float32, bfloat16 or float16.
        weight: ``[V, H]``, the dtype of ``x``. The kernels take V up to 442365 in float32 and
            884729 in 16 bits.
        target: ``[T]``, int32 or int64: the class of each row. A row of ``ignore_index`` has loss
            and gradient 0; with any other value outside of ``[0, V)`` both are NaN.
        bias: ``[V]``, the dtype of ``x``, or None.
        class_weight: ``[V]``, contiguous, float32 or the dtype of ``x``: a factor for each class,
            the ``weight`` of :func:`tiercel.cross_entropy`, or None. No gradient flows to it.
        scale: ``[1]`` or ``[T]``, float32, factor of each row's loss and gradient before the
            reduction, or None. No gradient flows to it.
        ignore_index: The target of the rows that do not count.
        reduction: ``"mean"``: the sum over the sum of the targets' weights, NaN if no row counts;
            ``"sum"``; or ``"none"``: a loss for each row, whose backward recomputes the logits.
        label_smoothing: From 0 to 1, as in PyTorch.
        z_loss: The factor of ``logsumexp(logits)**2``, which is added to each row's loss.
        softcap: Replaces the logits by ``softcap * tanh(logits / softcap)``, or None.
        accum_dtype: The dtype in which the chunks' gradients of a 16-bit ``weight`` are added.
            None: float32 where the memory above suffices; otherwise the dtype of ``weight``, with
            only the targets' part in float32. ``torch.float32``: float32, with the memory of two
            weight gradients, or 1 GiB where that is smaller. It has no effect with a single chunk.
        return_entropy: Whether to return the entropy of each row's distribution, too, from the same
            pass over the logits. Not with ``label_smoothing`` or ``group``.
        group: A process group of :mod:`torch.distributed` whose ranks hold equal parts of the
            classes, in order. ``weight`` and ``bias`` are this rank's part; ``x`` and ``target``
            (which counts all classes) are the same on all ranks, and so are the loss and the
            gradient of ``x``. Not with ``label_smoothing``, ``class_weight`` or in compiled graphs.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        The loss, float32: a scalar, or ``[T]`` with ``reduction="none"``. With ``return_entropy``,
        (loss, entropy): ``-sum(p log p)`` in nats of the softmax of each row's logits, after
        ``softcap``; ``[T]`` float32, 0 in rows of ``ignore_index``. It is differentiable with
        ``reduction="none"``; with a sum or mean it is a constant.

    Raises:
        TypeError: A dtype or type is not one of the above.
        ValueError: A shape, stride, device or value does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take so many classes;
            an option is not supported with ``group``.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; a second
            derivative of a sum or mean is asked for.

    Example:
        >>> loss = tiercel.linear_cross_entropy(hidden, head.weight, labels)
        >>> loss.backward()
    """
    check_reduction("linear_cross_entropy", reduction)
    x, weight, bias = under_autocast(x, weight, bias)
    class_weight, scale = constant(class_weight), constant(scale)
    if group is not None:
        if return_entropy:
            raise NotImplementedError(
                "linear_cross_entropy: `return_entropy` is not supported with `group`"
            )
        from tiercel.ops.loss.parallel import split_linear_cross_entropy

        return split_linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            group,
            class_weight=class_weight,
            scale=scale,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            accum_dtype=accum_dtype,
            backend=backend,
        )
    given = (x, weight, target, bias, class_weight, scale)
    options = (ignore_index, label_smoothing, z_loss, softcap, accum_dtype)
    wanted = [isinstance(t, Tensor) and t.requires_grad for t in (x, weight, bias)]
    if (
        reduction == "none"
        or not (torch.is_grad_enabled() and any(wanted))
        or torch._C._are_functorch_transforms_active()
    ):
        found = (_AND_ENTROPY if return_entropy else _LOSSES)(*given, *options, backend)
        loss, entropy = found if return_entropy else (found, None)
        if reduction != "none":
            loss = loss.sum()
            entropy = None if entropy is None else entropy.detach()
        if reduction == "mean":
            loss = loss * ref.mean_scale(target, class_weight, ignore_index)[0]
        return (loss, entropy) if return_entropy else loss
    mean = reduction == "mean"
    arguments = (*given, *options, mean, *wanted, grad_dtype(weight))
    if return_entropy:
        loss, *_, entropy = _AND_ENTROPY_WITH_GRADIENT(*arguments, None, backend)
    else:
        loss, *_ = _WITH_GRADIENT(*arguments, backend)
    loss = loss if x.shape[0] or not mean else loss * torch.nan
    return (loss, entropy) if return_entropy else loss
