# SPDX-License-Identifier: Apache-2.0
"""vLLM's compiled operators, from its wheel or from the one library that holds them.

TIERCEL_BENCH_VLLM names the library (``_moe_C_stable_libtorch.abi3.so``); it loads without the rest
of vLLM. TIERCEL_BENCH_VLLM_VERSION says which version it is from.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

from tiercel.bench.peers import Missing, Peer


def _library() -> Path:
    named = os.environ.get("TIERCEL_BENCH_VLLM")
    if named:
        if not Path(named).is_file():
            raise Missing(f"TIERCEL_BENCH_VLLM={named} is no file")
        return Path(named)
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Missing("vllm is not installed, and TIERCEL_BENCH_VLLM names no library of it")
    found = sorted(Path(spec.origin).parent.glob("_moe_C*.so"))
    if not found:
        raise Missing("the installed vllm has no _moe_C library")
    return found[-1]  # the one of the stable ABI, where there are two


def _find() -> str:
    library = _library()
    import torch

    load: Any = torch.ops.load_library
    load(str(library))
    if not hasattr(torch.ops._moe_C, "topk_softmax"):
        raise Missing(f"{library.name} has no topk_softmax")
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return os.environ.get("TIERCEL_BENCH_VLLM_VERSION", "unknown")


PEER = Peer("vllm", _find)
