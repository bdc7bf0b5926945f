# SPDX-License-Identifier: Apache-2.0
"""Imported first by every module that cannot be imported without PyTorch."""

from tiercel._torch import missing_torch

problem = missing_torch()
if problem is not None:
    raise ImportError(problem)
