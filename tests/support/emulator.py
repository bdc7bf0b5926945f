# SPDX-License-Identifier: Apache-2.0
"""The package's kernels on the CPU: the extension module over the emulator (docs/emulator.md).

``run("softmax", x, None, out, 1.0, False)`` calls ``_C.softmax`` with torch's CPU tensors, which
the launcher takes for a GPU's. What kernels touch beyond these tensors is an error.
"""

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os

import torch
from support.dlpack_tensor import DTYPES, ExchangeTensor

_driver = ctypes.CDLL(os.environ["TIERCEL_LIBCUDA"])
_driver.emulator_register.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p)
_driver.emulator_unregister.argtypes = (ctypes.c_void_p,)
_driver.emulator_set_options.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
_driver.emulator_instructions.restype = ctypes.c_uint64


def _load():
    path = os.environ["TIERCEL_EMULATED_MODULE"]
    loader = importlib.machinery.ExtensionFileLoader("tiercel._C", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("tiercel._C", loader))
    loader.exec_module(module)
    return module


kernels = _load()


def _bytes(tensor):
    """The extent of a view, from its first element to behind its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def as_cuda(tensor):
    """A CPU tensor as the launcher sees one of a GPU."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    assert dtype in DTYPES, dtype
    return ExchangeTensor(
        *tensor.shape, dtype=dtype, strides=tensor.stride(), address=tensor.data_ptr()
    )


def run(function, *arguments):
    """Calls a function of the extension module and returns what it returned."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    for i, tensor in enumerate(tensors):
        if tensor.numel():
            _driver.emulator_register(tensor.data_ptr(), _bytes(tensor), b"tensor %d" % i)
    try:
        return getattr(kernels, function)(
            *(as_cuda(x) if isinstance(x, torch.Tensor) else x for x in arguments)
        )
    finally:
        for tensor in tensors:
            _driver.emulator_unregister(tensor.data_ptr())


@contextlib.contextmanager
def options(lazy=True, seed=0, max_instructions=2_000_000_000):
    """How launches in the block run."""
    _driver.emulator_set_options(lazy, seed, max_instructions)
    try:
        yield
    finally:
        _driver.emulator_set_options(True, 0, 2_000_000_000)


def instructions():
    """Warp instructions that have run so far."""
    return _driver.emulator_instructions()
