# SPDX-License-Identifier: Apache-2.0
"""Precompiled Hopper (SM90a) kernels for PyTorch.

Importing this costs next to nothing and needs neither PyTorch nor a GPU; an error says what is
missing when it is needed. The operators are also ``torch.ops.tiercel.*``: registered at once if
torch is imported already, else on first use or by ``import tiercel.ops``.
"""

import sys

from tiercel._version import __version__ as __version__

# Beside the operators. Public name -> the module that defines it.
_LAZY = {
    "NUMERICS": "tiercel.core.numerics",
    "FallbackWarning": "tiercel.backends",
    "batch_invariant": "tiercel.core.invariance",
    "explain": "tiercel._explain",
    "is_batch_invariant": "tiercel.core.invariance",
    "load": "tiercel._load",
    "set_backend": "tiercel.backends",
    "set_batch_invariant": "tiercel.core.invariance",
    "use_backend": "tiercel.backends",
}
_SUBMODULES = ("backends", "jit", "nn", "ops", "ref")


def _home(name: str) -> str:
    """The module that has a public name."""
    if name in _LAZY:
        return _LAZY[name]
    if not name.startswith("_"):
        from tiercel._families import public_names

        if name in public_names():
            return "tiercel.ops"
    raise AttributeError(f"module 'tiercel' has no attribute {name!r}")


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _SUBMODULES:
        return import_module(f"tiercel.{name}")
    if name == "__all__":
        from tiercel._families import public_names

        return sorted({"__version__", *_LAZY, *_SUBMODULES, *public_names()})
    value = getattr(import_module(_home(name)), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__getattr__("__all__")))


def _register_if_torch_is_there() -> None:
    torch = sys.modules.get("torch")
    # Not while torch itself is still importing (it may import us as a plug-in).
    if torch is None or getattr(getattr(torch, "__spec__", None), "_initializing", False):
        return
    from tiercel._torch import missing_torch

    if missing_torch() is None:
        import tiercel.ops  # noqa: F401


_register_if_torch_is_there()
