# SPDX-License-Identifier: Apache-2.0
"""Compares a function's signature with the contract's, and finds how to call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def conform(who: str, fn: Any, names: Sequence[str]) -> Callable[..., Any]:
    """A function that takes `names` by position; `fn` itself, unless some are keyword-only.

    Raises:
        TypeError: The signature is another one; the message says what is missing, extra, renamed
            or out of order.
    """
    if not callable(fn):
        raise TypeError(f"{who} must be callable, got {type(fn).__name__}")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # compiled functions may have none
        return fn  # type: ignore[no-any-return]
    parameters = [p for p in signature.parameters.values() if p.name in names or _is_named(p)]
    problems = _problems(signature, parameters, names)
    if problems:
        raise TypeError(
            f"{who} has the wrong signature: {'; '.join(problems)}. "
            f"Expected ({', '.join(names)}), got {_shown(signature)}"
        )
    return _caller(fn, signature, names)


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def _shown(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _problems(
    signature: inspect.Signature, parameters: list[inspect.Parameter], names: Sequence[str]
) -> list[str]:
    kinds = {p.kind for p in signature.parameters.values()}
    given = [p.name for p in parameters]
    missing = [name for name in names if name not in given]
    if inspect.Parameter.VAR_KEYWORD in kinds or inspect.Parameter.VAR_POSITIONAL in kinds:
        missing = []
    problems, renamed = [], set()
    for name in list(missing):
        place = list(names).index(name)
        if place < len(given) and given[place] not in names:
            problems.append(f"argument {place + 1} is `{given[place]}`, must be `{name}`")
            renamed.add(given[place])
            missing.remove(name)
    problems += [f"`{name}` is missing" for name in missing]
    for parameter in parameters:
        unknown = parameter.name not in names and parameter.name not in renamed
        if unknown and parameter.default is parameter.empty:
            problems.append(f"`{parameter.name}` is extra and has no default")
    known = [p.name for p in parameters if p.kind in _POSITIONAL and p.name in names]
    if known != [name for name in names if name in known]:
        problems.append(f"the order is {', '.join(known)}")
    return problems


def _caller(
    fn: Callable[..., Any], signature: inspect.Signature, names: Sequence[str]
) -> Callable[..., Any]:
    positional = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL]
    kinds = {p.kind for p in signature.parameters.values()}
    if positional[: len(names)] == list(names):
        return fn
    # The beginning by position, the rest by name.
    first = 0
    while first < len(positional) and positional[first] == names[first]:
        first += 1
    if first == len(positional) and inspect.Parameter.VAR_POSITIONAL in kinds:
        return fn
    rest = tuple(names[first:])

    def call(*values: Any) -> Any:
        return fn(*values[:first], **dict(zip(rest, values[first:], strict=True)))

    return call
