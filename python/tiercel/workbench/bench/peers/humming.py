# SPDX-License-Identifier: Apache-2.0
"""Humming: weights of few bits. It compiles a layer's kernels at its first call."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, package

PEER = Peer("humming", package("humming-kernels", "humming.layer"))
