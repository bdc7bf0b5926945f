# SPDX-License-Identifier: Apache-2.0
"""Token embeddings in training: the gradient of the table without a second tensor of its size.

PyTorch fills a table with zeros, adds the tokens' rows to it, and adds that table to the gradient
of the output layer where both share the weight. Here the table is passed on to the output layer, so
that the output layer's gradient arrives first, and the tokens' rows are added to it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tiercel.integrations.transformers.forwards import is_replaced
from tiercel.ops._gradient import grad_dtype
from tiercel.ops.loss.linear import add_rows

_DTYPES = (torch.bfloat16, torch.float16)


class _Lent(threading.local):
    """While this thread runs a model's forward: the embedding, the output layer, and in a list the
    table that the one leaves for the other."""

    loan: tuple[Any, Any, list[Tensor]] | None = None


_lent = _Lent()


def why_not_embedding(module: nn.Module) -> str | None:
    """Why a module is no embedding for `embedding_forward`; empty if it does not look like one."""
    if type(module) is not nn.Embedding:  # subclasses compute something else of the rows
        return ""
    if is_replaced(module):
        return "its forward is replaced already"
    if type(module.weight) is not nn.Parameter:
        return "its weight is no plain parameter"
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "it has an option that changes its weight or gradient"
    return None


def embedding_forward(self: nn.Module, ids: Tensor) -> Tensor:
    """That of `nn.Embedding`; in training of 16-bit tables as one function of autograd."""
    weight: Any = self.weight
    if not _trains(ids, weight):
        return type(self).forward(self, ids)  # type: ignore[no-any-return]
    rows, table = _Rows.apply(ids, weight, self.padding_idx)
    loan = _lent.loan
    if loan is not None and loan[0] is self and not loan[2]:
        loan[2].append(table)
    return rows  # type: ignore[no-any-return]


# A bound method is pickled by the name of its function: as the module's own forward.
embedding_forward.__name__ = "forward"


def lend(model: Any, head: Any) -> Any:
    """Makes `lent_table` of the output layer what the embedding looks rows up in, where they share
    a weight, until `take_back` of what this returns."""
    before, _lent.loan = _lent.loan, None
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = None
    if not isinstance(embedding, nn.Module):  # a model need not have one
        return before
    forward = getattr(vars(embedding).get("forward"), "__func__", None)
    if forward is not embedding_forward or embedding.weight is not head.weight:
        return before
    if grad_dtype(head.weight) is not None:  # it is a leaf's
        return before
    _lent.loan = embedding, head, []
    return before


def take_back(before: Any) -> None:
    _lent.loan = before


def lent_table(head: nn.Module, weight: Tensor) -> Tensor:
    """The embedding's table where it is this weight, else the weight."""
    loan = _lent.loan
    for table in loan[2] if loan is not None and loan[1] is head else ():
        if table.shape == weight.shape and table.data_ptr() == weight.data_ptr():
            return table  # type: ignore[no-any-return]
    return weight


def _trains(ids: Tensor, weight: Any) -> bool:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if type(ids) is not Tensor or type(weight) is not nn.Parameter or ids.numel() == 0:
        return False
    if not weight.requires_grad or weight.dtype not in _DTYPES:
        return False
    # Inside a dual level of forward-mode AD, too.
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def _is_transformed(*grads: Tensor | None) -> bool:
    """True if gradients are differentiated, or vectorized: by functorch or by `is_grads_batched`,
    whose tensors have no memory that a kernel can read."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    batched = torch._C._functorch.is_legacy_batchedtensor
    return any(grad is not None and batched(grad) for grad in grads)


class _Rows(torch.autograd.Function):
    """Rows of a table, and the table, for another use of it whose gradient then comes here."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.table, ctx.padding = table.shape, padding
        return nn.functional.embedding(ids, table), table.view_as(table)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, of_table: Tensor | None
    ) -> tuple[None, Tensor | None, None]:
        if grad is None:
            return None, of_table, None
        (ids,) = ctx.saved_tensors
        count, width = ctx.table
        # PyTorch's operator can be differentiated, for gradients of gradients, and vectorized.
        if _is_transformed(grad, of_table):
            padding = -1 if ctx.padding is None else ctx.padding
            own = torch.ops.aten.embedding_dense_backward(grad, ids, count, padding, False)
            return None, own if of_table is None else own + of_table, None
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if of_table is None:
            of_table = grad.new_zeros(count, width)
        elif kept or not of_table.is_contiguous():  # its maker may hand it out again
            of_table = of_table.clone(memory_format=torch.contiguous_format)
        rows = grad.reshape(-1, width).to(of_table.dtype)
        add_rows(of_table, rows, ids.reshape(-1), ctx.padding)
        return None, of_table, None
