# SPDX-License-Identifier: Apache-2.0
"""PyTorch, op by op."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer


def version() -> str:
    import torch

    return str(torch.__version__)


PEER = Peer("torch", version)
