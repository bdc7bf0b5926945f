# SPDX-License-Identifier: Apache-2.0
"""The op families: the folders of ``tiercel/ops``. Needs no torch.

A file's kind is its name up to an underscore, such as ``cases`` for ``cases_backward.py``. Files
of none of the kinds below are of kind "op": they define operators, or parts of them.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

_OPS = "tiercel.ops"
_FOLDER = Path(__file__).with_name("ops")
# Kinds that need no operator: importing them registers none.
_PLAIN = ("cases", "contract", "peers", "reference", "spec", "tiling", "tune")
_KINDS = (*_PLAIN, "module")


def _kind(module: str) -> str:
    word = module.rpartition(".")[2].partition("_")[0]
    return word if word in _KINDS else "op"


def names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules([str(_FOLDER)]) if m.ispkg)


def files(kind: str) -> list[str]:
    """The full names of the modules of a kind, of all families."""
    return [
        f"{_OPS}.{family}.{name}"
        for family in names()
        for name in sorted(m.name for m in pkgutil.iter_modules([str(_FOLDER / family)]))
        if _kind(name) == kind
    ]


def modules(kind: str) -> list[ModuleType]:
    """The modules of a kind, of all families."""
    there = _OPS in sys.modules
    found = [importlib.import_module(name) for name in files(kind)]
    if not there and kind in _PLAIN:
        _forget_packages()
    return found


def _forget_packages() -> None:
    """Lets the next import of `tiercel.ops` register the operators, if this one did not."""
    package = sys.modules.get(_OPS)
    if package is not None and "__all__" not in vars(package):
        for name in [_OPS, *(f"{_OPS}.{family}" for family in names())]:
            sys.modules.pop(name, None)
        vars(sys.modules["tiercel"]).pop("ops", None)


@functools.cache
def public_names() -> frozenset[str]:
    """The public functions' names: those of the contracts, and those that have none."""
    found: list[str] = []
    for module in modules("contract"):
        found += [contract.op for contract in module.CONTRACTS]
        found += getattr(module, "WITHOUT_CONTRACT", ())
    return frozenset(found)


def defined(found: Iterable[ModuleType], public: Iterable[str]) -> dict[str, object]:
    """The objects of these names that the modules define themselves, by name."""
    return {
        name: vars(module)[name]
        for module in found
        for name in sorted(vars(module).keys() & set(public))
        if getattr(vars(module)[name], "__module__", None) == module.__name__
    }


def only_plain_is_wanted() -> bool:
    """Returns True if `tiercel.ops` is being imported only as the parent of a module below it
    that needs no operator. The import system imports parents first: its frames say for what."""
    wanted, frame = _OPS, sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            name = frame.f_locals.get("name")
            if not isinstance(name, str) or not f"{name}.".startswith(f"{wanted}."):
                break
            wanted = name
        frame = frame.f_back
    return wanted.count(".") == 3 and _kind(wanted) in _PLAIN
