# SPDX-License-Identifier: Apache-2.0
"""The logits of a linear layer and their cross-entropy, a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiercel.core.spec import Call

# Temporary tensors may take the memory of so many rows of logits, or of half of the weight's
# gradient where that is more; not more than that gradient, unless _LEAST_MEMORY is more.
_ENOUGH_ROWS = 2048
_LEAST_MEMORY = 512 << 20
# With fewer rows a chunk's products wait for memory, which reads and writes the sums of gradients.
_LEAST_ROWS = 1024
_ROW_BYTES = 128  # a row of logits begins at a multiple of these: fast for cuBLAS
_TILE = 128  # rows of a chunk are a multiple of these, if there are as many


class Chunks(NamedTuple):
    """How the rows are divided."""

    rows: int  # in a chunk
    count: int
    stride: int  # of a chunk's logits
    wide: bool  # whether the weight's gradient is summed in float32
    apart: bool  # whether the targets' part of it is, where the rest is not
    memory: int  # bytes of temporary tensors


def divide(call: Call, for_weight: bool) -> Chunks:
    """Divides the rows into as few chunks as the memory allows.

    Each chunk reads and writes the sums of the weight's gradient, and rounds them unless they are
    float32. Float32 sums take the memory of the result, too, until they are rounded to it, unless
    they are the result.
    """
    (total, hidden), classes = call.x.shape, call.weight.shape[0]
    size = call.x.element_size()
    row_bytes = -(-classes * size // _ROW_BYTES) * _ROW_BYTES
    result = classes * hidden * size
    memory = min(result, max(result // 2, _ENOUGH_ROWS * row_bytes))
    memory = max(memory, _LEAST_MEMORY)
    most = memory // row_bytes
    kept = for_weight and size == 2 and getattr(call, "weight_grad_dtype", None) is not None
    several = for_weight and size == 2 and total > most and not kept
    wide = kept or (several and call.accum_dtype == torch.float32)
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
    return Chunks(rows, count, row_bytes // size, wide, apart, memory)


def options_of(call: Call) -> tuple[Any, ...]:
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


class _Entropies:
    """The rows' entropies, where they are wanted, and the gradient of each, if there is one."""

    def __init__(self, call: Call, wanted: bool) -> None:
        self.found = call.x.new_empty(call.x.shape[0] if wanted else 0, dtype=torch.float32)
        self._wanted = wanted
        self._by = getattr(call, "entropy_scale", None)

    def arguments(self, at: slice) -> tuple[Tensor | None, ...]:
        """A launch's arguments for a chunk, behind its options."""
        if not self._wanted:
            return ()
        return self.found[at], None if self._by is None else self._by[at]


def _parts(call: Call, chunks: Chunks, scale: Tensor | None) -> Iterator[_Part]:
    """Each chunk with its logits, which lie where those of the one before were."""
    total, classes = call.x.shape[0], call.weight.shape[0]
    memory = call.x.new_empty(chunks.rows, chunks.stride)[:, :classes]
    for start in range(0, total, max(chunks.rows, 1)):
        at = slice(start, min(start + chunks.rows, total))
        x, logits = call.x[at], memory[: at.stop - start]
        _multiply(call.bias, x, call.weight.t(), logits)
        own = scale if scale is None or scale.shape[0] == 1 else scale[at]
        yield _Part(at, x, call.target[at], own, logits)


# (logits, target, class_weight, scale, loss, grad or None, *options): fills loss and grad; with
# (..., entropy, its gradient or None) the entropies, too.
Launch = Callable[..., Any]


def losses(call: Call, launch: Launch, entropy: bool = False) -> Any:
    """The rows' losses; with `entropy`, (losses, entropies)."""
    loss = call.x.new_empty(call.x.shape[:1], dtype=torch.float32)
    entropies = _Entropies(call, entropy)
    for part in _parts(call, divide(call, False), call.scale):
        given = (part.logits, part.target, call.class_weight, part.scale, loss[part.at], None)
        launch(*given, *options_of(call), *entropies.arguments(part.at))
    return (loss, entropies.found) if entropy else loss


def with_gradient(
    call: Call,
    launch: Launch,
    mean_scale: Callable[..., Tensor],
    at_targets: Callable[[Tensor, Tensor, Tensor, Tensor, int], None] | None = None,
    entropy: bool = False,
) -> Any:
    """(loss, gradients of x, weight and bias), and with `entropy` the rows' entropies.

    The gradient of the logits takes their place; both products follow before the next chunk.

    `at_targets` adds as `add_targets`, which is used without it, but leaves out targets of -1.
    """
    scale = call.scale
    if call.mean:
        mean = mean_scale(call.target, call.class_weight, call.ignore_index)
        scale = mean if scale is None else mean * scale
    wants_bias = call.for_bias and call.bias is not None
    loss = call.x.new_empty(call.x.shape[:1], dtype=torch.float32)
    entropies = _Entropies(call, entropy)
    x, weight = call.x, call.weight
    chunks = divide(call, call.for_weight)
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
        given = (grad, part.target, call.class_weight, part.scale, own, grad)
        launch(*given, *options_of(call), *entropies.arguments(part.at))
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
        del own, grad, part, given  # the logits' memory, which what follows needs
    if chunks.apart:
        if at_targets is None:
            add_targets(sums, x, places, of_targets, chunks.memory)
        else:
            # One block adds all tokens of a class: not those that add nothing.
            places = places.masked_fill(call.target == call.ignore_index, -1)
            at_targets(sums, x, places, of_targets, chunks.memory)
    if getattr(call, "weight_grad_dtype", None) is None:
        sums = sums.to(weight.dtype)
    found = (loss.sum(), grad_x, sums, of_bias.to(weight.dtype))
    return (*found, entropies.found) if entropy else found


def add_targets(sums: Tensor, x: Tensor, target: Tensor, by: Tensor, memory: int) -> None:
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
