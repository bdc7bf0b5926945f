# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the two halves of the MLPs, over tokens that are routed already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Backend, Op
from tiercel.core import platform
from tiercel.core.checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.index_checks import Index, between, places
from tiercel.core.platform import Reason
from tiercel.ops.moe import reference as ref
from tiercel.ops.routing.align import slots_for

__all__ = ["moe_down", "moe_up"]

DTYPES = (torch.bfloat16, torch.float16)
_FLOAT8 = torch.float8_e4m3fn
# As MoeActivation in moe_mlp.h counts.
INDEX = {name: index for index, name in enumerate(ref.ACTIVATIONS)}
# Of the launchers' arguments: topk_ids and how many experts there are; scales of x and of weights.
NO_IDS, NO_SCALES = (None, 0), (None, None)
_ROUTING = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")


def check_activation(op: str, activation: str) -> None:
    if activation not in INDEX:
        known = ", ".join(INDEX)
        raise ValueError(f"{op}: `activation` must be one of {known}, got {activation!r}")


def empty_routing(x: Tensor, elements: int, experts: int, block: int) -> tuple[Tensor, ...]:
    """Of the sizes that the routing has: for plans."""
    slots = slots_for(elements, experts, block)
    sizes = (slots, -(-slots // block), 1)
    return tuple(torch.empty(size, dtype=torch.int32, device=x.device) for size in sizes)


def reason_of(plan: Callable[[], Any], x: Tensor) -> Reason | None:
    """Why the kernels do not take arguments that are right."""
    reason = platform.why_not(x.device)
    if reason is not None:
        return reason
    try:
        plan()
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).partition(": ")[2])
    return None


def block_scaled(scale: Tensor | None) -> bool:
    """Of weights: a scale of 128x128 values, instead of a row or an expert."""
    return scale is not None and scale.ndim == 3


def check_weights_scale(op: str, name: str, scale: Tensor, w: Tensor, x: Tensor) -> None:
    check_dtype(op, name, scale.dtype, (torch.float32,))
    if block_scaled(scale):
        blocks = tuple(-(-size // 128) for size in w.shape[1:])
        of_blocks = "[E, rows / 128, columns / 128]"
        check_shape(op, name, scale, (w.shape[0], *blocks), of_blocks)
    else:
        check_rank(op, name, scale, 2)
        columns = 1 if scale.shape[1] == 1 else w.shape[1]
        check_shape(op, name, scale, (w.shape[0], columns), "[E, rows] or [E, 1]")
    check_contiguous(op, name, scale)
    check_same_device(op, name, scale, "x", x)


def of_rows(scale: Tensor | None, of_weights: Tensor) -> Tensor | None:
    """Rows' scales as the launchers take them."""
    return scale if scale is None or block_scaled(of_weights) else scale.view(-1)


class _Given(NamedTuple):
    """A half's arguments; None what it has not."""

    x: Tensor
    w: Tensor
    scales: tuple[Tensor, Tensor] | None  # of x and w
    weights: Tensor | None
    routing: tuple[Tensor, ...]
    top_k: int
    block: int
    activation: str


class _Half:
    """One half: its operators for 16-bit tensors and for float8 ones with scales."""

    def __init__(self, name: str, w_name: str, up: bool) -> None:
        self.name, self.w_name, self.up = name, w_name, up
        self.plain, self.float8 = self._declare(False), self._declare(True)

    def _split(self, scaled: bool, args: tuple[Any, ...]) -> _Given:
        x, w, *rest = args[:-1]  # without the backend
        scales = (rest.pop(0), rest.pop(0)) if scaled else None
        weights = None if self.up else rest.pop(0)
        top_k, activation = (rest[3], rest[5]) if self.up else (1, "silu")
        block = rest[4] if self.up else rest[3]
        return _Given(x, w, scales, weights, tuple(rest[:3]), top_k, block, activation)

    # -- checks ------------------------------------------------------------------------------------

    def _check(self, given: _Given) -> None:
        op, (x, w) = self.name, given[:2]
        check_rank(op, "x", x, 2)
        check_dtype(op, "x", x.dtype, DTYPES if given.scales is None else (_FLOAT8,))
        check_rank(op, self.w_name, w, 3)
        check_dtype(op, self.w_name, w.dtype, (x.dtype,))
        check_shape(op, self.w_name, w, (*w.shape[:2], x.shape[1]), "[E, rows, columns of x]")
        check_same_device(op, self.w_name, w, "x", x)
        for label, tensor in zip(_ROUTING, given.routing, strict=True):
            check_rank(op, label, tensor, 1)
            check_dtype(op, label, tensor.dtype, (torch.int32,))
            check_contiguous(op, label, tensor)
            check_same_device(op, label, tensor, "x", x)
        if given.block < 1:
            raise ValueError(f"{op}: `block_size` must be at least 1, got {given.block}")
        blocks = -(-given.routing[0].shape[0] // given.block)
        check_shape(op, "expert_ids", given.routing[1], (blocks,), "[slots / block_size]")
        check_shape(op, "num_tokens_post_padded", given.routing[2], (1,), "[1]")
        if given.scales is not None:
            self._check_scales(x, w, *given.scales)
        if self.up:
            if w.shape[1] % 2:
                raise ValueError(f"{op}: `w_up` must have two halves of rows, got {list(w.shape)}")
            if given.top_k < 1:
                raise ValueError(f"{op}: `top_k` must be at least 1, got {given.top_k}")
            check_activation(op, given.activation)
        elif given.weights is not None:
            check_dtype(op, "topk_weights", given.weights.dtype, (torch.float32,))
            check_shape(op, "topk_weights", given.weights, (x.shape[0],), "[T * k]")
            check_contiguous(op, "topk_weights", given.weights)
            check_same_device(op, "topk_weights", given.weights, "x", x)

    def _check_scales(self, x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> None:
        check_weights_scale(self.name, f"{self.w_name}_scale", w_scale, w, x)
        check_dtype(self.name, "x_scale", x_scale.dtype, (torch.float32,))
        check_rank(self.name, "x_scale", x_scale, 2)
        if block_scaled(w_scale):
            sizes = (x.shape[0], -(-x.shape[1] // 128))
            check_shape(self.name, "x_scale", x_scale, sizes, "[rows of x, columns / 128]")
        else:
            sizes = (1 if x_scale.shape[0] == 1 else x.shape[0], 1)
            check_shape(self.name, "x_scale", x_scale, sizes, "[rows of x, 1] or [1, 1]")
        check_contiguous(self.name, "x_scale", x_scale)
        check_same_device(self.name, "x_scale", x_scale, "x", x)

    def _indices(self, given: _Given) -> Iterator[Index]:
        (sorted_ids, experts, used), block = given.routing, given.block
        slots = sorted_ids.shape[0] // block * block
        number = between(_ROUTING[2], used, 0, slots)
        due = f"hold a multiple of `block_size` = {block} from 0 to {slots}"
        yield Index(_ROUTING[2], used, lambda n: number.wrong(n) | (n % block != 0), due)
        blocks = int(used) // block  # only these are read
        yield places("expert_ids", experts[:blocks], given.w.shape[0])
        elements = given.x.shape[0] * given.top_k
        yield between("sorted_token_ids", sorted_ids[: blocks * block], 0, elements)

    # -- calls -------------------------------------------------------------------------------------

    def _output(self, given: _Given, zeros: bool = False) -> Tensor:
        x, w = given[:2]
        size = (x.shape[0] * given.top_k, w.shape[1] // (2 if self.up else 1))
        dtype = x.dtype if given.scales is None else torch.bfloat16
        return (torch.zeros if zeros else torch.empty)(size, dtype=dtype, device=x.device)

    def _arguments(self, given: _Given, out: Tensor) -> tuple[Any, ...]:
        """As the launchers take them."""
        scales: tuple[Tensor | None, Tensor | None] = NO_SCALES
        if given.scales is not None:
            x_scale, w_scale = given.scales
            scales = (of_rows(x_scale, w_scale), w_scale)
        rest = (given.block, INDEX[given.activation], *NO_IDS, *scales)
        return (given.x, given.w, *given.routing, given.weights, out, *rest)

    def _run(self, given: _Given) -> Tensor:
        # Zeros of ids that are in no block, and of experts that are elsewhere.
        out = self._output(given, zeros=True)
        (_C.moe_up if self.up else _C.moe_down)(*self._arguments(given, out))
        return out

    def _plan(self, given: _Given) -> dict[str, Any]:
        plan = _C.moe_up_plan if self.up else _C.moe_down_plan
        return dict(plan(*self._arguments(given, self._output(given))))

    def _reference(self, given: _Given) -> Tensor:
        x_scale, w_scale = given.scales or NO_SCALES
        if self.up:
            sizes = (given.top_k, given.block)
            return ref.moe_up(
                *(given.x, given.w, *given.routing, *sizes),
                activation=given.activation,
                x_scale=x_scale,
                w_up_scale=w_scale,
            )
        return ref.moe_down(
            *(given.x, given.w, given.weights, *given.routing, given.block),
            x_scale=x_scale,
            w_down_scale=w_scale,
        )

    def _declare(self, scaled: bool) -> Op:
        def given(args: tuple[Any, ...]) -> _Given:
            return self._split(scaled, args)

        names = ["x", self.w_name, *["x_scale", f"{self.w_name}_scale"] * scaled]
        names += [*["topk_weights"] * (not self.up), *_ROUTING]
        tensors = ", ".join(f"Tensor {name}" for name in names)
        options = (
            "int top_k, int block_size, str activation='silu'" if self.up else "int block_size"
        )
        return Op(
            f"{self.name}_fp8" if scaled else self.name,
            f"({tensors}, {options}, str? backend=None) -> Tensor",
            check=lambda *args: self._check(given(args)),
            fake=lambda *args: self._output(given(args)),
            sm90=Backend(
                "sm90",
                lambda *args: self._run(given(args)),
                "a grouped product, rows gathered by the routing",
                "cute",
                why_not=lambda *args: reason_of(lambda: self._plan(given(args)), args[0]),
            ),
            ref=Backend(
                "ref",
                lambda *args: self._reference(given(args)),
                "a loop over the routing's blocks",
                "torch",
            ),
            describe=lambda *args: self._plan(given(args)),
            indices=lambda *args: self._indices(given(args)),
            family=self.name,
            load=None if scaled else _C.moe_load,
        )

    def call(
        self, x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor | None, *rest: Any
    ) -> Tensor:
        result: Tensor
        if x_scale is None and w_scale is None:
            result = self.plain(x, w, *rest)
        elif x_scale is None or w_scale is None:
            missing = "x_scale" if x_scale is None else f"{self.w_name}_scale"
            raise ValueError(
                f"{self.name}: `{missing}` must be given where the other scale is, got None"
            )
        else:
            result = self.float8(x, w, x_scale, w_scale, *rest)
        return result


_UP = _Half("moe_up", "w_up", up=True)
_DOWN = _Half("moe_down", "w_down", up=False)


@_UP.plain.export
def moe_up(
    x: Tensor,
    w_up: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    top_k: int,
    block_size: int,
    *,
    activation: str = "silu",
    x_scale: Tensor | None = None,
    w_up_scale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The first half of :func:`tiercel.fused_moe`, with the activation, over routed tokens.

    Args:
        x: ``[T, H]`` bfloat16, float16 or, with scales, float8_e4m3fn.
        w_up: ``[E, 2 * I, H]``, the dtype of ``x``.
        sorted_token_ids: As from :func:`tiercel.moe_align_block_size`, int32, contiguous. What is
            no element's number is padding.
        expert_ids: The same; -1, and whatever else is no expert, leaves a block's rows zeros.
        num_tokens_post_padded: The same; what is not from 0 to the number of slots counts as the
            nearest of both.
        top_k: Experts of a token: element e of the ids is token e / top_k's.
        block_size: As the routing was made with; the precompiled kernels take 64 and 128.
        activation: As of :func:`tiercel.fused_moe`.
        x_scale: Of float8, as from :func:`tiercel.fp8_quantize`, contiguous: a factor a row
            ``[T, 1]`` or one of all ``[1, 1]``; where the weights have scales of blocks, one of
            1x128 values, ``[T, H / 128]``, rounded up.
        w_up_scale: Of float8, float32, contiguous, as of :func:`tiercel.fused_moe`: ``[E, 2 * I]``,
            ``[E, 1]`` or, of blocks of 128x128, ``[E, 2 * I / 128, H / 128]``.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[T * top_k, I]``, the dtype of ``x``, bfloat16 of float8; zeros for ids that are in no
        block.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such activation or
            backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> routing = tiercel.moe_align_block_size(experts, 64, 64)
        >>> inner = tiercel.moe_up(x, w_up, *routing, 8, 64)
    """
    routing = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    rest = (*routing, top_k, block_size, activation, backend)
    return _UP.call(x, w_up, x_scale, w_up_scale, *rest)


@_DOWN.plain.export
def moe_down(
    x: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    block_size: int,
    *,
    x_scale: Tensor | None = None,
    w_down_scale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The second half of :func:`tiercel.fused_moe`, times the routing weights.

    Args:
        x: ``[T * k, I]`` bfloat16 or float16, as from :func:`tiercel.moe_up`, or, with scales,
            float8_e4m3fn.
        w_down: ``[E, H, I]``, the dtype of ``x``.
        topk_weights: ``[T * k]`` float32, contiguous.
        sorted_token_ids: As from :func:`tiercel.moe_align_block_size`, int32, contiguous. What is
            no element's number is padding.
        expert_ids: The same; -1, and whatever else is no expert, leaves a block's rows zeros.
        num_tokens_post_padded: The same; what is not from 0 to the number of slots counts as the
            nearest of both.
        block_size: As the routing was made with; the precompiled kernels take 64 and 128.
        x_scale: As of :func:`tiercel.moe_up`: ``[T * k, 1]``, ``[1, 1]`` or ``[T * k, I / 128]``.
        w_down_scale: The same: ``[E, H]``, ``[E, 1]`` or ``[E, H / 128, I / 128]``.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[T * k, H]``, the dtype of ``x``, bfloat16 of float8: :func:`tiercel.moe_sum` adds them
        up. Zeros for ids that are in no block.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> outer = tiercel.moe_down(inner, w_down, weights.flatten(), *routing, 64)
    """
    routing = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    rest = (topk_weights, *routing, block_size, backend)
    return _DOWN.call(x, w_down, x_scale, w_down_scale, *rest)
