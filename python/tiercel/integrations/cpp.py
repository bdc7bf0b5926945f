# SPDX-License-Identifier: Apache-2.0
"""Tiercel's ops in C++ programs without Python."""

from __future__ import annotations

from pathlib import Path

from tiercel import _C


def library() -> Path:
    """The shared library that a C++ program loads, with ``dlopen``, for Tiercel's ops.

    Its function ``const char* tiercel_register_torch_ops()`` registers the ops with the dispatcher
    of the libtorch that the process has loaded, version 2.10 or newer, through PyTorch's stable C
    interface. It returns null, or the text of an error. Nothing of Python runs, neither then nor in
    a call.

    Returns:
        The path of the file.
    """
    return Path(_C.__file__).resolve()
