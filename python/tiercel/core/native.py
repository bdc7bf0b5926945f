# SPDX-License-Identifier: Apache-2.0
"""Operators as functions of torch's dispatcher that need no Python, through torch's stable C
interface. Calls from C++ launch without the GIL then; those that are not plain go on to the Python
functions. On a torch that is not in TESTED, and with TIERCEL_NATIVE=0, all calls go to them."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from tiercel import _C

# Releases of torch on which tests/emulator/test_native.py passed. How values cross changes from one
# to the next, and a wrong reading of them is a crash.
TESTED = ((2, 11), (2, 13))

# Operators that C++ calls through Python -> why.
through_python: dict[str, str] = {}

# Types of arguments that cross without Python.
_KINDS = {"Tensor", "int", "float", "bool", "ScalarType", "str"}

os.register_at_fork(after_in_child=lambda: _C.set_native_device(-1, False))


def is_tested(version: str) -> bool:
    """Whether it is a release in TESTED: a vendor's or a nightly build's interface may differ."""
    release = re.fullmatch(r"(\d+)\.(\d+)\.\d+(\+(cpu|cu\d+))?", version)
    return release is not None and (int(release[1]), int(release[2])) in TESTED


def _wanted() -> bool:
    return os.environ.get("TIERCEL_NATIVE", "1").lower() not in ("", "0", "false", "no", "off")


_aoti = getattr(torch._C, "_aoti", None)
if (
    _wanted()
    and is_tested(str(torch.__version__))
    and hasattr(_aoti, "alloc_tensors_by_stealing_from_void_ptrs")
):
    _C.set_native_hooks(
        _aoti.alloc_tensors_by_stealing_from_void_ptrs,
        _aoti.unsafe_alloc_void_ptr_from_tensor,
        tuple({value for value in vars(torch).values() if isinstance(value, torch.dtype)}),
    )


def _described(schema: Any, names: tuple[str, ...]) -> tuple[tuple[str, bool, int], ...] | str:
    """What `_C.register_native` takes, or the argument that keeps it from that."""
    places = {argument.name: place for place, argument in enumerate(schema.arguments)}
    described = []
    for name in names:
        place = places[name]
        text = str(schema.arguments[place].real_type)
        whole = re.fullmatch(r"Optional\[(\w+)\]", text)
        kind = whole[1] if whole else text
        if kind not in _KINDS:
            return f"`{name}` is {text}"
        described.append((kind, whole is not None, place))
    return tuple(described)


def register(
    name: str,
    overload: Any,
    names: tuple[str, ...],
    below: Any,
    autograd: Any,
    *,
    emulated: bool = False,
) -> None:
    """Registers an operator.

    Args:
        name: Its name, with the overload's.
        overload: torch's object.
        names: Its arguments in the order of the eager calls.
        below: Its `_C.EagerCall` below autograd.
        autograd: That before it.
        emulated: Take tensors on the CPU for a GPU's: for tests on an emulated driver.
    """
    described = _described(overload._schema, names)
    if isinstance(described, str):
        through_python[name] = described
        return
    namespace = overload._schema.name.partition("::")[0]
    why = _C.register_native(namespace, name, below, autograd, described, emulated=emulated)
    if why is not None:
        through_python[name] = why
