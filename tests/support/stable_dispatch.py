# SPDX-License-Identifier: Apache-2.0
"""Calls torch's dispatcher as C++ does: through torch's stable C interface, without the GIL."""

import ctypes
import struct

import torch

VERSION = 2 << 56 | 10 << 48
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
# Each CDLL object has functions of its own, so a type that is set holds for this one alone.
_malloc = ctypes.CDLL(None).malloc
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)


def _library():
    """libtorch_cpu, which torch has loaded."""
    name = "libtorch_cpu.so"
    library = ctypes.CDLL(name, mode=4)  # RTLD_NOLOAD
    library.torch_call_dispatcher.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.c_uint64,
    )
    return library


torch_library = _library()


def handle_of(tensor):
    """A new handle of a tensor."""
    return _pointer(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)


def tensor_of(handle):
    """The tensor of a handle, which it takes."""
    capsule = _capsule(handle, None, None)
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([capsule])[0]


def _text(value):
    handle = ctypes.c_void_p()
    data = value.encode()
    torch_library.torch_new_string_handle(data, ctypes.c_size_t(len(data)), ctypes.byref(handle))
    return handle.value


def _boxed(value):
    if not hasattr(torch_library, "torch_new_stable_ivalue"):  # before 2.13: operator new
        box = ctypes.c_void_p(_malloc(8))
    else:
        box = ctypes.c_void_p()
        torch_library.torch_new_stable_ivalue(ctypes.byref(box))
    ctypes.cast(box, ctypes.POINTER(ctypes.c_uint64))[0] = value
    return box.value


def _value(kind, value):
    if kind.startswith("Optional["):
        return 0 if value is None else _boxed(_value(kind[9:-1], value))
    if kind == "Tensor":
        return handle_of(value)
    if kind == "float":
        return struct.unpack("<Q", struct.pack("<d", value))[0]
    if kind == "str":
        return _text(value)
    if kind == "ScalarType" and isinstance(value, torch.dtype):  # a default is torch's code
        name = str(value).removeprefix("torch.")
        return getattr(torch_library, f"aoti_torch_dtype_{name}")()
    return int(value) & (1 << 64) - 1


def stack_of(operator, args, named=None):
    """The stack for an OpOverload and its arguments; absent ones have their defaults."""
    arguments = operator._schema.arguments
    values = dict(zip((a.name for a in arguments), args, strict=False)) | (named or {})
    size = max(len(arguments), len(operator._schema.returns))
    stack = (ctypes.c_uint64 * size)()
    for place, argument in enumerate(arguments):
        value = values.get(argument.name, argument.default_value)
        stack[place] = _value(str(argument.real_type), value)
    return stack


def call(operator, *args, **named):
    """The results of an operator of tensors, called from C; RuntimeError where that fails."""
    stack = stack_of(operator, args, named)
    name, overload = operator._schema.name, operator._schema.overload_name
    failed = torch_library.torch_call_dispatcher(
        name.encode(), overload.encode(), stack, ctypes.c_uint64(VERSION)
    )
    if failed:
        raise RuntimeError(f"{name} failed")
    results = [tensor_of(stack[i]) for i in range(len(operator._schema.returns))]
    return results[0] if len(results) == 1 else tuple(results) or None
