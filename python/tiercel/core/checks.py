# SPDX-License-Identifier: Apache-2.0
"""Argument checks in the launchers' words, for what does not reach a launcher.

Every text is "<op>: `<argument>` must <expected>, got <what came>", as in kernels/sm90/checks.h.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_dtype(op: str, name: str, got: torch.dtype, allowed: Sequence[torch.dtype]) -> None:
    if got in allowed:
        return
    names = [dtype_name(dtype) for dtype in allowed]
    text = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    raise TypeError(f"{op}: `{name}` must have dtype {text}, got {dtype_name(got)}")


def check_bool(op: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: `{name}` must be a bool, got {type(value).__name__}")


def check_dense(op: str, name: str, tensor: Tensor) -> None:
    """First of all: other layouts lack sizes and strides, or fail deep inside torch."""
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{op}: `{name}` must be a dense tensor, got {layout}")


def check_rank(op: str, name: str, tensor: Tensor, rank: int) -> None:
    check_dense(op, name, tensor)
    if tensor.dim() != rank:
        raise ValueError(
            f"{op}: `{name}` must have {rank} dimensions, got {tensor.dim()} "
            f"(shape {list(tensor.shape)})"
        )


def check_shape(op: str, name: str, tensor: Tensor, shape: Sequence[int], why: str) -> None:
    if len(shape) != tensor.dim() or any(a != b for a, b in zip(tensor.shape, shape, strict=True)):
        raise ValueError(
            f"{op}: `{name}` must have shape {why} = {list(shape)}, got {list(tensor.shape)}"
        )


def check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: `{name}` must be contiguous, got strides {list(tensor.stride())} "
            f"for shape {list(tensor.shape)}"
        )


def _where(tensor: Tensor) -> str:
    return "a CPU tensor" if tensor.device.type == "cpu" else f"a tensor on {tensor.device}"


def check_same_device(op: str, name: str, tensor: Tensor, other: str, reference: Tensor) -> None:
    if tensor.device != reference.device:
        raise ValueError(
            f"{op}: `{name}` must be on the device of `{other}`, {_where(reference)}, "
            f"got {_where(tensor)}"
        )


def check_on_cpu(op: str, name: str, tensor: Tensor, first: Tensor) -> None:
    if tensor.device.type != "cpu" and not (tensor.is_meta and first.is_meta):
        raise ValueError(f"{op}: `{name}` must be a CPU tensor, got {_where(tensor)}")


def check_cache_scale(
    op: str,
    name: str,
    scale: Tensor | None,
    cache: Tensor,
    head: str,
    heads: int,
    what: str = "a cache",
) -> None:
    """Only a float8 tensor has scales: one, or one a head."""
    if scale is None:
        return
    if cache.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{op}: `{name}` must be None for {what} that is not float8, got a tensor")
    if scale.numel() not in (1, heads):
        raise ValueError(
            f"{op}: `{name}` must have 1 element or {head} = {heads}, got {scale.numel()}"
        )
