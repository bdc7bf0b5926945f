# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ in a plug-in: compiled by nvcc when it is first launched, kept in Tiercel's cache.

code = Source('extern "C" __global__ void twice(float* x, int n) { ... }')
code.launch("twice", grid, block, x, ctypes.c_int(x.numel()))
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiercel import cache

_OPTIONS = ("-std=c++17", "-O3", "-lineinfo")


class CompileError(RuntimeError):
    """nvcc refused the source; the message is what it said."""


def find_nvcc() -> str:
    """The CUDA compiler: CUDACXX, CUDA_HOME, PATH, or NVIDIA's Python wheels.

    Raises:
        RuntimeError: There is none.
    """
    named = os.environ.get("CUDACXX")
    if named:
        return named
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            return str(Path(os.environ[variable], "bin", "nvcc"))
    found = shutil.which("nvcc")
    if found:
        return found
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob("cu*/bin/nvcc")):
            return str(path)
    raise RuntimeError(
        "no CUDA compiler: install the CUDA toolkit 13 and set CUDA_HOME to its folder, or CUDACXX "
        "to its nvcc (neither is set, and PATH has no nvcc)"
    )


@functools.cache
def _version(nvcc: str) -> str:
    try:
        command = [nvcc, "--version"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"the CUDA compiler {nvcc} does not run: {error}") from None


def compile_cubin(source: str, arch: str, options: Sequence[str] = ()) -> bytes:
    """Compiles for one architecture, such as ``sm_90a``.

    What the source includes, other than the compiler's own headers, is not part of the key.
    """
    nvcc = find_nvcc()
    flags = [*_OPTIONS, *options]

    def build(path: Path) -> None:
        file = path.with_name("source.cu")
        file.write_text(source, encoding="utf-8")
        command = [nvcc, "-cubin", f"-arch={arch}", *flags, "-o", str(path), str(file)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            said = (result.stdout + result.stderr).replace(f"{path.parent}/", "").strip()
            raise CompileError(f"nvcc failed: {said}")

    fields = {"kind": "cuda", "source": source, "arch": arch, "flags": flags}
    return cache.read_or_build(fields | {"compiler": _version(nvcc)}, build)


class Source:
    """CUDA C++ with kernels that are ``extern "C"``; compiled once for each kind of GPU.

    Args:
        text: The source.
        options: More options for nvcc, such as ``-DNAME=1``.
    """

    def __init__(self, text: str, options: Sequence[str] = ()) -> None:
        self.text = text
        self.options = tuple(options)
        self._lock = threading.Lock()
        self._kernels: dict[tuple[str, int], _Kernel] = {}

    def launch(
        self, name: str, grid: Sequence[int], block: Sequence[int], *args: Any, shared: int = 0
    ) -> None:
        """Launches a kernel on the tensors' device and PyTorch's current stream.

        Args:
            name: The kernel's name.
            grid: One to three sizes.
            block: One to three sizes.
            *args: Its arguments: tensors, for pointers, and ctypes values, such as
                ``ctypes.c_int(3)``.
            shared: Bytes of dynamic shared memory.

        Raises:
            CompileError: nvcc refused the source.
            RuntimeError: There is no compiler or driver, or the launch failed.
            TypeError, ValueError: An argument does not fit the kernel's parameter.
        """
        devices = {a.device for a in args if isinstance(a, Tensor)}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            where = ", ".join(sorted(map(str, devices))) or "none"
            raise ValueError(f"kernel {name}: tensors must be on one CUDA device, got {where}")
        index = next(iter(devices)).index
        with self._lock:
            kernel = self._kernels.get((name, index))
            if kernel is None:
                arch = _arch(*torch.cuda.get_device_capability(index))
                cubin = compile_cubin(self.text, arch, self.options)
                kernel = self._kernels[name, index] = _Kernel(name, cubin, index)
        stream = torch.cuda.current_stream(index).cuda_stream
        kernel.launch(_three(grid), _three(block), shared, stream, _values(name, args))


def _arch(major: int, minor: int) -> str:
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _values(name: str, args: Sequence[Any]) -> list[Any]:
    values = []
    for place, arg in enumerate(args, 1):
        if isinstance(arg, Tensor):
            arg = ctypes.c_void_p(arg.data_ptr())
        elif not isinstance(arg, (ctypes._SimpleCData, ctypes.Structure)):
            raise TypeError(
                f"kernel {name}: argument {place} must be a tensor or a ctypes value such as "
                f"ctypes.c_int(3), got {type(arg).__name__}"
            )
        values.append(arg)
    return values


class _Kernel:
    """A kernel of a loaded cubin, on one device."""

    def __init__(self, name: str, cubin: bytes, device: int) -> None:
        self.name = name
        self._driver = _driver()
        self._cubin = cubin  # stays as long as what was loaded from it
        self._context = ctypes.c_void_p()
        self._handle = ctypes.c_void_p()
        self._shared = 48 * 1024
        self._device = ctypes.c_int()
        library = ctypes.c_void_p()
        get, ref = self._driver, ctypes.byref
        self._call("cuDeviceGet", ref(self._device), device)
        self._call("cuDevicePrimaryCtxRetain", ref(self._context), self._device)  # PyTorch's
        loading = (cubin, None, None, 0, None, None, 0)
        self._call("cuLibraryLoadData", ref(library), *loading)
        if get.cuLibraryGetKernel(ref(self._handle), library, name.encode()):
            raise ValueError(f'the source has no kernel extern "C" {name}')
        self._sizes = self._parameter_sizes()

    def _parameter_sizes(self) -> list[int]:
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        out = ctypes.byref(offset), ctypes.byref(size)
        while (
            self._driver.cuKernelGetParamInfo(self._handle, ctypes.c_size_t(len(sizes)), *out) == 0
        ):
            sizes.append(size.value)
        return sizes

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        stream: int,
        values: Sequence[Any],
    ) -> None:
        given = [ctypes.sizeof(value) for value in values]
        if given != self._sizes:
            raise ValueError(
                f"kernel {self.name}: parameters have {self._sizes} bytes, the arguments {given}"
            )
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            if shared > self._shared:
                self._call("cuKernelSetAttribute", 8, shared, self._handle, self._device)
                self._shared = shared
            at = (*grid, *block, shared, ctypes.c_void_p(stream), pointers, None)
            self._call("cuLaunchKernel", self._handle, *at)
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *args: Any) -> None:
        error = getattr(self._driver, function)(*args)
        if error:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(error, ctypes.byref(text))
            said = (text.value or b"unknown").decode()
            raise RuntimeError(f"kernel {self.name}: {function} failed: {said} ({error})")


@functools.cache
def _driver() -> Any:
    from tiercel import _C

    info = _C.driver_info()
    if not info["ok"]:
        raise RuntimeError(info["message"])
    return ctypes.CDLL(os.environ.get("TIERCEL_LIBCUDA") or "libcuda.so.1")
