# SPDX-License-Identifier: Apache-2.0
"""Machete, vLLM's CUTLASS kernel for Hopper: whole numbers of 4 bits times 16-bit activations."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer
from tiercel.workbench.bench.peers.vllm import finder

PEER = Peer("vllm.machete", finder("_C"))
