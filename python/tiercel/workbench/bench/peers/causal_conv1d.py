# SPDX-License-Identifier: Apache-2.0
"""causal-conv1d: CUDA kernels of Mamba's authors."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, package

PEER = Peer("causal-conv1d", package("causal-conv1d", "causal_conv1d"))
