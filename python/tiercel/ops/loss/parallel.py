# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy with the vocabulary split over the ranks of a process group."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from tiercel.core.spec import Call
from tiercel.ops.loss import reference as ref
from tiercel.ops.loss import spec
from tiercel.ops.loss.chunks import losses, with_gradient
from tiercel.ops.loss.op import CROSS_ENTROPY, IN_PLACE


class _Split(NamedTuple):
    """The inputs of a chunk's losses beside its logits."""

    group: Any
    backend: str | None

    def __call__(
        self,
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
    ) -> None:
        """Fills the losses of rows of which this rank has some of the logits, and their gradient,
        which takes the logits' place.

        Each rank's kernel gives its own log-sum; the ranks exchange it and the target's logit. A
        kernel that knows its own logits alone then writes the gradient, times the rank's share of
        the sum; the element at the target is written again, as only one rank has a 1 there.
        """
        count = logits.shape[1]
        first, whole = dist.get_rank(self.group) * count, dist.get_world_size(self.group) * count
        ignored = target == ignore_index
        wrong = ~ignored & ((target < 0) | (target >= whole))
        here = (target >= first) & (target < first + count) & ~ignored
        place = torch.where(here, target - first, 0).long()
        options = (ignore_index, 0.0, 0.0, softcap, self.backend)
        local = torch.where(ignored, ignore_index, place)
        if 0 <= ignore_index < count:  # a class of this rank cannot stand for "ignored", too
            local, options = torch.where(ignored, -1, place), (-1, *options[1:])
        own = CROSS_ENTROPY(logits, local, None, None, *options)
        at_target = logits.gather(1, place[:, None])[:, 0].float()
        if softcap is not None:
            at_target = softcap * torch.tanh(at_target / softcap)
        own = own + at_target  # the log of the sum of this rank's exponentials
        largest = own.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        sums = torch.stack([(own - largest).exp(), torch.where(here, at_target, 0.0)])
        dist.all_reduce(sums, dist.ReduceOp.SUM, self.group)
        lse = largest + sums[0].log()
        factor = torch.where(wrong, torch.nan, 1.0 if scale is None else scale)
        value = lse - sums[1] + z_loss * lse.square()
        loss.copy_(torch.where(ignored, 0.0, value) * factor)
        if grad is None:
            return
        slope = factor * (1 + 2 * z_loss * lse)
        IN_PLACE(grad, local, None, slope * (own - lse).exp(), *options)
        again = slope * (at_target - lse).exp() - factor * here
        if softcap is not None:
            again = again * (1 - (at_target / softcap).square())
        again = torch.where(ignored, 0.0, again).to(grad.dtype)
        grad.scatter_(1, place[:, None], again[:, None])


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rest: Call) -> Tensor:
        ctx.rest, call = rest, Call(**vars(rest), x=x, weight=weight, bias=bias)
        wants = call.for_x or call.for_weight or call.for_bias
        if wants and rest.reduction != "none":
            found = with_gradient(call, rest.launch, ref.mean_scale)
            ctx.save_for_backward(*found[1:])
            return found[0]  # type: ignore[no-any-return]
        ctx.save_for_backward(x, weight, bias)
        loss = losses(call, rest.launch)
        if rest.reduction == "none":
            return loss
        total = loss.sum()
        if rest.mean:
            total *= ref.mean_scale(rest.target, None, rest.ignore_index)[0]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by: Tensor) -> Any:
        rest = ctx.rest
        if rest.reduction == "none":
            x, weight, bias = ctx.saved_tensors
            call = Call(**vars(rest) | {"x": x, "weight": weight, "bias": bias})
            call.scale = by if rest.scale is None else by * rest.scale
            grads = with_gradient(call, rest.launch, ref.mean_scale)[1:]
        else:
            grads = [(grad * by).to(grad.dtype) for grad in ctx.saved_tensors]
        if rest.for_x:
            dist.all_reduce(grads[0], dist.ReduceOp.SUM, rest.launch.group)
        wanted = (rest.for_x, rest.for_weight, rest.for_bias)
        return *(g if wants else None for g, wants in zip(grads, wanted, strict=True)), None


def split_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    group: Any,
    **options: Any,
) -> Tensor:
    """The loss of all ranks' logits; see `linear_cross_entropy` for the arguments."""
    reduction, backend = options.pop("reduction"), options.pop("backend")
    spec.LINEAR.validate(Call(x=x, weight=weight, target=target, bias=bias, **options))
    if options["label_smoothing"] or options["class_weight"] is not None:
        name = "label_smoothing" if options["label_smoothing"] else "class_weight"
        raise NotImplementedError(f"linear_cross_entropy: `{name}` is not supported with `group`")
    grad = torch.is_grad_enabled()
    wanted = {
        f"for_{name}": grad and t is not None and t.requires_grad
        for name, t in (("x", x), ("weight", weight), ("bias", bias))
    }
    rest = Call(target=target, reduction=reduction, mean=reduction == "mean", **options, **wanted)
    rest.launch = _Split(group, backend)
    loss: Tensor = _Loss.apply(x, weight, bias, rest)
    return loss if x.shape[0] or not rest.mean else loss * torch.nan
