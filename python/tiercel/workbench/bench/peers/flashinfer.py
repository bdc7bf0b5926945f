# SPDX-License-Identifier: Apache-2.0
"""FlashInfer, compiled ahead of time or with nvcc at its first call."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers import Peer, package

WORKSPACE = 384 << 20  # bytes, what FlashInfer itself takes where it allocates

find = package("flashinfer-python", "flashinfer", FLASHINFER_CUDA_ARCH_LIST="9.0a")


def module(name: str = "flashinfer") -> Any:
    return importlib.import_module(name)


@functools.cache
def workspace(device: Any, use: str = "") -> Any:
    """Scratch of zeros that all calls of one use share, as the layers of a model do."""
    import torch

    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def pages(table: Any, used: Sequence[int], page: int) -> tuple[Any, Any, Any]:
    """A page table in its form: the first page of each sequence in the list of pages, that list on
    the GPU, and the number of keys in each sequence's last page.
    """
    import torch

    counts = [-(-length // page) for length in used]
    rows = [row[:count] for row, count in zip(table.cpu(), counts, strict=True)]
    firsts = torch.tensor([0, *counts]).cumsum(0).int()
    last = torch.tensor([(length - 1) % page + 1 for length in used]).int()
    return firsts, torch.cat(rows).int().to(table.device), last


def launch(prepare: Callable[[], Callable[[], tuple[Any, ...]]], exact: bool = True) -> Launch:
    """Plans and calls it once; what it says to sizes that it does not take is Unsupported."""
    try:
        run = prepare()
        run()
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise Unsupported(text[0]) from error
    return Launch(run, exact=exact)


PEER = Peer("flashinfer", find)
