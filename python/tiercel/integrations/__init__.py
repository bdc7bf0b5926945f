# SPDX-License-Identifier: Apache-2.0
"""Adapters for other libraries: each module imports its library; `tiercel` imports none of them."""

from tiercel import _needs_torch as _needs_torch
