# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 as vLLM builds it: forward, packed sequences, paged keys and values."""

from __future__ import annotations

from typing import Any

from tiercel.bench.peers import Missing, Peer, vllm


def _find() -> str:
    libraries = vllm.libraries("vllm_flash_attn/_vllm_fa3_C*.so")
    if not libraries:
        where = ", ".join(map(str, vllm.folders()))
        raise Missing(f"{where} has no vllm_flash_attn/_vllm_fa3_C library")
    import torch

    load: Any = torch.ops.load_library
    load(str(libraries[-1]))
    return f"of vllm {vllm.version()}"


PEER = Peer("fa3", _find)
