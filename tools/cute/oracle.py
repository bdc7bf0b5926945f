# SPDX-License-Identifier: Apache-2.0
"""Checks a declaration against what the compiled host code would launch, without a GPU.

The host code that the DSL exports is linked with recorder.c and run; grid, block, cluster, shared
memory and every kernel parameter are compared with the declaration. It never ships.
"""

import ctypes
import dataclasses
import pathlib
import re
import struct
import subprocess

import cubin
from declaration import (
    L2_PROMOTIONS,
    SWIZZLES,
    Function,
    Launch,
    Pointer,
    TensorMap,
    evaluate,
)

_CLUSTER_ATTRIBUTE, _COOPERATIVE_ATTRIBUTE, _DEPENDENT_ATTRIBUTE = 4, 2, 6
# A tensor map's numbers for element types.
_DTYPES = {"Float8E4M3FN": 0, "Float16": 6, "BFloat16": 10}


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("pad", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


_HOOK = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(_Config),
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
)


@dataclasses.dataclass
class Recorded:
    symbol: str
    grid: list[int]
    block: list[int]
    cluster: list[int]
    smem: int
    max_smem: int
    other_attributes: list[int]
    parameters: list[bytes]


class HostCode:
    """The exported host code of several functions, linked with the recorder."""

    def __init__(self, objects: dict[str, bytes], folder: pathlib.Path, cc: str) -> None:
        files = []
        for prefix, data in objects.items():
            files.append(folder / f"{prefix}.o")
            files[-1].write_bytes(data)
        library = folder / "host_code.so"
        recorder = pathlib.Path(__file__).parent / "recorder.c"
        # Symbolic: the DSL's own runtime, in this process too, must not take the recorder's place.
        command = [cc, "-shared", "-fPIC", "-O1", "-Wl,-Bsymbolic", "-o", library, recorder, *files]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))
        self._entries = {}
        for prefix, file in zip(objects, files, strict=True):
            names = re.findall(rb"_mlir_" + prefix.encode() + rb"_\w+", file.read_bytes())
            self._entries[prefix] = next(
                name.decode() for name in names if b"__mlir_ciface_" in name
            )
            self._load(prefix)

    def _load(self, prefix: str) -> None:
        library = ctypes.c_void_p(0)
        library_pointer = ctypes.pointer(ctypes.pointer(library))
        error, device = ctypes.c_int(-1), ctypes.c_int(0)
        at = ctypes.addressof
        initialise = (ctypes.c_void_p * 2)(at(library_pointer), at(error))
        self._library[f"_mlir_{prefix}_cuda_init"](initialise)
        load = (ctypes.c_void_p * 3)(at(library_pointer), at(device), at(error))
        self._library[f"_mlir_{prefix}_cuda_load_to_device"](load)
        if error.value != 0:
            raise RuntimeError(f"{prefix}: the host code could not be loaded: {error.value}")

    def run(self, prefix, arguments, layouts) -> list[Recorded]:
        """Runs a function; `layouts` has each kernel's parameters' (offset, size)."""
        recorded = []

        def hook(config, symbol, max_smem, args):
            config, symbol = config.contents, symbol.decode()
            attributes = {
                config.attributes[i].id: list(config.attributes[i].value)
                for i in range(config.attribute_count)
            }
            recorded.append(
                Recorded(
                    symbol,
                    list(config.grid),
                    list(config.block),
                    attributes.get(_CLUSTER_ATTRIBUTE, [1, 1, 1])[:3],
                    config.smem,
                    max_smem,
                    [
                        attribute
                        for attribute in (_COOPERATIVE_ATTRIBUTE, _DEPENDENT_ATTRIBUTE)
                        if attributes.get(attribute, [0])[0]
                    ],
                    [
                        ctypes.string_at(args[i], size)
                        for i, (_, size) in enumerate(layouts[symbol])
                    ],
                )
            )

        c_hook = _HOOK(hook)
        ctypes.c_void_p.in_dll(self._library, "on_launch").value = ctypes.cast(
            c_hook, ctypes.c_void_p
        ).value
        error = ctypes.c_int(-1)
        values = [*arguments, ctypes.c_void_p(0), error]  # then the stream and the result
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        call = self._library[self._entries[prefix]]
        call.restype, call.argtypes = None, [ctypes.c_void_p, ctypes.c_int]
        call(ctypes.addressof(addresses), len(values))
        if error.value != 0:
            raise RuntimeError(f"{prefix}: the host code failed with {error.value}")
        return recorded


def decode_tensor_map(data: bytes) -> dict:
    """The fields of a tensor map, in the order of the declaration: outermost dimension first."""
    w = struct.unpack_from("<8Q", data)
    low = w[1] & 0xFFFFFFFF
    rank = ((low >> 4) & 7) + 1
    dims = [w[4], w[4] >> 32, w[5], w[5] >> 32, w[6]]
    strides = [w[1] >> 32, w[2], w[2] >> 32, w[3]]
    high = w[3] >> 32
    strides = [(s & 0xFFFFFFFF | (high >> 4 * i & 15) << 32) * 16 for i, s in enumerate(strides)]
    box = [w[6] >> 56] + [w[7] >> 8 * i & 255 for i in range(4)]
    return {
        "address": w[0],
        "dtype": low >> 7 & 15,
        "shape": [(dim & 0xFFFFFFFF) + 1 for dim in dims[:rank]][::-1],
        "strides": strides[: rank - 1][::-1],
        "box": [side + 1 for side in box[:rank]][::-1],
        "swizzle": SWIZZLES[low >> 13 & 3],
        "l2_promotion": L2_PROMOTIONS[low >> 17 & 3],
    }


def _expected_map(tensor_map: TensorMap, pointers, addresses, scalars) -> dict:
    dtype = pointers[tensor_map.tensor].dtype
    shape = [evaluate(size, scalars) for size in tensor_map.shape]
    strides, stride = [], dtype.width // 8
    for size in shape[:0:-1]:
        stride *= size
        strides.append(stride)
    return {
        "address": addresses[tensor_map.tensor],
        "dtype": _DTYPES[dtype.__name__],
        "shape": shape,
        "strides": strides[::-1],
        "box": list(tensor_map.box),
        "swizzle": tensor_map.swizzle,
        "l2_promotion": tensor_map.l2_promotion,
    }


def _parameter_errors(launch: Launch, recorded: Recorded, pointers, addresses, scalars):
    if len(launch.parameters) != len(recorded.parameters):
        yield f"has {len(recorded.parameters)} parameters, {len(launch.parameters)} are declared"
        return
    for parameter, data in zip(launch.parameters, recorded.parameters, strict=True):
        if isinstance(parameter, TensorMap):
            if len(data) != 128:
                yield f"the map of {parameter.tensor} has {len(data)} bytes"
                continue
            found = decode_tensor_map(data)
            expected = _expected_map(parameter, pointers, addresses, scalars)
            for field, value in expected.items():
                if found[field] != value:
                    yield f"the map of {parameter.tensor} has {field} {found[field]}, not {value}"
        else:
            is_pointer = isinstance(parameter, Pointer)
            value = (addresses if is_pointer else scalars)[parameter.name]
            expected = struct.pack("<Q" if is_pointer else "<i", value)
            if data != expected:
                yield f"parameter {parameter.name} is {data.hex()}, not {expected.hex()}"


def _launch_errors(launch: Launch, recorded: Recorded, kernel: cubin.CompiledKernel, scalars):
    expected = {
        "grid": [evaluate(size, scalars) for size in launch.grid],
        "block": list(launch.block),
        "cluster": [evaluate(size, scalars) for size in launch.cluster],
        "smem": launch.smem,
        "other_attributes": [_DEPENDENT_ATTRIBUTE] if launch.dependent else [],
    }
    for field, value in expected.items():
        if getattr(recorded, field) != value:
            yield f"{field} is {getattr(recorded, field)}, not {value}"
    if kernel.threads != launch.block:
        yield f"the cubin wants a block of {kernel.threads}"


def check(function: Function, prefix: str, host: HostCode, kernels) -> tuple[list[str], list[str]]:
    """The symbols that a function launches, in order, and what its declaration gets wrong."""
    layouts = {kernel.symbol: kernel.parameters for kernel in kernels}
    by_symbol = {kernel.symbol: kernel for kernel in kernels}
    pointers = {a.name: a for a in function.leaves if isinstance(a, Pointer)}
    for floating in (a.name for a in function.leaves if getattr(a, "floating", False)):
        return [], [f"{floating} is a float: the launchers of precompiled functions pass integers"]
    addresses = {name: (i + 1) << 32 for i, name in enumerate(pointers)}
    symbols, errors = [], []
    for scalars in function.problems:
        values = [
            ctypes.c_uint64(addresses[argument.name])
            if isinstance(argument, Pointer)
            else ctypes.c_int32(scalars[argument.name])
            for argument in function.leaves
        ]
        recorded = host.run(prefix, values, layouts)
        symbols = [launch.symbol for launch in recorded]
        if len(recorded) != len(function.launches):
            return symbols, [f"{len(recorded)} launches, not the {len(function.launches)} declared"]
        for launch, seen in zip(function.launches, recorded, strict=True):
            problems = [
                *_launch_errors(launch, seen, by_symbol[seen.symbol], scalars),
                *_parameter_errors(launch, seen, pointers, addresses, scalars),
            ]
            errors += [f"{function.name} at {scalars}: {problem}" for problem in problems]
    return symbols, errors
