# SPDX-License-Identifier: Apache-2.0
"""Precompiled Hopper (SM90a) kernels for PyTorch.

Importing this costs next to nothing and needs neither PyTorch nor a GPU; what is missing is said
when it is needed. The operators are also ``torch.ops.tiercel.*``: registered at once if torch is
imported already, else on first use or by ``import tiercel.ops``.
"""

import sys

from tiercel._version import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tiercel import backends as backends
    from tiercel import nn as nn
    from tiercel import ops as ops
    from tiercel import ref as ref
    from tiercel._explain import explain as explain
    from tiercel._load import load as load
    from tiercel.backends import FallbackWarning as FallbackWarning
    from tiercel.backends import set_backend as set_backend
    from tiercel.backends import use_backend as use_backend
    from tiercel.ops.linear import linear_act as linear_act
    from tiercel.ops.norm import layer_norm as layer_norm
    from tiercel.ops.norm import rms_norm as rms_norm
    from tiercel.ops.routing import topk_softmax as topk_softmax

# Public name -> the module that defines it, imported when the name is first used.
_LAZY = {
    "FallbackWarning": "tiercel.backends",
    "explain": "tiercel._explain",
    "layer_norm": "tiercel.ops.norm",
    "linear_act": "tiercel.ops.linear",
    "load": "tiercel._load",
    "rms_norm": "tiercel.ops.norm",
    "set_backend": "tiercel.backends",
    "topk_softmax": "tiercel.ops.routing",
    "use_backend": "tiercel.backends",
}
_SUBMODULES = ("backends", "nn", "ops", "ref")

__all__ = [
    "FallbackWarning",
    "__version__",
    "backends",
    "explain",
    "layer_norm",
    "linear_act",
    "load",
    "nn",
    "ops",
    "ref",
    "rms_norm",
    "set_backend",
    "topk_softmax",
    "use_backend",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _SUBMODULES:
        return import_module(f"tiercel.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'tiercel' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


def _register_if_torch_is_there() -> None:
    torch = sys.modules.get("torch")
    # Not while torch itself is still importing (it may import us as a plug-in).
    if torch is None or getattr(getattr(torch, "__spec__", None), "_initializing", False):
        return
    from tiercel._torch import missing_torch

    if missing_torch() is None:
        import tiercel.ops  # noqa: F401


_register_if_torch_is_there()
