# SPDX-License-Identifier: Apache-2.0
"""FlashKDA, as vLLM builds it: prompts of the delta rule with a gate per channel."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, vllm

PEER = Peer("flashkda", vllm.finder("_flashkda_C"))
