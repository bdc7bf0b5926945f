# SPDX-License-Identifier: Apache-2.0
"""The contracts of all operators; one module a family, each with a list ``CONTRACTS``."""

from __future__ import annotations

import importlib
import pkgutil

from tiercel.plugins.contract import Contract

CONTRACTS: dict[str, Contract] = {
    contract.op: contract
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__))
    for contract in importlib.import_module(f"{__name__}.{module}").CONTRACTS
}


def contract_of(op: str) -> Contract:
    """The contract of an operator.

    Raises:
        ValueError: There is none.
    """
    if op not in CONTRACTS:
        raise ValueError(f"no operator {op!r} takes backends; these do: {', '.join(CONTRACTS)}")
    return CONTRACTS[op]
