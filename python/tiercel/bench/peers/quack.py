# SPDX-License-Identifier: Apache-2.0
"""quack (CuTe DSL kernels; compiles at its first call for a shape)."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os

from tiercel.bench.peers import Missing, Peer


def find() -> str:
    if importlib.util.find_spec("quack") is None:
        raise Missing("the package quack-kernels is not installed")
    # Without it the DSL may build for another target.
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    importlib.import_module("quack.topk")

    try:
        return importlib.metadata.version("quack-kernels")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


PEER = Peer("quack", find)
