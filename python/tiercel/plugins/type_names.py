# SPDX-License-Identifier: Apache-2.0
"""The source of ``tiercel.plugins.types``, from the contracts. Needs no torch.

A family's ``contract.py`` may name tensors in ``ALIASES`` (``{"Scores": "topk_softmax.scores"}``)
and a protocol that several ops share in ``PROTOCOLS``. Other ops' protocols have the op's name.
"""

from __future__ import annotations

from tiercel import _families
from tiercel.plugins.contract import Contract, ScalarSpec, TensorSpec
from tiercel.plugins.contracts import CONTRACTS

_HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
"""Type aliases for backends: a tensor and, as its annotation, what the contract says of it."""

from typing import Annotated, Protocol

import torch
from torch import Tensor

from tiercel.plugins.contracts import CONTRACTS
'''
_SCALARS = {
    "dtype": "torch.dtype",
    "(int, int)": "tuple[int, int]",
    "(int, int, int)": "tuple[int, int, int]",
}


def _named(attribute: str) -> dict[str, str]:
    """The lists of that name in the families' ``contract.py``."""
    found: dict[str, str] = {}
    for module in _families.modules("contract"):
        found |= getattr(module, attribute, {})
    return found


class _Aliases:
    """The names of tensors: that of the tensor itself, or of one with an equal specification."""

    def __init__(self) -> None:
        self.tensors: dict[str, str] = {}
        self._names: dict[TensorSpec | tuple[str, TensorSpec], str] = {}
        for name, where in _named("ALIASES").items():
            op, _, tensor = where.partition(".")
            contract = CONTRACTS[op]
            self.tensors[name] = _annotated(contract, contract.spec(tensor))
            self._names[op, contract.spec(tensor)] = name
            self._names.setdefault(contract.spec(tensor), name)

    def annotation(self, contract: Contract, spec: TensorSpec) -> str:
        name = self._names.get((contract.op, spec)) or self._names.get(spec)
        return name or _annotated(contract, spec)


def _annotated(contract: Contract, spec: TensorSpec) -> str:
    # An argument and an output may have one name.
    own = contract.spec(spec.name) == spec
    where = f'spec("{spec.name}")' if own else f"outputs[{contract.outputs.index(spec)}]"
    base = "Tensor | None" if spec.optional else "Tensor"
    return f'Annotated[{base}, CONTRACTS["{contract.op}"].{where}]'


def _scalar(spec: ScalarSpec) -> str:
    kind, *none = spec.type.split(" | ")
    return " | ".join([_SCALARS.get(kind, kind), *none])


def _result(contract: Contract, aliases: _Aliases) -> str:
    """The results of a backend; fewer where an output comes with an argument."""

    def joined(outputs: list[TensorSpec]) -> str:
        names = [aliases.annotation(contract, spec) for spec in outputs]
        return names[0] if len(names) == 1 else f"tuple[{', '.join(names)}]"

    always = [spec for spec in contract.outputs if not spec.comes_with]
    return " | ".join(dict.fromkeys([joined(always), joined(list(contract.outputs))]))


def _protocol(name: str, ops: list[str], aliases: _Aliases) -> str:
    contract = CONTRACTS[ops[0]]
    arguments = "".join(
        f"        {each.name}: "
        + (aliases.annotation(contract, each) if isinstance(each, TensorSpec) else _scalar(each))
        + ",\n"
        for each in contract.arguments
    )
    return (
        f'class {name}(Protocol):\n    """A backend of {" or ".join(ops)}."""\n\n'
        f"    def __call__(\n        self,\n{arguments}    ) -> {_result(contract, aliases)}: ...\n"
    )


def source() -> str:
    aliases, shared = _Aliases(), _named("PROTOCOLS")
    protocols: dict[str, list[str]] = {}
    for op in CONTRACTS:
        own = "".join(word.capitalize() for word in op.split("_"))
        protocols.setdefault(shared.get(op, own), []).append(op)
    names = sorted([*aliases.tensors, *protocols])
    texts = [
        _HEAD,
        f"__all__ = {names!r}\n",
        "".join(f"{name} = {text}\n" for name, text in aliases.tensors.items()),
        *(_protocol(name, ops, aliases) for name, ops in protocols.items()),
    ]
    return "\n".join(texts)
