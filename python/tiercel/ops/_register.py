# SPDX-License-Identifier: Apache-2.0
"""Imports all operators, which registers them, and collects the public functions."""

import sys

from tiercel import _families
from tiercel import _needs_torch as _needs_torch
from tiercel.core.dispatch import registry
from tiercel.core.selection import warn_of_unknown_names

PUBLIC = _families.defined(_families.modules("op"), _families.public_names())
NAMES = {family: sys.modules[f"tiercel.ops.{family}"] for family in _families.names()} | PUBLIC

warn_of_unknown_names(registry)
