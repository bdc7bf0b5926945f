# SPDX-License-Identifier: Apache-2.0
"""How each peer is called for our operators: the families' ``peers.py``.

A file has ``ADAPTERS``: a peer's name -> our operator's name -> (case, inputs) -> the same call,
which may raise Unsupported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel import _families
from tiercel.workbench.bench.launch import Launch

Adapter = Callable[[Any, dict[str, Any]], Launch]


def load() -> dict[str, dict[str, Adapter]]:
    """A peer's name -> operator -> its adapter. Importing them needs no peer and no torch."""
    found: dict[str, dict[str, Adapter]] = {}
    for module in _families.modules("peers"):
        for peer, ops in module.ADAPTERS.items():
            found.setdefault(peer, {}).update(ops)
    return found
