# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4 (CuTe DSL; compiles at its first call for a kind of problem)."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, package

find = package(
    "flash-attn-4",
    "flash_attn.cute.interface",
    CUTE_DSL_ARCH="sm_90a",
    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="1",
)

PEER = Peer("fa4", find)
