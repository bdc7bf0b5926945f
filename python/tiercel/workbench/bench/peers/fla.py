# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention: Triton kernels for linear attention."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, package

PEER = Peer("fla", package("fla-core", "fla.ops"))
