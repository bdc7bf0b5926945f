# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 as vLLM builds it: forward, packed sequences, paged keys and values."""

from __future__ import annotations

from typing import Any

from tiercel.workbench.bench.launch import Unsupported
from tiercel.workbench.bench.peers import Peer, vllm

PEER = Peer("fa3", vllm.finder("vllm_flash_attn/_vllm_fa3_C"))

# Arguments of newer versions, of which None is no value.
DEFAULTS = {
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "num_splits": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


def bind(given: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Its forward, and what it is to be called with."""
    import torch

    function = torch.ops._vllm_fa3_C.fwd.default
    names = [argument.name for argument in function._schema.arguments]
    missing = set(given) - set(names)
    if missing:
        raise Unsupported(f"this version has no {', '.join(sorted(missing))}")
    return function, [(DEFAULTS | given).get(name) for name in names]
