# SPDX-License-Identifier: Apache-2.0
"""FlashMLA, DeepSeek's kernels for latent attention, in SGLang's wheel, which has them for SM90."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, package

PEER = Peer("flash_mla", package("sgl-flash-mla", "flash_mla"))
