# SPDX-License-Identifier: Apache-2.0
"""Kernels written in PTX, launched on the emulator through the driver's own functions."""

import ctypes
import os

import torch


class _Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32 * 3),
        ("rest", ctypes.c_uint8 * 52),
    ]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    ]


driver = ctypes.CDLL(os.environ["TIERCEL_LIBCUDA"])
driver.emulator_register.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p)
driver.emulator_unregister.argtypes = (ctypes.c_void_p,)
driver.emulator_set_options.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
assert driver.cuInit(0) == 0
_made = 0


class EmulatorError(Exception):
    """A driver function's error, with its text."""


def _check(result):
    if result != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise EmulatorError(text.value.decode())


def kernel(folder, body, registers="", parameters=1, directives=""):
    """Loads a kernel of that body, whose parameters are pointers; returns a function that launches
    it on tensors. %p, %r, %rd, %f, %fd and %h are declared, twenty of each; %rd0 to %rdN hold the
    parameters. `directives` are the kernel's own: .reqntid and the like."""
    global _made
    _made += 1
    name = f"kernel_{_made}"
    listed = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(parameters))
    (folder / f"{name}.ptx").write_text(
        f".version 9.0\n.target sm_90a\n.address_size 64\n"
        f".extern .shared .align 16 .b8 dynamic[];\n"
        f".visible .entry {name}({listed}) {directives} {{\n"
        f".reg .pred %p<20>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .f32 %f<20>;\n"
        f".reg .f64 %fd<20>; .reg .b16 %h<20>; {registers}\n{loads}\n{body}\nret;\n}}\n"
    )
    _check(driver.emulator_load(str(folder / f"{name}.ptx").encode()))
    handle = ctypes.c_void_p()
    _check(driver.cuLibraryGetKernel(ctypes.byref(handle), None, name.encode()))

    def launch(*tensors, grid=1, block=32, shared=0, cluster=1, dependent=False):
        attributes = (_Attribute * 2)()
        attributes[0] = _Attribute(id=4, cluster=(cluster, 1, 1))
        attributes[1] = _Attribute(id=6, cluster=(1, 0, 0))  # a flag where a cluster has its x
        config = _Config((grid, 1, 1), (block, 1, 1), shared)
        config.attributes, config.count = attributes, 1 + dependent
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        arguments = (ctypes.c_void_p * len(pointers))(
            *(ctypes.addressof(pointer) for pointer in pointers)
        )
        for i, tensor in enumerate(tensors):
            size = tensor.numel() * tensor.element_size()
            driver.emulator_register(tensor.data_ptr(), size, b"tensor %d" % i)
        try:
            _check(driver.cuLaunchKernelEx(ctypes.byref(config), handle, arguments, None))
        finally:
            for tensor in tensors:
                driver.emulator_unregister(tensor.data_ptr())

    return launch


def options(lazy=True, seed=0, max_instructions=2_000_000_000):
    driver.emulator_set_options(lazy, seed, max_instructions)


def zeros(count, dtype=torch.int32):
    return torch.zeros(count, dtype=dtype)
