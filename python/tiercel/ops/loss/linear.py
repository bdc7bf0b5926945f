# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a linear layer's results, which never holds all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index
from tiercel.core.op import Gradient, Op, Python
from tiercel.core.spec import Call
from tiercel.ops._rows import rows
from tiercel.ops.loss import reference as ref
from tiercel.ops.loss import spec
from tiercel.ops.loss.op import check_reduction, constant, scaled, target_rule

__all__ = ["linear_cross_entropy"]

# Temporary tensors may take as much memory as the weight's gradient, or this many bytes.
_LEAST_MEMORY = 512 << 20
# With fewer rows a chunk's products wait for memory, which reads and writes the sums of gradients.
_LEAST_ROWS = 1024
_ROW_BYTES = 128  # a row of logits begins at a multiple of these: fast for cuBLAS
_TILE = 128  # rows of a chunk are a multiple of these, if there are as many

_METHOD = "torch.mm, torch.log_softmax in float32; a chunk of rows at a time"


class _Chunks(NamedTuple):
    """How the rows are divided."""

    rows: int  # in a chunk
    count: int
    stride: int  # of a chunk's logits
    wide: bool  # whether the weight's gradient is summed in float32
    apart: bool  # whether the targets' part of it is, where the rest is not
    memory: int  # bytes of temporary tensors


def _chunks(call: Call, for_weight: bool) -> _Chunks:
    """As few chunks as the memory allows: each reads and writes the sums of the weight's gradient,
    and rounds them unless they are float32. Float32 sums take the memory of the result, too, until
    they are rounded to it."""
    (total, hidden), classes = call.x.shape, call.weight.shape[0]
    size = call.x.element_size()
    row_bytes = -(-classes * size // _ROW_BYTES) * _ROW_BYTES
    memory, result = max(classes * hidden * size, _LEAST_MEMORY), classes * hidden * size
    most = memory // row_bytes
    several = for_weight and size == 2 and total > most
    wide = several and call.accum_dtype == torch.float32
    if several and call.accum_dtype is None:
        left = (memory - result) // row_bytes
        wide = 2 * result <= memory and left >= min(total, _LEAST_ROWS)
        most = left if wide else most
    apart = several and not wide and call.accum_dtype is None
    if most >= _TILE:
        most -= most % _TILE
    most = max(most, 1)
    count = max(-(-total // most), 1)
    even = -(-total // count)
    rows = min(-(-even // _TILE) * _TILE, most, total)
    return _Chunks(rows, count, row_bytes // size, wide, apart, memory)


def _options(call: Call) -> tuple[Any, ...]:
    return (call.ignore_index, call.label_smoothing, call.z_loss, call.softcap)


def _multiply(bias: Tensor | None, a: Tensor, b: Tensor, out: Tensor) -> None:
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def _add_product(to: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Adds a @ b, whose sums are float32, to `to`."""
    if to.dtype == a.dtype:
        to.addmm_(a, b, beta=0 if first else 1)
    elif not to.is_cuda:
        to.addmm_(a.float(), b.float(), beta=0 if first else 1)
    elif first:
        torch.mm(a, b, out_dtype=to.dtype, out=to)
    else:
        torch.addmm(to, a, b, out_dtype=to.dtype, out=to)


class _Part(NamedTuple):
    """A chunk: its rows of tensors."""

    at: slice
    x: Tensor
    target: Tensor
    scale: Tensor | None
    logits: Tensor


def _parts(call: Call, chunks: _Chunks, scale: Tensor | None) -> Iterator[_Part]:
    """Each chunk with its logits, which lie where those of the one before were."""
    total, classes = call.x.shape[0], call.weight.shape[0]
    memory = call.x.new_empty(chunks.rows, chunks.stride)[:, :classes]
    for start in range(0, total, max(chunks.rows, 1)):
        at = slice(start, min(start + chunks.rows, total))
        x, logits = call.x[at], memory[: at.stop - start]
        _multiply(call.bias, x, call.weight.t(), logits)
        own = scale if scale is None or scale.shape[0] == 1 else scale[at]
        yield _Part(at, x, call.target[at], own, logits)


# (logits, target, class_weight, scale, loss, grad or None, *options): fills loss and grad.
_Launch = Callable[..., Any]


def _losses(call: Call, launch: _Launch) -> Tensor:
    loss = call.x.new_empty(call.x.shape[:1], dtype=torch.float32)
    for part in _parts(call, _chunks(call, False), call.scale):
        own = loss[part.at]
        launch(part.logits, part.target, call.class_weight, part.scale, own, None, *_options(call))
    return loss


def _with_gradient(call: Call, launch: _Launch, mean_scale: Callable[..., Tensor]) -> Any:
    """The gradient of the logits takes their place; both products follow before the next chunk."""
    scale = call.scale
    if call.mean:
        mean = mean_scale(call.target, call.class_weight, call.ignore_index)
        scale = mean if scale is None else mean * scale
    wants_bias = call.for_bias and call.bias is not None
    loss = call.x.new_empty(call.x.shape[:1], dtype=torch.float32)
    x, weight = call.x, call.weight
    chunks = _chunks(call, call.for_weight)
    grad_x = x.new_empty(x.shape if call.for_x else 0)
    sums = weight.new_zeros(0)
    if call.for_weight:
        make = torch.empty if x.shape[0] else torch.zeros
        dtype = torch.float32 if chunks.wide else weight.dtype
        sums = make(weight.shape, dtype=dtype, device=weight.device)
    of_bias = x.new_zeros(weight.shape[0] if wants_bias else 0, dtype=torch.float32)
    of_targets = x.new_empty(x.shape[:1] if chunks.apart else 0, dtype=torch.float32)
    places = call.target.clamp(0, weight.shape[0] - 1).long() if chunks.apart else call.target
    for part in _parts(call, chunks, scale):
        own, grad = loss[part.at], part.logits
        launch(grad, part.target, call.class_weight, part.scale, own, grad, *_options(call))
        if call.for_x:
            torch.mm(grad, weight, out=grad_x[part.at])
        if wants_bias:
            of_bias += grad.sum(0, dtype=torch.float32)
        if chunks.apart:
            place = places[part.at, None]
            of_targets[part.at] = grad.gather(1, place)[:, 0]
            grad.scatter_(1, place, 0)
        if call.for_weight:
            _add_product(sums, grad.t(), part.x, first=part.at.start == 0)
        del own, grad, part  # the logits' memory, which what follows needs
    if chunks.apart:
        _add_targets(sums, x, places, of_targets, chunks.memory)
    return loss.sum(), grad_x, sums.to(weight.dtype), of_bias.to(weight.dtype)


def _add_targets(sums: Tensor, x: Tensor, target: Tensor, by: Tensor, memory: int) -> None:
    """Adds ``by[t] * x[t]`` to row target[t] of `sums`, in float32, rounded once for each row.

    These are few numbers, and most of the gradient: the rounding of the others with each chunk
    matters little. The sums of equal targets are in the order of the rows.
    """
    total = target.shape[0]
    number = torch.arange(total, device=target.device)
    target, order = target.sort(stable=True)
    starts = torch.ones_like(target, dtype=torch.bool)
    starts[1:] = target[1:] != target[:-1]
    # Row i of what follows is of the i-th class that occurs; behind the last, of the first again.
    begin = torch.searchsorted(starts.cumsum(0) - 1, number)
    row = torch.where(begin < total, number, 0)
    classes = target[begin.clamp(max=total - 1)][row]
    by = by[order]
    step = max(memory // (32 * total), 1)  # 20 bytes for each element, and room for alignment
    for column in range(0, sums.shape[1], step):
        part = sums[:, column : column + step]
        wide = x[:, column : column + step].float()
        own = torch.nn.functional.embedding_bag(
            order, wide, begin, mode="sum", per_sample_weights=by
        )
        del wide
        own = own[row].add_(part[classes])
        part.index_copy_(0, classes, own.to(part.dtype))


# The kernels.


def _ready(call: Call) -> Call:
    """The arguments as the kernels and the products take them."""
    given = dict(call.__dict__)
    if call.class_weight is not None:
        given["class_weight"] = call.class_weight.float()
    if call.scale is not None:
        given["scale"] = call.scale.contiguous()
    given["x"], given["weight"] = rows(call.x), rows(call.weight)
    return Call(**given)


def _mean_scale(target: Tensor, class_weight: Tensor | None, ignore_index: int) -> Tensor:
    scale = torch.empty(1, dtype=torch.float32, device=target.device)
    _C.cross_entropy_mean_scale(target, class_weight, scale, ignore_index)
    return scale


def _sm90(gradient: bool) -> Python:
    def run(call: Call) -> Any:
        call = _ready(call)
        if gradient:
            return _with_gradient(call, _C.cross_entropy, _mean_scale)
        return _losses(call, _C.cross_entropy)

    def plan(call: Call) -> dict[str, Any]:
        """The kernel's plan says if it takes such rows."""
        chunks = _chunks(call, gradient and call.for_weight)
        one = call.x.new_empty(1, call.weight.shape[0])
        logits = one.expand(chunks.rows, -1)
        loss = call.x.new_empty(chunks.rows, dtype=torch.float32)
        target = call.target[: chunks.rows]
        own = (logits, target, None, None, loss, logits if gradient else None, *_options(call))
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
        load=_C.cross_entropy_load,
    )


# Plain PyTorch.


def _fill(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    scale: Tensor | None,
    loss: Tensor,
    grad: Tensor | None,
    *options: Any,
) -> None:
    loss.copy_(ref.losses(logits, target, class_weight, scale, *options))
    if grad is not None:
        grad.copy_(ref.gradient(logits, target, class_weight, scale, *options))


def _reference(call: Call) -> Tensor:
    """Differentiable, so that it cannot write to tensors that are there."""
    most = max(_chunks(call, False).rows, 1)
    scale = call.scale
    losses = [
        ref.linear_losses(
            call.x[at : at + most],
            call.weight,
            call.target[at : at + most],
            call.bias,
            call.class_weight,
            scale if scale is None or scale.shape[0] == 1 else scale[at : at + most],
            *_options(call),
        )
        for at in range(0, max(call.x.shape[0], 1), most)
    ]
    return torch.cat(losses)


def _target_rule(call: Call) -> list[Index]:
    return target_rule(call.target, call.weight.shape[0], call.ignore_index)


# Derivatives.

_TENSORS = ("x", "weight", "target", "bias", "class_weight", "scale")


def _save_arguments(ctx: Any, call: Call, loss: Tensor) -> None:
    ctx.options, ctx.backend = (*_options(call), call.accum_dtype), call.backend
    ctx.save_for_backward(*(getattr(call, name) for name in _TENSORS))


def _from_arguments(ctx: Any, by: Tensor | None) -> dict[str, Tensor | None]:
    """Makes the logits again, and their gradient with the gradients of the losses in it."""
    if by is None:
        return {}
    x, weight, target, bias, class_weight, scale = ctx.saved_tensors
    wanted = {name: ctx.wants[name] for name in ("x", "weight", "bias")}
    if scale is not None:
        by = by * scale
    if torch.is_grad_enabled():  # PyTorch can differentiate its own formula
        logits = torch.nn.functional.linear(x, weight, bias)
        grad = ref.gradient(logits, target, class_weight, by, *ctx.options[:-1])
        return {
            "x": grad @ weight if wanted["x"] else None,
            "weight": grad.t() @ x if wanted["weight"] else None,
            "bias": grad.sum(0) if wanted["bias"] else None,
        }
    _, *grads = _WITH_GRADIENT(
        x,
        weight,
        target,
        bias,
        class_weight,
        by,
        *ctx.options,
        False,
        *wanted.values(),
        ctx.backend,
    )
    return {name: grad if wanted[name] else None for name, grad in zip(wanted, grads, strict=True)}


def _save_gradients(ctx: Any, call: Call, results: Any) -> None:
    ctx.backend = call.backend
    ctx.mark_non_differentiable(*results[1:])
    ctx.save_for_backward(*results[1:])


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
    reference=lambda call: _with_gradient(call, _fill, ref.mean_scale),
    method=_METHOD,
    gradient=Gradient(_save_gradients, _from_gradients),
    indices=_target_rule,
    out=False,
)


def _under_autocast(x: Any, *others: Any) -> tuple[Any, ...]:
    """The tensors in the dtype of products under torch.autocast."""
    given = (x, *others)
    if not isinstance(x, Tensor) or not torch.is_autocast_enabled(x.device.type):
        return given
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in given
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
    backend: str | None = None,
) -> Tensor:
    """The cross-entropy of ``x @ weight.T + bias``, which never holds all of these logits.

    :func:`tiercel.cross_entropy` of a language model's last layer, for which the logits are the
    largest tensor of a training step. They are made a chunk of rows at a time; with a gradient
    wanted, the forward makes those of ``x``, ``weight`` and ``bias`` from each chunk at once, and
    the backward has nothing left to do, or multiplies by the gradient of the loss where that is not
    1. Temporary tensors take at most as much memory as the weight's gradient, or 512 MiB where that
    is smaller. The products are cuBLAS's. Works under torch.compile, torch.autocast and activation
    checkpointing, and in CUDA graphs; it never synchronises.

    Args:
        x: ``[T, H]``; float32, bfloat16 or float16.
        weight: ``[V, H]``, the dtype of ``x``. The kernels take V up to 442365 in float32 and
            884729 in 16 bits.
        target: ``[T]``, int32 or int64: the class of each row. A row of ``ignore_index`` has loss
            and gradient 0; with any other value outside of ``[0, V)`` both are NaN.
        bias: ``[V]``, the dtype of ``x``, or None.
        class_weight: ``[V]``, contiguous, float32 or the dtype of ``x``: a factor for each class,
            the ``weight`` of :func:`tiercel.cross_entropy`, or None. No gradient flows to it.
        scale: ``[1]`` or ``[T]``, float32, which the rows' losses and gradients are multiplied by
            before the reduction, or None. No gradient flows to it.
        ignore_index: The target of the rows that do not count.
        reduction: ``"mean"``: the sum over the sum of the targets' weights, NaN if no row counts;
            ``"sum"``; or ``"none"``: a loss for each row, whose backward makes the logits again.
        label_smoothing: From 0 to 1, as in PyTorch.
        z_loss: The factor of ``logsumexp(logits)**2``, which is added to each row's loss.
        softcap: ``softcap * tanh(logits / softcap)`` takes the logits' place, or None.
        accum_dtype: The dtype in which chunks' gradients of a 16-bit ``weight`` are added. None:
            float32 where the memory above suffices, else the weight's but for the targets' part,
            which is float32. ``torch.float32``: float32, with up to twice as much memory. It makes
            no difference to one chunk.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        The loss, float32: a scalar, or ``[T]`` with ``reduction="none"``.

    Raises:
        TypeError: A dtype or type is not one of the above.
        ValueError: A shape, stride, device or value does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take so many classes.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it; a second
            derivative of a sum or mean is asked for.

    Example:
        >>> loss = tiercel.linear_cross_entropy(hidden, head.weight, labels)
        >>> loss.backward()
    """
    check_reduction("linear_cross_entropy", reduction)
    x, weight, bias = _under_autocast(x, weight, bias)
    class_weight, scale = constant(class_weight), constant(scale)
    given = (x, weight, target, bias, class_weight, scale)
    options = (ignore_index, label_smoothing, z_loss, softcap, accum_dtype)
    wanted = [isinstance(t, Tensor) and t.requires_grad for t in (x, weight, bias)]
    if (
        reduction == "none"
        or not (torch.is_grad_enabled() and any(wanted))
        or torch._C._are_functorch_transforms_active()
    ):
        loss: Tensor = _LOSSES(*given, *options, backend)
        if reduction == "none":
            return loss
        total = loss.sum()
        if reduction == "sum":
            return total
        return total * ref.mean_scale(target, class_weight, ignore_index)[0]
    mean = reduction == "mean"
    total, *_ = _WITH_GRADIENT(*given, *options, mean, *wanted, backend)
    return total if x.shape[0] or not mean else total * torch.nan
