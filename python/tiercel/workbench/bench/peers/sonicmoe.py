# SPDX-License-Identifier: Apache-2.0
"""SonicMoE: experts' MLPs for training on quack's products, which it tunes at the first call."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, package

PEER = Peer("sonicmoe", package("sonic-moe", "sonicmoe.functional"))
