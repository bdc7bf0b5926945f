# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention in Triton, from its package or from two of its files.

TIERCEL_BENCH_VLLM_SOURCE names the folder above ``vllm/v1/attention/ops``, where
``triton_unified_attention.py`` and ``triton_attention_helpers.py`` are. They import little else of
vLLM, and nothing that matters on a GPU of NVIDIA: here they get that little.
TIERCEL_BENCH_VLLM_VERSION says which version they are from.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiercel.workbench.bench.peers import Missing, Peer, vllm

_OPS = "vllm.v1.attention.ops"


class _KVQuantMode(enum.IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


class _Logger(logging.Logger):
    def debug_once(self, *text: Any) -> None:
        self.debug(*text)


def _module(name: str, **values: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(values)
    sys.modules.setdefault(name, module)


def stand_in(folder: Path, *packages: str) -> None:
    """Stand-ins for those parts of vLLM that `packages` in `folder` import."""
    import torch
    import triton
    import triton.language as tl

    for package in (*packages, "vllm.model_executor.warmup", "vllm.utils"):
        names = package.split(".")
        for depth in range(1, len(names) + 1):
            path = [str(folder.joinpath(*names[:depth]))]
            _module(".".join(names[:depth]), __path__=path)
    no, yes = (lambda *_: False), (lambda *_: True)
    platform = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability_family=no,
        is_cuda=yes,
        is_cuda_alike=yes,
    )
    _module("vllm.envs", VLLM_BATCH_INVARIANT=False)
    _module("vllm.logger", init_logger=_Logger)
    _module("vllm.platforms", current_platform=platform)
    _module("vllm.triton_utils", triton=triton, tl=tl, HAS_TRITON=True)
    _module("vllm.v1.kv_cache_interface", KVQuantMode=_KVQuantMode)
    _module("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
    _module("vllm.utils.math_utils", next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    _module("vllm.utils.platform_utils", num_compute_units=_multiprocessors)
    vars(sys.modules["vllm"])["envs"] = sys.modules["vllm.envs"]


def _multiprocessors(device: int = 0) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def finder(package: str, *modules: str) -> Callable[[], str]:
    """A `find` for modules of one of vLLM's packages, which are installed or named."""

    def find() -> str:
        source = os.environ.get("TIERCEL_BENCH_VLLM_SOURCE")
        if source is None:
            if importlib.util.find_spec("vllm") is None:
                raise Missing(
                    "vllm is not installed, and TIERCEL_BENCH_VLLM_SOURCE names no folder of its "
                    "source"
                )
        else:
            folder = Path(source)
            for name in modules:
                if (
                    not folder.joinpath(*f"{package}.{name}".split("."))
                    .with_suffix(".py")
                    .is_file()
                ):
                    raise Missing(f"TIERCEL_BENCH_VLLM_SOURCE={source} has no {package}.{name}")
            parents = {f"{package}.{name}".rpartition(".")[0] for name in modules}
            stand_in(folder, *sorted(parents))
        for name in modules:
            importlib.import_module(f"{package}.{name}")
        return vllm.version()

    return find


def unified_attention() -> Any:
    return importlib.import_module(f"{_OPS}.triton_unified_attention").unified_attention


PEER = Peer("vllm.triton", finder(_OPS, "triton_unified_attention"), on_request=True)  # it compiles
