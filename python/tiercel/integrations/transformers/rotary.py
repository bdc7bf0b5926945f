# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in the attention modules of Hugging Face models.

Their forwards call a function of their module file. A copy of the forward, set on instances, calls
Tiercel's function under that name; the file does not change.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import tiercel
from tiercel.integrations.transformers.forwards import is_replaced

_NAME = "apply_rotary_pos_emb"
Turn = Callable[..., tuple[Tensor, Tensor]]


def rotary_forward(module: nn.Module) -> Callable[..., Any] | str | None:
    """The module's forward with `tiercel.rotary_embedding`, or why not, or None without any."""
    forward = type(module).forward
    inner = inspect.unwrap(forward)
    if not isinstance(inner, types.FunctionType) or _NAME not in inner.__code__.co_names:
        return None
    if is_replaced(module):
        return "its forward is replaced already"
    return _copy(forward)


@functools.cache
def _copy(forward: types.FunctionType) -> Callable[..., Any] | str:
    inner = getattr(forward, "__wrapped__", None)
    if inner is not None:  # a decorator, such as one that renames arguments
        return _decorated(forward, inner)
    theirs = forward.__globals__.get(_NAME)
    if theirs is None or (found := _form(theirs)) is None:
        return f"its {_NAME} turns other pairs"
    # Without `__name__`, torch.compile looks names up in these globals, not in the file's.
    names = {key: value for key, value in forward.__globals__.items() if key != "__name__"}
    names[_NAME] = _turn_like(theirs, *found)
    return _function_like(forward, names, forward.__closure__)


def _decorated(outer: types.FunctionType, inner: types.FunctionType) -> Callable[..., Any] | str:
    """The decorator's function around a copy of the decorated one."""
    copy = _copy(inner)
    if isinstance(copy, str):
        return copy
    cells: list[types.CellType] = list(getattr(outer, "__closure__", None) or ())
    places = [i for i, cell in enumerate(cells) if cell == types.CellType(inner)]
    if len(places) != 1:
        return "its forward is decorated in another way"
    cells[places[0]] = types.CellType(copy)
    made = _function_like(outer, outer.__globals__, tuple(cells))
    made.__wrapped__ = copy  # type: ignore[attr-defined]
    return made


def _function_like(
    function: types.FunctionType, names: dict[str, Any], cells: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    made = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _form(theirs: Turn) -> tuple[bool, bool, bool] | None:
    """(whether pairs are interleaved, cosines once for each pair, part of a head may be turned), by
    trying."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 16, generator=generator) for heads in (4, 2))
    angles = torch.rand(2, 5, 8, generator=generator)

    def same(interleaved: bool, once: bool, width: int) -> bool:
        cos, sin = angles[..., : width // 2].cos(), angles[..., : width // 2].sin()
        given = (cos, sin) if once else (torch.cat([x, x], -1) for x in (cos, sin))
        try:
            found = theirs(q, k, *given)
        except Exception:  # shapes that it does not take
            return False
        ours = _turn(q, k, cos, sin, interleaved, "ref")
        return all(
            a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
            for a, b in zip(ours, found, strict=True)
        )

    for interleaved in (False, True):
        for once in (False, True):
            if same(interleaved, once, 16):
                return interleaved, once, same(interleaved, once, 8)
    return None


def _turn_like(theirs: Turn, interleaved: bool, once: bool, partly: bool) -> Turn:
    def turn(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        width = cos.shape[-1] * (2 if once else 1)
        fits = (
            unsqueeze_dim == 1
            and q.ndim == k.ndim == 4
            and cos.ndim == 3
            and cos.dtype == sin.dtype
            and q.dtype == k.dtype
            and q.dtype in (torch.bfloat16, torch.float16, torch.float32)
            and cos.dtype in (q.dtype, torch.float32)
            and (width == q.shape[-1] == k.shape[-1] or (partly and width < q.shape[-1]))
            and not cos.requires_grad
        )
        # A compiler joins their operators with what is around them.
        if not fits or torch.compiler.is_compiling():
            return theirs(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        half = width // 2
        return _turn(q, k, cos[..., :half], sin[..., :half], interleaved, None, cos)

    return turn


def _turn(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    backend: str | None,
    layers_share: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotates q and k `[B, H, S, D]` by angles `[1 or B, S, R / 2]`, the layout of transformers."""
    kept = getattr(layers_share, "_tiercel_rotary", None)
    batch, _, length, _ = q.shape
    if kept is None:
        table = torch.cat([cos, sin], -1).flatten(0, 1)
        rows = torch.arange(len(table), dtype=torch.int32, device=q.device)
        kept = table, rows.repeat(batch // len(cos))
        if layers_share is not None:
            layers_share._tiercel_rotary = kept  # type: ignore[attr-defined]
    table, rows = kept
    tokens = (x.transpose(1, 2).flatten(0, 1) for x in (q, k))
    turned = tiercel.rotary_embedding(
        rows, *tokens, table, interleaved=interleaved, backend=backend
    )
    q, k = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in turned)
    return q, k


def pairs_share_angles(modules: Iterable[nn.Module]) -> bool:
    """True if all modules that make cosines and sines give both elements of a pair the same."""
    found = False
    for module in modules:
        if not any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            continue
        x, positions = torch.zeros(1, 1, 1), torch.arange(3)[None]
        device = next(module.buffers()).device
        more: list[dict[str, Any]] = [{}]
        if "layer_type" in inspect.signature(type(module).forward).parameters:
            kinds = sorted(set(getattr(module.config, "layer_types", ())))  # type: ignore[arg-type]
            more = [{"layer_type": kind} for kind in kinds]
        for options in more:
            try:
                results = module(x.to(device), positions.to(device), **options)
            except Exception:  # another kind of position
                return False
            if not isinstance(results, tuple) or len(results) != 2:
                return False
            found = True
            for result in results:
                first, second = result.chunk(2, -1)
                # Some models have each angle once.
                once = any(x.shape[-1] == result.shape[-1] for x in module.buffers())
                if not once and not torch.equal(first, second):
                    return False
    return found
