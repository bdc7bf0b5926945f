# SPDX-License-Identifier: Apache-2.0
"""Transitional: operators that are not declared by a Spec yet."""

from __future__ import annotations

from typing import Any

from tiercel.core.dispatch import Autograd as Autograd
from tiercel.core.dispatch import Backend as Backend
from tiercel.core.dispatch import Eager, Operator, registry, variants

registry = registry
families = variants


def Op(  # noqa: N802
    name: str, schema: str, *, family: str | None = None, launch: Any = None, **more: Any
) -> Any:
    eager = None
    if launch is not None:
        count = schema.partition("->")[0].count(",")
        eager = Eager(launch, tuple(("argument", i) for i in range(count)), returns=True)
    return Operator(name, schema, variant_of=family, eager=eager, **more)
