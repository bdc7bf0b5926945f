# SPDX-License-Identifier: Apache-2.0
"""The loss of a causal language model in training, without its logits.

The model's own forward runs. Its output layer returns the rows that it would multiply, and the loss
function, which gets them as logits, computes their loss with the layer's weight. Scaled logits
become scaled rows; a softcap is removed from the configuration meanwhile and passed to the loss.
State is per thread: one thread may train a model while another one evaluates it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import MoeModelOutputWithPast

import tiercel
from tiercel.integrations.transformers.embedding import lend, lent_table, take_back
from tiercel.integrations.transformers.forwards import is_replaced
from tiercel.integrations.transformers.linear import linear_forward

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_SOFTCAP = "final_logit_softcapping"


class _Running(threading.local):
    """This thread's forward in training: the output layer, which hands on its rows, and the
    softcap."""

    head: nn.Module | None = None
    cap: float | None = None


_running = _Running()


def use_linear_loss(model: PreTrainedModel) -> Callable[[], None] | str:
    """Replaces the forwards of the model and its output layer, and its loss function.

    Returns:
        A function that restores the model, or the reason why it was not changed.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its output layer is {type(head).__name__}, no Linear"
    if is_replaced(model) or is_replaced(head):
        return "its forward is replaced already"
    if model.loss_function is not ForCausalLMLoss:
        return "its loss is not that of a causal language model"
    place = next((name for name, module in model._modules.items() if module is head), None)
    if place is None or not _agrees(model, place):
        return "it computes something else of its logits"
    return _install(model, place)


def _install(model: PreTrainedModel, place: str) -> Callable[[], None]:
    """`place` is the name of the output layer."""
    own, head = type(model).forward, model._modules[place]
    names = tuple(inspect.signature(own).parameters)[1:]

    # All that belongs to this model comes by `self`: a deep copy of the model has its own.
    @functools.wraps(own)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, self._modules[place], dict(zip(names, args, strict=False)) | kwargs)

    def loss_function(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Tensor:
        return _loss(self._modules[place], *args, **kwargs)

    model.forward = types.MethodType(forward, model)
    model.loss_function = types.MethodType(loss_function, model)
    head.forward = types.MethodType(_head_forward, head)

    def undo() -> None:
        for module, name in ((model, "forward"), (model, "_loss_function"), (head, "forward")):
            vars(module).pop(name, None)

    return undo


def _head_forward(
    self: nn.Linear,
    x: Tensor,
    loss: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None,
) -> Tensor:
    if loss is not None:
        return loss(x, self.weight, self.bias)
    return x if _running.head is self else linear_forward(self, x)


# A bound method is pickled by the name of its function: as the module's own forward.
_head_forward.__name__ = "forward"


def _forward(self: PreTrainedModel, head: Any, given: dict[str, Any]) -> Any:
    own = type(self).forward
    labelled = given.get("labels") is not None or given.get("shift_labels") is not None
    if not (self.training and labelled and head.weight.dtype in _FLOATS):
        return own(self, **given)
    as_tuple = given.pop("return_dict", None) is False
    cap = getattr(self.config, _SOFTCAP, None)
    before = _running.head, _running.cap
    _running.head, _running.cap = head, cap
    compiles = torch.compiler.is_compiling()
    model = self if cap is None or compiles else _without_cap(self)
    if cap is not None and compiles:
        setattr(self.config, _SOFTCAP, None)
    lent = None if compiles else lend(self, head)
    try:
        outputs = own(model, **given, return_dict=True)
    finally:
        if not compiles:
            take_back(lent)
        _running.head, _running.cap = before
        if cap is not None and compiles:
            setattr(self.config, _SOFTCAP, cap)
    outputs = type(outputs)(**{name: v for name, v in outputs.items() if name != "logits"})
    return outputs.to_tuple() if as_tuple else outputs


def _without_cap(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares the modules and has its own configuration, without the softcap."""
    small = copy.copy(model)
    small.config = copy.copy(model.config)
    setattr(small.config, _SOFTCAP, None)
    return small


def _loss(
    head: Any,
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' loss of causal language models; of rows, where the output layer gave them."""
    if _running.head is not head:
        return ForCausalLMLoss(  # type: ignore[no-any-return]
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    scale = None
    if num_items_in_batch is not None:
        count = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=logits.device)
        scale = count.reciprocal().view(1)

    def loss(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return tiercel.linear_cross_entropy(  # type: ignore[no-any-return]
            x if torch.is_autocast_enabled(x.device.type) else x.to(weight.dtype),
            lent_table(head, weight),
            target,
            bias,
            scale=scale,
            ignore_index=ignore_index,
            reduction="mean" if scale is None else "sum",
            softcap=_running.cap,
        )

    # By a call of the layer, whose hooks gather a weight that is sharded.
    return head(logits.reshape(-1, logits.shape[-1]), loss=loss)  # type: ignore[no-any-return]


class _Body(nn.Module):
    """Stands for a model's layers."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


_CLASSES = 16


def _agrees(model: PreTrainedModel, place: str) -> bool:
    """Runs the forward with a small output layer, and no other layers, in both ways."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator).requires_grad_()
    weight = nn.Parameter(3 * torch.randn(_CLASSES, 8, generator=generator))
    bias: Any = model._modules[place].bias
    bias = None if bias is None else nn.Parameter(torch.randn(_CLASSES, generator=generator))
    labels = torch.randint(_CLASSES, (2, 5), generator=generator)
    labels[1, 2] = -100
    leaves = [hidden, weight] if bias is None else [hidden, weight, bias]

    def results(replaced: bool, **options: Any) -> list[Tensor]:
        small, layer = copy.copy(model), nn.Linear(8, _CLASSES, device="meta")
        layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
        layers = {model.base_model_prefix: _Body(hidden), place: layer}
        small._modules = {**model._modules, **layers}
        vars(small).pop("forward", None)  # it would be the model's
        small.training, small.config = True, copy.copy(model.config)
        small.config.vocab_size = small.vocab_size = _CLASSES
        small.config.output_router_logits = False
        if replaced:
            _install(small, place)
        with torch.enable_grad(), tiercel.use_backend("ref"):
            outputs = small.forward(input_ids=labels, labels=labels, **options)
            return [outputs.loss.detach(), *torch.autograd.grad(outputs.loss, leaves)]

    try:
        for options in ({}, {"num_items_in_batch": 7}):
            for found, due in zip(results(True, **options), results(False, **options), strict=True):
                torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5)
    except Exception:  # whatever a stranger's forward raises
        return False
    return True
