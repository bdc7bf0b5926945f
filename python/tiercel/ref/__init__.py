# SPDX-License-Identifier: Apache-2.0
"""The obvious PyTorch version of every operator: right, differentiable, on any device.

They are in the ``reference.py`` of their families, which are also here by the families' names.
"""

from tiercel import _families
from tiercel import _needs_torch as _needs_torch

_modules = {module.__name__.split(".")[-2]: module for module in _families.modules("reference")}
_public = _families.defined(_modules.values(), _families.public_names())
globals().update(_modules | _public)
__all__ = sorted(_public)
