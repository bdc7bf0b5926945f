# SPDX-License-Identifier: Apache-2.0
"""The package's kernels on the CPU: its own launchers over the emulator (docs/emulator.md).

Import this before tiercel. `sm90("reduce")` is the fast backend of that operator, for torch's CPU
tensors; `kernels` is tiercel._C likewise. What a kernel touches beyond the tensors is an error.
"""

import contextlib
import ctypes
import os
import sys
import types

import torch
from support import emulated_module
from support.dlpack_tensor import as_cuda

driver = ctypes.CDLL(os.environ["TIERCEL_LIBCUDA"])
driver.emulator_register.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p)
driver.emulator_unregister.argtypes = (ctypes.c_void_p,)
driver.emulator_set_options.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
driver.emulator_instructions.restype = ctypes.c_uint64


def _bytes(tensor):
    """The extent of a view, from its first element to behind its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@contextlib.contextmanager
def registered(*tensors):
    """While the block runs, kernels may touch these tensors."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    for i, tensor in enumerate(tensors):
        driver.emulator_register(tensor.data_ptr(), _bytes(tensor), b"tensor %d" % i)
    try:
        yield
    finally:
        for tensor in tensors:
            driver.emulator_unregister(tensor.data_ptr())


def _on_emulator(function):
    def call(*arguments, **named):
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        if not tensors:
            return function(*arguments, **named)
        with registered(*tensors):
            return function(
                *(as_cuda(x, x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments)
            )

    return call


def _load():
    """tiercel._C whose functions take CPU tensors for a GPU's."""
    real = emulated_module.load()
    module = types.ModuleType("tiercel._C")
    for name, value in vars(real).items():
        launches = isinstance(value, types.BuiltinFunctionType) and name not in ("empty", "route")
        setattr(module, name, _on_emulator(value) if launches else value)
    module.verify_draft = _with_workspace(module.verify_draft, module.verify_draft_workspace)
    return module


def _with_workspace(launch, elements):
    """Makes the workspace that verify_draft's launch would allocate on a GPU."""
    tokens, place = 9, 11

    def call(*arguments):
        if arguments[place] is None:
            size = elements(arguments[tokens].numel())
            given = torch.empty(size, dtype=torch.int64)
            arguments = (*arguments[:place], given, *arguments[place + 1 :])
        return launch(*arguments)

    return call


assert "tiercel" not in sys.modules, "support.emulator must be imported before tiercel"
kernels = sys.modules["tiercel._C"] = _load()


def _operator(name):
    from tiercel.core.dispatch import variants as families

    for operators in families.values():
        for one in operators:
            if one.name == name:
                return one
    raise LookupError(name)


def sm90(operator):
    """An operator's fast backend: all its arguments by position, `backend` last."""
    return _operator(operator).backends["sm90"].run


def plan(operator):
    """What that would launch, of the same arguments."""
    return _operator(operator).describe


@contextlib.contextmanager
def options(
    lazy=True,
    seed=0,
    max_instructions=2_000_000_000,
    short_fp8_adder=False,
    multiprocessors=0,
    share=False,
):
    """How launches in the block run; `share`: of a GPU, which takes clusters of 8 at most."""
    driver.emulator_set_options(lazy, seed, max_instructions)
    driver.emulator_set_short_fp8_adder(short_fp8_adder)
    driver.emulator_set_multiprocessors(multiprocessors, share)
    try:
        yield
    finally:
        driver.emulator_set_options(True, 0, 2_000_000_000)
        driver.emulator_set_short_fp8_adder(False)
        driver.emulator_set_multiprocessors(0, False)


def instructions():
    """Warp instructions that have run so far."""
    return driver.emulator_instructions()
