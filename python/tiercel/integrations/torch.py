# SPDX-License-Identifier: Apache-2.0
"""`enable_sdpa` runs ``torch.nn.functional.scaled_dot_product_attention`` on Tiercel's kernels."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

import tiercel
from tiercel.core import platform
from tiercel.core.eager import empty
from tiercel.ops.attention.backward import BACKWARD, has_kernels
from tiercel.ops.attention.varlen_backward import BACKWARD as PACKED_BACKWARD

__all__ = ["disable_sdpa", "enable_sdpa"]

_NAME = "tiercel"
_FLASH: int = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value


def enable_sdpa() -> None:
    """Runs SDPA's flash attention on Tiercel's kernels, in the whole process, until `disable_sdpa`.

    It replaces torch's flash attention and gives it priority over SDPA's other backends. Neither
    models nor compiled graphs need a change. Jagged nested tensors run on
    :func:`tiercel.attention_varlen`. Unsupported calls run on torch's kernels: dropout, head
    dimensions above 256, tensors without elements, devices other than an H100 or H200.

    Raises:
        RuntimeError: This torch has no registry of flash attention implementations, or no CUDA.
    """
    attention = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        raise RuntimeError(
            f"enable_sdpa needs PyTorch 2.11 or newer, with torch.nn.attention's registry of flash "
            f"attention implementations; this is {torch.__version__}"
        )
    if attention.current_flash_attention_impl() == _NAME:
        return
    attention.register_flash_attention_impl(_NAME, register_fn=_Implementation)
    attention.activate_flash_attention_impl(_NAME)


def disable_sdpa() -> None:
    """Undoes `enable_sdpa`; does nothing without it or after another implementation was
    activated."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    if current() == _NAME:
        torch.nn.attention.restore_flash_attention_impl()


class _Implementation:
    """Puts our kernels in the place of torch's own for a dispatch key; torch keeps it."""

    def __init__(self, key: str = "CUDA") -> None:
        replaced = {
            "_scaled_dot_product_flash_attention": self._forward,
            "_scaled_dot_product_flash_attention_backward": self._backward,
            "_flash_attention_forward": self._forward_of_packed,
            "_flash_attention_backward": self._backward_of_packed,
        }
        own = torch.library.get_kernel
        try:
            self._own: dict[str, Any] = {name: own(f"aten::{name}", key) for name in replaced}
        except RuntimeError as error:
            raise RuntimeError("enable_sdpa needs a PyTorch with CUDA's flash attention") from error
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name, function in replaced.items():
                self._library.impl(name, function, key, with_keyset=True)
        if torch.cuda.is_available():
            # The first choice sets torch's default order, over any that was set before it.
            tiny = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device="cuda")
            torch._fused_sdp_choice(tiny, tiny, tiny)
        self._priority = torch._C._get_sdp_priority_order()
        others = [backend for backend in self._priority if backend != _FLASH]
        torch._C._set_sdp_priority_order([_FLASH, *others])

    def remove(self) -> None:
        """Puts torch's own back."""
        if self._library is not None:
            self._library._destroy()
            self._library = None
            torch._C._set_sdp_priority_order(self._priority)

    def _forward(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        plain = dropout_p == 0 and not return_debug_mask
        square = query.shape[2] == key.shape[2]
        if not plain or (is_causal and not square) or not _takes(query, key, value):
            return self._own["_scaled_dot_product_flash_attention"].call_boxed(
                keys, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
            )
        out = torch.empty_like(query)  # with its strides, as torch's
        q, k, v = (_readable(x.transpose(1, 2)) for x in (query, key, value))
        into = out.transpose(1, 2)
        options: Any = {"causal": is_causal, "scale": scale, "return_lse": True}
        with torch.no_grad():
            if _is_readable(into):
                _, lse = tiercel.attention(q, k, v, **options, out=into)
            else:
                result, lse = tiercel.attention(q, k, v, **options)
                into.copy_(result)
        sizes = query.shape[2], key.shape[2]
        return out, lse, None, None, *sizes, *_without_dropout(query)

    def _backward(
        self,
        keys: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *rest: Any,
        scale: float | None = None,
    ) -> Any:
        inputs = query, key, value
        square = query.shape[2] == key.shape[2]
        if (
            dropout_p != 0
            or cum_seq_q is not None
            or (is_causal and not square)
            or not _takes(*inputs)
            or not has_kernels("attention", query, value, None)
        ):
            saved = (out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)
            return self._own["_scaled_dot_product_flash_attention_backward"].call_boxed(
                keys, grad_out, *inputs, *saved, *rest, scale=scale
            )
        grad, q, k, v, kept = (_readable(x.transpose(1, 2)) for x in (grad_out, *inputs, out))
        order = torch.are_deterministic_algorithms_enabled()
        with torch.no_grad():
            found = BACKWARD(
                grad, q, k, v, kept, logsumexp, None, is_causal, None, scale, None, order, None
            )
        return tuple(
            _with_strides(x.transpose(1, 2), of) for x, of in zip(found, inputs, strict=True)
        )

    def _forward_of_packed(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **more: Any,
    ) -> Any:
        packed = _are_starts(cum_seq_q, cum_seq_k)
        plain = dropout_p == 0 and not return_debug_mask
        known = all(option is None for option in more.values())
        if not (packed and plain and known and _takes(query, key, value)):
            windows = {
                "window_size_left": window_size_left,
                "window_size_right": window_size_right,
            }
            options = (max_q, max_k, dropout_p, is_causal, return_debug_mask)
            return self._own["_flash_attention_forward"].call_boxed(
                keys, query, key, value, cum_seq_q, cum_seq_k, *options, scale=scale, **windows,
                **more,
            )  # fmt: skip
        window = _window(window_size_left, window_size_right)
        assert cum_seq_q is not None and cum_seq_k is not None
        with torch.no_grad():
            out, lse = tiercel.attention_varlen(
                *map(_readable, (query, key, value)), cum_seq_q, cum_seq_k, max_q, max_k,
                causal=is_causal, window=window, scale=scale, return_lse=True,
            )  # fmt: skip
        # Torch's own backward wants infinity for a row that sees no key; ours takes it, too.
        torch.nan_to_num_(lse, math.nan, math.inf, math.inf)
        return _with_strides(out, query), lse, *_without_dropout(query)

    def _backward_of_packed(
        self,
        keys: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *rest: Any,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> Any:
        inputs = query, key, value
        packed = _are_starts(cum_seq_q, cum_seq_k)
        takes = _takes(*inputs) and has_kernels("attention_varlen", query, value, None)
        if not (packed and dropout_p == 0 and takes):
            windows = {
                "window_size_left": window_size_left,
                "window_size_right": window_size_right,
            }
            saved = (out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)
            return self._own["_flash_attention_backward"].call_boxed(
                keys, grad_out, *inputs, *saved, *rest, scale=scale, **windows
            )
        grad, q, k, v, kept = map(_readable, (grad_out, *inputs, out))
        window = _window(window_size_left, window_size_right)
        order = torch.are_deterministic_algorithms_enabled()
        with torch.no_grad():
            found = PACKED_BACKWARD(
                grad, q, k, v, cum_seq_q, cum_seq_k, kept, logsumexp, None,
                is_causal, window, scale, None, order, None,
            )  # fmt: skip
        return tuple(_with_strides(x, of) for x, of in zip(found, inputs, strict=True))


def _takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if our kernels support these tensors, whose last dimension is a head's."""
    d = query.shape[-1]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and d == key.shape[-1] == value.shape[-1]
        and d % 8 == 0
        and d <= 256
        and 0 not in query.shape
        and 0 not in key.shape
        and platform.why_not(query.device) is None
    )


def _are_starts(*tensors: Tensor | None) -> bool:
    """True if they say where packed sequences begin, as our kernels read it."""
    return all(x is not None and x.dtype == torch.int32 for x in tensors)


def _window(left: int | None, right: int | None) -> list[int] | None:
    """The window in our operators' form: -1 means no limit."""
    limits = [-1 if limit is None else limit for limit in (left, right)]
    return None if limits == [-1, -1] else limits


def _is_readable(x: Tensor) -> bool:
    *strides, last = x.stride()
    return last == 1 and all(step % 8 == 0 for step in strides) and x.data_ptr() % 16 == 0


def _readable(x: Tensor) -> Tensor:
    """Strides and a start that the copy engine takes."""
    return x if _is_readable(x) else x.contiguous()


def _with_strides(x: Tensor, like: Tensor) -> Tensor:
    """`x` in the layout that torch's own results have."""
    made = torch.empty_like(like)
    return x if made.stride() == x.stride() else made.copy_(x)


def _without_dropout(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of a random number generator, which nothing reads, and no mask."""
    return (
        empty(query, (2,), torch.uint64),
        empty(query, (), torch.uint64),
        empty(query, (0,), query.dtype),
    )
