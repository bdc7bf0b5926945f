# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention in Triton, from its package or from two of its files.

TIERCEL_BENCH_VLLM_SOURCE names the folder above ``vllm/v1/attention/ops``, where
``triton_unified_attention.py`` and ``triton_attention_helpers.py`` are. They import little else of
vLLM, and nothing that matters on a GPU of NVIDIA: here they get that little.
TIERCEL_BENCH_VLLM_VERSION says which version they are from.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import logging
import os
import sys
import types
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


def _stand_in(folder: Path) -> None:
    import torch
    import triton
    import triton.language as tl

    names = _OPS.split(".")
    for depth in range(1, len(names) + 1):
        path = [str(folder.joinpath(*names[:depth]))]
        _module(".".join(names[:depth]), __path__=path)
    platform = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda family: False
    )
    _module("vllm.envs", VLLM_BATCH_INVARIANT=False)
    _module("vllm.logger", init_logger=_Logger)
    _module("vllm.platforms", current_platform=platform)
    _module("vllm.triton_utils", triton=triton, tl=tl)
    _module("vllm.v1.kv_cache_interface", KVQuantMode=_KVQuantMode)
    vars(sys.modules["vllm"])["envs"] = sys.modules["vllm.envs"]


def _find() -> str:
    source = os.environ.get("TIERCEL_BENCH_VLLM_SOURCE")
    if source is None:
        if importlib.util.find_spec("vllm") is None:
            raise Missing(
                "vllm is not installed, and TIERCEL_BENCH_VLLM_SOURCE names no folder of its source"
            )
    else:
        folder = Path(source)
        if not folder.joinpath(*_OPS.split("."), "triton_unified_attention.py").is_file():
            raise Missing(
                f"TIERCEL_BENCH_VLLM_SOURCE={source} has no {_OPS}.triton_unified_attention"
            )
        _stand_in(folder)
    importlib.import_module(f"{_OPS}.triton_unified_attention")
    return vllm.version()


def unified_attention() -> Any:
    return importlib.import_module(f"{_OPS}.triton_unified_attention").unified_attention


PEER = Peer("vllm.triton", _find, on_request=True)  # it compiles for each case
