# SPDX-License-Identifier: Apache-2.0
"""Liger: Triton kernels for training."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, package

PEER = Peer("liger", package("liger-kernel", "liger_kernel.ops"))
