# SPDX-License-Identifier: Apache-2.0
"""vLLM's compiled operators, from its wheel or from the libraries of it alone.

TIERCEL_BENCH_VLLM names the folder that holds them (``_moe_C*.so`` and ``_C*.so``), or one of them,
whose neighbours are loaded too; several of either kind with ``:`` between. They load without the
rest of vLLM. TIERCEL_BENCH_VLLM_VERSION says which version they are from.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiercel.workbench.bench.launch import Unsupported
from tiercel.workbench.bench.peers import Missing, Peer


def _named() -> list[Path]:
    paths = [Path(p) for p in os.environ.get("TIERCEL_BENCH_VLLM", "").split(os.pathsep) if p]
    for path in paths:
        if not path.exists():
            raise Missing(f"TIERCEL_BENCH_VLLM={path} is no file and no folder")
    return paths


def folders() -> list[Path]:
    """The folder of its libraries."""
    named = _named()
    if named:
        return list(dict.fromkeys(path if path.is_dir() else path.parent for path in named))
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Missing("vllm is not installed, and TIERCEL_BENCH_VLLM names no library of it")
    return [Path(spec.origin).parent]


def libraries(*patterns: str) -> list[Path]:
    """Its libraries of these kinds."""
    return [f for folder in folders() for kind in patterns for f in sorted(folder.glob(kind))]


def version() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return os.environ.get("TIERCEL_BENCH_VLLM_VERSION", "unknown")


def load(path: Path) -> None:
    import torch

    load_library: Any = torch.ops.load_library
    load_library(str(path))


def finder(library: str) -> Callable[[], str]:
    """A peer's `find`: it loads one more of its libraries, by its name without a suffix."""

    def find() -> str:
        found = libraries(f"{library}*.so")
        if not found:
            raise Missing(f"{', '.join(map(str, folders()))} has no {library} library")
        load(found[-1])
        return f"of vllm {version()}"

    return find


def operator(namespace: str, name: str) -> Any:
    """One of its operators; raises Unsupported where this version has it not."""
    import torch

    try:
        return getattr(getattr(torch.ops, namespace), name)
    except AttributeError:
        raise Unsupported(f"this vllm has no {namespace}.{name}") from None


def _find() -> str:
    files = [path for path in _named() if path.is_file()]
    found = list(dict.fromkeys([*files, *libraries("_moe_C*.so", "_C*.so")]))
    if not found:
        where = ", ".join(map(str, folders()))
        raise Missing(f"{where} has neither a _moe_C nor a _C library")
    for path in found:
        load(path)
    return version()


PEER = Peer("vllm", _find)
