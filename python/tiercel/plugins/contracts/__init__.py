# SPDX-License-Identifier: Apache-2.0
"""The contracts of all operators; one module a family."""

from __future__ import annotations

from tiercel.plugins.contract import Contract
from tiercel.plugins.contracts import linear, routing

CONTRACTS: dict[str, Contract] = {c.op: c for c in (linear.LINEAR_ACT, routing.TOPK_SOFTMAX)}


def contract_of(op: str) -> Contract:
    """The contract of an operator.

    Raises:
        ValueError: There is none.
    """
    if op not in CONTRACTS:
        raise ValueError(f"no operator {op!r} takes backends; these do: {', '.join(CONTRACTS)}")
    return CONTRACTS[op]
