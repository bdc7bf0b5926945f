# SPDX-License-Identifier: Apache-2.0
"""Imports all operators, which registers them, and collects the public functions."""

import sys

from tiercel import _families, backends
from tiercel import _needs_torch as _needs_torch
from tiercel._op import registry
from tiercel.ops import _optional

PUBLIC = _families.defined(_families.modules("op"), _families.public_names())
NAMES = {family: sys.modules[f"tiercel.ops.{family}"] for family in _families.names()} | PUBLIC

backends.warn_of_unknown_names(registry)
_optional.register(PUBLIC)
