# SPDX-License-Identifier: Apache-2.0
"""The contracts of all operators: the lists ``CONTRACTS`` of the families' ``contract.py``."""

from __future__ import annotations

from tiercel import _families
from tiercel.plugins.contract import Contract

CONTRACTS: dict[str, Contract] = {
    contract.op: contract
    for module in _families.modules("contract")
    for contract in module.CONTRACTS
}


def contract_of(op: str) -> Contract:
    """The contract of an operator.

    Raises:
        ValueError: There is none.
    """
    if op not in CONTRACTS:
        raise ValueError(f"no operator {op!r} takes backends; these do: {', '.join(CONTRACTS)}")
    return CONTRACTS[op]
