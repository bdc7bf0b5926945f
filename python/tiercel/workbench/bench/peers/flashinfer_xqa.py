# SPDX-License-Identifier: Apache-2.0
"""XQA, TensorRT-LLM's decoding kernels, in FlashInfer; a module for each page and group size."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, flashinfer

PEER = Peer("flashinfer.xqa", flashinfer.find)
