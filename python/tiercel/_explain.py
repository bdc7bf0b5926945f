# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tiercel import _needs_torch as _needs_torch
from tiercel import ops as ops  # fills the registry
from tiercel._op import Op, registry
from tiercel.backends import requested


@dataclass(frozen=True)
class Explanation:
    """What a call would run on; ``str()`` of it reads as one paragraph."""

    op: str
    backend: str
    reason: str
    configuration: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.op} runs on {self.backend}: {self.reason}"]
        lines += [f"  {name}: {value}" for name, value in self.configuration.items()]
        return "\n".join(lines)


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Says which backend and configuration a call would use, and why, without running it.

    Args:
        op: The operator, such as ``tiercel.topk_softmax``, or its name.
        *args: The call's arguments.
        **kwargs: The call's keyword arguments.

    Raises:
        ValueError: No such operator. What the call itself would raise is raised too.

    Example:
        >>> print(tiercel.explain(tiercel.topk_softmax, scores, 8))
    """
    found = _find(op)
    assert found.public is not None
    bound = inspect.signature(found.public).bind(*args, **kwargs)
    bound.apply_defaults()
    values = tuple(bound.arguments[name] for name in found.argument_names)
    found.check_tensors(values[:1])  # others may be optional, and are compared with it
    found.check(*values)
    name = values[-1] or requested(found.family)
    backend, fallback = found.resolve(name, values)
    if fallback is not None:
        reason = f"sm90 does not apply, {fallback.text}"
    elif name is None or name == "auto":
        reason = "the precompiled kernel applies"
    else:
        reason = "it was asked for"
    configuration = {}
    if backend.name == "sm90" and found.describe is not None:
        configuration = found.describe(*values)
    return Explanation(found.name, backend.name, reason, configuration)


def _find(op: str | Callable[..., Any]) -> Op:
    for candidate in registry.values():
        if op == candidate.name or op is candidate.public:
            return candidate
    raise ValueError(f"tiercel has no operator {op!r}; it has {', '.join(sorted(registry))}")
