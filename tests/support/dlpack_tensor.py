# SPDX-License-Identifier: Apache-2.0
"""Tensors that are only a description: enough for tiercel._C to read, with no framework and no GPU.

Nothing is ever stored at their addresses, so they are good for checks and plans, not for launches.
"""

import ctypes
import types

# name -> (DLPack type code, bits)
DTYPES = {
    "float32": (2, 32),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "float64": (2, 64),
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "bool": (6, 8),
    "complex64": (5, 64),
    "float8_e4m3fn": (10, 8),
    "float4_e2m1fn_x2": (17, 4),  # two of them an element
}
DEVICES = {"cpu": 1, "cuda": 2, "vulkan": 7}
ADDRESS = 1 << 20  # aligned for every load


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_FromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Tensor))
_CurrentStream = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class _ExchangeApi(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("from_object", _FromObject),
        ("current_stream", _CurrentStream),
    ]


def contiguous_strides(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides


class _Description:
    def __init__(self, *shape, dtype="float32", device="cuda", strides=None, address=ADDRESS):
        self.sizes = list(shape)
        self.steps = contiguous_strides(shape) if strides is None else list(strides)
        self.dtype_name = dtype
        self.device_name, _, index = device.partition(":")
        self.device_index = int(index or 0)
        self.address = address


@_FromObject
def _describe(tensor, out):
    n = len(tensor.sizes)
    tensor._buffers = (ctypes.c_int64 * n)(*tensor.sizes), (ctypes.c_int64 * n)(*tensor.steps)
    t = out.contents
    t.data = tensor.address - tensor.byte_offset
    t.device = _Device(DEVICES[tensor.device_name], tensor.device_index)
    t.ndim = n
    t.dtype = _DType(*DTYPES[tensor.dtype_name], 2 if tensor.dtype_name.endswith("_x2") else 1)
    t.shape = tensor._buffers[0]
    t.strides = None if tensor.omit_strides else tensor._buffers[1]
    t.byte_offset = tensor.byte_offset
    return 0


asked_for_streams = []


@_CurrentStream
def _current_stream(device_type, device_index, out):
    asked_for_streams.append((device_type, device_index))
    out[0] = None
    return 0


def make_api(major=1, minor=3, older=None):
    api = _ExchangeApi(major=major, minor=minor, older=older)
    api.from_object = _describe
    api.current_stream = _current_stream
    return api


def make_capsule(api, name=b"dlpack_exchange_api"):
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    return new(ctypes.addressof(api), name, None)


_api = make_api()


class ExchangeTensor(_Description):
    """Crosses by the DLPack C exchange table, as torch's tensors do from 2.10 on."""

    __dlpack_c_exchange_api__ = make_capsule(_api)
    byte_offset = 0
    omit_strides = False


class AttributeTensor(_Description):
    """Crosses by its attributes, as torch's tensors do in 2.9."""

    @property
    def shape(self):
        return tuple(self.sizes)

    def stride(self):
        return tuple(self.steps)

    @property
    def dtype(self):
        return _torch_dtypes[self.dtype_name]

    @property
    def device(self):
        index = None if self.device_name == "cpu" else self.device_index
        return types.SimpleNamespace(type=self.device_name, index=index)

    def data_ptr(self):
        return self.address


class _TorchDType:
    def __init__(self, name):
        self.name = name

    def __str__(self):
        return f"torch.{self.name}"


_torch_dtypes = {name: _TorchDType(name) for name in DTYPES}


def as_cuda(value, address=None):
    """A tensor described as one on the GPU; other values as they are."""
    if not hasattr(value, "data_ptr"):
        return value
    name = str(value.dtype).removeprefix("torch.")
    if address is None:
        address = max(value.data_ptr(), 1) * 256  # aligned, and apart where the tensors are apart
    return ExchangeTensor(*value.shape, dtype=name, strides=value.stride(), address=address)
