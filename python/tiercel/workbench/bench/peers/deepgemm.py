# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM (compiles with nvcc at its first call for a shape): its own package, or vLLM's copy."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

from tiercel.workbench.bench.peers import Missing, Peer


def module() -> Any:
    """The package, imported."""
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # no vllm either
            continue
        if found is not None:
            return importlib.import_module(name)
    raise Missing("neither the package deep_gemm nor vllm with its copy is installed")


def _find() -> str:
    found = module()
    try:
        return importlib.metadata.version("deep_gemm")
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(found, "__version__", "unknown"))


PEER = Peer("deepgemm", _find)
