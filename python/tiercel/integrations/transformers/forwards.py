# SPDX-License-Identifier: Apache-2.0
"""Forwards on instances of modules."""

from __future__ import annotations

from torch import nn


def is_replaced(module: nn.Module) -> bool:
    """True if the instance has another forward than its class.

    Pickling writes a forward that we set as the module's own, which the copy then has on its
    instance.
    """
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward
