# SPDX-License-Identifier: Apache-2.0
"""``torch.compile`` as a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_last: dict[Any, Callable[..., Any]] = {}  # one compilation for all inputs of a case


def compiled_for(case: Any, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``function`` compiled for this case alone, with torch.compile's ``options``."""
    import torch

    if case.key not in _last:
        torch._dynamo.reset()
        _last.clear()
        _last[case.key] = torch.compile(function, dynamic=False, fullgraph=True, **options)
    return _last[case.key]
