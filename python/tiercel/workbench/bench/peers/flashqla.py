# SPDX-License-Identifier: Apache-2.0
"""FlashQLA: the delta rule with a gate per head, in TileLang, compiled at the first call."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, package

PEER = Peer("flashqla", package("flash-qla", "flash_qla"))
