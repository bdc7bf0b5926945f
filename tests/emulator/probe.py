# SPDX-License-Identifier: Apache-2.0
"""The emulator's tensor part from Python: libprobe.so, with tensors of PyTorch as memory."""

import ctypes
import os

import torch

ELEMENTS = ("f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "f32", "s32")
DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s8": torch.int8,
    "u8": torch.uint8,
    "f32": torch.float32,
    "tf32": torch.float32,
    "s32": torch.int32,
}
FORMATS = ("f16", "bf16", "e4m3", "e5m2", "e2m1", "tf32", "f32")

library = ctypes.CDLL(os.environ["EMULATOR_PROBE"])


def call(name, *arguments):
    """Calls a function; raises ValueError with what it says is wrong."""
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    wrong = function(*[_argument(argument) for argument in arguments])
    if wrong is not None:
        raise ValueError(wrong.decode())


def _argument(argument):
    if isinstance(argument, torch.Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, str):
        return argument.encode()
    if isinstance(argument, int) and abs(argument) > 2**31 - 1:
        return ctypes.c_uint64(argument)
    return argument


def u64(value):
    return ctypes.c_uint64(value)


def random_elements(element, shape, seed=0):
    """Random numbers that the type has, as the type and as float64. Small integers in the wide
    types, so that every sum is exact."""
    generator = torch.Generator().manual_seed(seed)
    low = 0 if element == "u8" else -4
    values = torch.randint(low, 5, shape, generator=generator)
    typed = values.to(DTYPES[element])
    return typed, typed.double()


def pack(values):
    """Values along the last dimension of a register's size, as its 32 bits."""
    values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8).view(torch.int32).squeeze(-1)


def swizzle(offset, mode):
    """Where the byte lies: bits 4.. get bits 7.. xored, as many as the mode (0 to 3) says."""
    return offset ^ (((offset >> 7) & (2**mode - 1)) << 4)
