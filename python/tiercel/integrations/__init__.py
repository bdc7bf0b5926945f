# SPDX-License-Identifier: Apache-2.0
"""Doors for other libraries: each module imports its own, and none is imported by `tiercel`."""

from tiercel import _needs_torch as _needs_torch
