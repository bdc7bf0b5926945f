# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's prompt attention without Hopper's instructions, which splits long sequences."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, flashinfer

PEER = Peer("flashinfer.fa2", flashinfer.find)
