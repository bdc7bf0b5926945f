# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.tiercel.<op>`` with the arguments of ``tiercel.<op>``.

An operator's own schema has no optional tensors among the first ones. Where the public function has
some, or there is no operator of that name, the name gets a second overload made from the function's
signature. It holds no kernel: torch decomposes it into the operators that the function calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tiercel._op import library

# Annotations of arguments and results, as schemas spell them.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "bool": "bool",
    "float": "float",
    "float | None": "float?",
    "int": "int",
    "int | None": "int?",
    "str": "str",
    "str | None": "str?",
    "torch.dtype": "ScalarType?",  # a schema cannot have a dtype as default value
    "torch.dtype | None": "ScalarType?",
    "tuple[Tensor, Tensor]": "(Tensor, Tensor)",
}
# A given scale is returned as it is, and `inplace` writes to arguments: no schema says "perhaps".
_LEFT_OUT = {("fp8_quantize", "scale"), ("rotary_embedding", "inplace")}
# An argument with which there is one more result, and then the results.
_MORE_RESULTS = {"residual": ("Tensor", "(Tensor, Tensor)")}


def _argument(parameter: inspect.Parameter) -> str | None:
    """One argument of a schema, or None for what a schema does not have, such as ``out``."""
    kind = _TYPES.get(str(parameter.annotation))
    if kind is None or parameter.name == "out":
        return None
    default = parameter.default
    if default is parameter.empty:
        return f"{kind} {parameter.name}"
    return f"{kind} {parameter.name}={None if kind == 'ScalarType?' else default!r}"


def _schema(parameters: list[inspect.Parameter], results: str, required: str = "") -> str:
    parts = []
    named = False
    for parameter in parameters:
        if parameter.name == required:
            parameter = parameter.replace(annotation="Tensor", default=parameter.empty)
        text = _argument(parameter)
        if text is None:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            parts.append("*")
            named = True
        parts.append(text)
    return f"({', '.join(parts)}) -> {results}"


def _schemas(name: str, function: Callable[..., Any]) -> dict[str, str]:
    """Overload -> its schema."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if (name, p.name) not in _LEFT_OUT]
    results = _TYPES.get(str(signature.return_annotation))
    if results is not None:
        return {"optional": _schema(parameters, results)}
    for more, (few, many) in _MORE_RESULTS.items():
        if more in signature.parameters:
            plain = [p for p in parameters if p.name != more]
            return {"optional": _schema(plain, few), more: _schema(parameters, many, more)}
    return {}


def _lacks(name: str, function: Callable[..., Any]) -> bool:
    """True if the function takes calls that the operator of that name does not."""
    operator = getattr(torch.ops.tiercel, name, None)
    if operator is None:
        return True
    arguments = {a.name: a for a in operator.default._schema.arguments}
    if any(a.is_write for a in arguments.values()):
        return False
    for parameter in inspect.signature(function).parameters.values():
        if _argument(parameter) is None or (name, parameter.name) in _LEFT_OUT:
            continue
        there = arguments.get(parameter.name)
        optional = parameter.default is not parameter.empty
        if there is None or (optional and not there.has_default_value()):
            return True
    return False


def _caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without the dtypes that were not given."""
    dtypes = {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if str(parameter.annotation).startswith("torch.dtype")
    }

    def call(*args: Any, **named: Any) -> Any:
        return function(
            *args, **{n: v for n, v in named.items() if not (n in dtypes and v is None)}
        )

    return call


def register(functions: dict[str, Callable[..., Any]]) -> None:
    """Registers the overloads that the public functions need beside their operators."""
    for name, function in functions.items():
        if not _lacks(name, function):
            continue
        for overload, schema in _schemas(name, function).items():
            library.define(f"{name}.{overload}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
            library.impl(f"{name}.{overload}", _caller(function), "CompositeImplicitAutograd")
