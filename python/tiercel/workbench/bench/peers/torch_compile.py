# SPDX-License-Identifier: Apache-2.0
"""torch.compile of the same PyTorch code, for fixed shapes."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer, torch_eager

PEER = Peer("torch.compile", torch_eager.version, on_request=True)
