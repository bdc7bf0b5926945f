# SPDX-License-Identifier: Apache-2.0
"""How each peer is called for our operators; one file a family.

A file has ``ADAPTERS``: a peer's name -> our operator's name -> (case, inputs) -> the same call,
which may raise Unsupported.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from tiercel.bench.launch import Launch

Adapter = Callable[[Any, dict[str, Any]], Launch]


def load() -> dict[str, dict[str, Adapter]]:
    """A peer's name -> operator -> its adapter. Importing them needs no peer and no torch."""
    found: dict[str, dict[str, Adapter]] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        for peer, ops in importlib.import_module(f"{__name__}.{module}").ADAPTERS.items():
            found.setdefault(peer, {}).update(ops)
    return found
