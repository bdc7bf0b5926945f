# SPDX-License-Identifier: Apache-2.0
"""Modules that plug into a model; they are in the ``module.py`` of their families."""

from tiercel import _families
from tiercel import _needs_torch as _needs_torch

_public = {
    name: value
    for module in _families.modules("module")
    for name, value in _families.defined([module], vars(module)).items()
    if isinstance(value, type) and not name.startswith("_")
}
globals().update(_public)
__all__ = sorted(_public)
