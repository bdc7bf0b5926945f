# SPDX-License-Identifier: Apache-2.0
"""cuDNN, by the operators of PyTorch that call it."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Missing, Peer


def _find() -> str:
    import torch

    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None:
        raise Missing(f"torch {torch.__version__} comes without cuDNN")
    return f"{version} of torch {torch.__version__}"


PEER = Peer("cudnn", _find)
