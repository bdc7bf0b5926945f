# SPDX-License-Identifier: Apache-2.0
"""Our own ops for parts of a case, one call after the other: what a single call has to beat."""

from __future__ import annotations

from tiercel.workbench.bench.peers import Peer


def find() -> str:
    import tiercel

    return tiercel.__version__


PEER = Peer("separate", find)
