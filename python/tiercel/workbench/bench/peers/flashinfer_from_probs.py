# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's samplers behind a softmax of PyTorch, as vLLM and SGLang call them."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, flashinfer

PEER = Peer("flashinfer.from_probs", flashinfer.find)
