# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt's fused epilogues, by the operator of PyTorch that calls them."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Missing, Peer


def _find() -> str:
    import torch

    if not hasattr(torch, "_addmm_activation"):
        raise Missing(f"torch {torch.__version__} has no _addmm_activation")
    return f"of torch {torch.__version__}"


PEER = Peer("cublaslt", _find)
