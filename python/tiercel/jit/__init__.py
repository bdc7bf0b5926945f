# SPDX-License-Identifier: Apache-2.0
"""Compiles your own kernels on the machine where they run, each once, through Tiercel's cache.

- :func:`cuda`: CUDA C++ with nvcc, launched on torch tensors
- :func:`cute`: a kernel of the CuTe DSL with its declaration
- :func:`extension`: a pybind11 module, without torch's headers
- :func:`load`: what ``save=`` wrote, without a compiler

``pip install tiercel[jit]`` installs the compilers. See
https://github.com/tiercel/tiercel/blob/main/docs/first-kernel.md.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CompileError", "cuda", "cute", "extension", "load"]

_WHERE = {
    "CompileError": "tiercel.jit.toolchain",
    "cuda": "tiercel.jit.kernel",
    "cute": "tiercel.jit.cute_kernel",
    "extension": "tiercel.jit.extension_module",
    "load": "tiercel.jit.kernel",
}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tiercel.jit.cute_kernel import cute as cute
    from tiercel.jit.extension_module import extension as extension
    from tiercel.jit.kernel import cuda as cuda
    from tiercel.jit.kernel import load as load
    from tiercel.jit.toolchain import CompileError as CompileError


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module 'tiercel.jit' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
