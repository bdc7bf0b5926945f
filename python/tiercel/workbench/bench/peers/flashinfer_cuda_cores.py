# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's decode kernels that do without tensor cores."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, flashinfer

PEER = Peer("flashinfer.cuda_cores", flashinfer.find)
