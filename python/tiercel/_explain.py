# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tiercel import _needs_torch as _needs_torch
from tiercel.core.dispatch import CallIntercepted, ExplainRequest, Operator, registry
from tiercel.core.selection import requested
from tiercel.ops import _register as _register  # fills the registry


@dataclass(frozen=True)
class Explanation:
    """The backend that a call would run on; ``str()`` of it reads as one paragraph."""

    op: str
    backend: str
    reason: str
    configuration: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.op} runs on {self.backend}: {self.reason}"]
        lines += [f"  {name}: {value}" for name, value in self.configuration.items()]
        return "\n".join(lines)


def explain(op: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
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
    found = find(op)
    variant, values, arguments = resolve_call(found, *args, **kwargs)
    variant.check_tensors(values[:1])  # others may be optional, and are compared with it
    variant.check(*values)
    name = values[-1] or requested(found.variant_of)
    backend, fallback = variant.resolve(name, values)
    if fallback is not None:
        reason = f"sm90 does not apply, {fallback.text}"
    elif name is None or name == "auto":
        reason = "the precompiled kernel applies"
    else:
        reason = "it was asked for"
    configuration = {}
    if backend.name == "sm90" and found.describe is not None:
        if variant.describe is None:  # of one with `out`: as without it
            values = tuple(arguments[argument] for argument in found.argument_names)
            configuration = found.describe(*values)
        else:
            configuration = variant.describe(*values)
    return Explanation(found.variant_of, backend.name, reason, configuration)


def resolve_call(
    op: Operator, /, *args: Any, **kwargs: Any
) -> tuple[Operator, tuple[Any, ...], dict[str, Any]]:
    """The operator that a call reaches, the arguments that it gets, and the call's own."""
    assert op.public is not None
    signature = inspect.signature(op.public)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments | {"backend": ExplainRequest(bound.arguments["backend"])}
    by_place = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    first = [arguments.pop(name) for name in by_place]
    try:
        op.public(*first, **arguments)
    except CallIntercepted as intercepted:
        if intercepted.op.variant_of == op.variant_of:
            return intercepted.op, intercepted.args, bound.arguments
        # One that it is made of.
        values = tuple(bound.arguments[argument] for argument in op.argument_names)
        return op, values, bound.arguments
    raise AssertionError("the operator was not called")


def find(op: str | Callable[..., Any]) -> Operator:
    for name, candidate in registry.items():
        if op == name or op is candidate.public:
            return candidate
    raise ValueError(f"tiercel has no operator {op!r}; it has {', '.join(sorted(registry))}")
