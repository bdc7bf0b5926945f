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


TYPES = {  # numbers of CUtensorMapDataType
    torch.uint8: 0,
    torch.int32: 3,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class Map:
    """The 128 bytes, on 64; sizes, strides (bytes) and box with the innermost dimension first."""

    def __init__(self, base, dtype, sizes, strides, box, mode=0, fill=0, steps=None, interleave=0):
        room = torch.zeros(192, dtype=torch.uint8)
        self.bytes = room[-room.data_ptr() % 64 :][:128]
        lists = [
            torch.tensor(list(values) or [0], dtype=torch.int64) for values in (sizes, strides)
        ]
        lists += [
            torch.tensor(list(values), dtype=torch.int32)
            for values in (box, steps or [1] * len(box))
        ]
        type_number = dtype if isinstance(dtype, int) else TYPES[dtype]
        numbers = (type_number, len(box), u64(base))
        call("probe_encode_map", *numbers, *lists, interleave, mode, fill, self.bytes)


def map_of(tensor, box, mode=0, **options):
    """Of a tensor with aligned strides; box in the tensor's order."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()]
    sizes = list(tensor.shape)[::-1]
    return Map(tensor.data_ptr(), tensor.dtype, sizes, strides[-2::-1], box[::-1], mode, **options)


def tile(reduction, tensor_map, coordinates, shared, offset, tensor):
    storage = tensor.untyped_storage()
    coordinates = torch.tensor(coordinates[::-1], dtype=torch.int32)
    arguments = (coordinates, shared, shared.numel(), offset)
    whole = u64(storage.nbytes())
    call("probe_tile", reduction, tensor_map.bytes, *arguments, u64(storage.data_ptr()), whole)
