# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's persistent kernel, one call for prompts and decoding sequences."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, flashinfer

PEER = Peer("flashinfer.batch", flashinfer.find)
