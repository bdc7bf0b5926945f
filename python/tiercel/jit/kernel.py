# SPDX-License-Identifier: Apache-2.0
"""Kernels in CUDA C++: compiled at the first launch, and launched like the precompiled ones."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from tiercel import _C
from tiercel.jit.arguments import Convert, Signature, converters, same_name, signature_of
from tiercel.jit.compiled import Compiled, KernelReport
from tiercel.jit.dsl import cubin
from tiercel.jit.nvcc import Options, compile_file
from tiercel.jit.sources import SourceFile, read

# Shared memory that a block may have, KiB.
_SHARED = {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_120a": 99, "sm_121a": 99}

Sizes = int | Sequence[int]


class _File:
    """One source, compiled once for each architecture; kernels share it."""

    def __init__(self, source: SourceFile, options: Options, verbose: bool) -> None:
        self.source, self.options, self.verbose = source, options, verbose
        self._lock = threading.Lock()
        self._compiled: dict[str, Compiled] = {}

    def compiled(self, arch: str) -> Compiled:
        with self._lock:
            found = self._compiled.get(arch)
            if found is None:
                found, just_now = compile_file(self.source, arch, self.options)
                self._compiled[arch] = found
                if self.verbose:
                    reports = "".join(f"\n  {report}" for report in found.reports)
                    how = "" if just_now else "  # from the cache"
                    print(f"tiercel.jit: {found.command}{how}{reports}", file=sys.stderr)
        return found


class _Saved:
    """A file that `save=` wrote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = Compiled.unpack(path.read_bytes(), str(path))

    def compiled(self, arch: str) -> Compiled:
        if arch != self._content.arch:
            raise RuntimeError(f"{self._path} is for {self._content.arch}, this GPU is {arch}")
        return self._content


class Kernel:
    """A CUDA kernel; calling it launches it. Made by :func:`cuda` and :func:`load`."""

    def __init__(self, file: _File | _Saved, name: str, arch: str | None) -> None:
        self.name = name
        self._file = file
        self._arch = arch
        self._lock = threading.Lock()
        self._ready: dict[str, tuple[_C.JitKernel, list[Convert], tuple[str, ...]]] = {}

    def compile(self, arch: str | None = None) -> KernelReport:
        """Compiles, or finds in the cache, and says what came out.

        Args:
            arch: Such as ``sm_90a``; by default the current GPU's, and ``sm_90a`` without one.
        """
        arch = arch or self._arch or _current_arch()
        compiled = self._file.compiled(arch)
        symbol, _ = _find(compiled, self.name)
        return next(report for report in compiled.reports if report.symbol == symbol)

    def __call__(
        self,
        grid: Sizes,
        block: Sizes,
        *args: Any,
        shared: int = 0,
        cluster: Sizes = 1,
        dependent: bool = False,
    ) -> None:
        """Launches on the tensors' device and PyTorch's current stream.

        Args:
            grid: Blocks, one to three sizes.
            block: Threads of a block, one to three sizes.
            *args: A tensor or None for a pointer, Python numbers for numbers; a struct, and any
                number of an ``extern "C"`` kernel, whose types are not known, as a ctypes value.
            shared: Bytes of dynamic shared memory.
            cluster: Blocks of a cluster.
            dependent: Programmatic dependent launch: the kernel waits for its predecessor itself.

        Raises:
            CompileError: nvcc refused the source.
            RuntimeError: There is no compiler or driver, or the launch failed.
            TypeError, ValueError: An argument does not fit the kernel's parameter.
        """
        arch = self._arch or _arch_of_device(_device(self.name, args))
        ready = self._ready.get(arch)
        if ready is None:
            ready = self._prepare(arch)
        kernel, convert, labels = ready
        if len(args) != len(convert):
            raise TypeError(f"kernel {self.name}: takes {len(convert)} arguments, got {len(args)}")
        values = tuple([one(value) for one, value in zip(convert, args, strict=True)])
        three = _three
        kernel.launch(three(grid), three(block), three(cluster), shared, dependent, labels, values)

    def _prepare(self, arch: str) -> tuple[_C.JitKernel, list[Convert], tuple[str, ...]]:
        compiled = self._file.compiled(arch)
        symbol, signature = _find(compiled, self.name)
        (found,) = (k for k in cubin.kernels(compiled.image) if k.symbol == symbol)
        sizes = [size for _, size in found.parameters]
        static = next((r.shared for r in compiled.reports if r.symbol == symbol), 0)
        most = _SHARED.get(arch, 227) * 1024 - static
        with self._lock:
            if arch not in self._ready:
                image = compiled.image
                name = f"kernel {self.name}"
                loaded = _C.JitKernel(image, symbol, name, found.parameters, most)
                labels = tuple(f"argument {i + 1}" for i in range(len(sizes)))
                self._ready[arch] = loaded, converters(self.name, signature, sizes), labels
        return self._ready[arch]


@overload
def cuda(source: str | Path, kernel: str, **options: Any) -> Kernel: ...
@overload
def cuda(source: str | Path, kernel: Sequence[str], **options: Any) -> tuple[Kernel, ...]: ...
def cuda(
    source: str | Path,
    kernel: str | Sequence[str],
    *,
    defines: Mapping[str, object] | None = None,
    include: Sequence[str | Path] = (),
    options: Sequence[str] = (),
    lineinfo: bool = True,
    debug: bool = False,
    verbose: bool = False,
    arch: str | None = None,
    save: str | Path | None = None,
) -> Any:
    """A kernel in CUDA C++, compiled by nvcc when it is first launched and kept in the cache.

    Editing the source, or a header that it includes from its folder or from `include`, compiles it
    again; otherwise it comes from the cache, in other processes too.

    Args:
        source: CUDA C++ text, or the path of a file.
        kernel: The kernel's name, or a template instance such as ``"scale<float, 4>"``; a sequence
            of names returns several kernels from one compilation.
        defines: Macros: ``{"TILE": 64}`` is ``-DTILE=64``; None as a value defines the bare name.
        include: Folders for ``#include``.
        options: More options for nvcc.
        lineinfo: Source lines for profilers; costs nothing when running.
        debug: Compile for cuda-gdb (``-G``): slow code.
        verbose: Print the command, registers and spills.
        arch: Such as ``sm_90a``; by default the architecture of the GPU at the launch.
        save: A file to write the compiled kernels to, for :func:`load`.

    Raises:
        FileNotFoundError: There is no such source file.

    Example:
        >>> twice = tiercel.jit.cuda("__global__ void twice(float* x, int n) {...}", "twice")
        >>> twice((n + 255) // 256, 256, x, n)
    """
    names = (kernel,) if isinstance(kernel, str) else tuple(kernel)
    chosen = Options(
        defines=tuple(n if v is None else f"{n}={v}" for n, v in (defines or {}).items()),
        include=tuple(map(str, include)),
        more=tuple(options),
        instances=tuple(name for name in names if "<" in name),
        lineinfo=lineinfo,
        debug=debug,
    )
    file = _File(read(source), chosen, verbose)
    kernels = tuple(Kernel(file, name, arch) for name in names)
    if save is not None:
        compiled = file.compiled(arch or _current_arch())
        for name in names:
            _find(compiled, name)
        _write(Path(save), compiled.pack())
    return kernels[0] if isinstance(kernel, str) else kernels


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: str | Path, kernel: str) -> Kernel:
    """A kernel that ``cuda(..., save=path)`` compiled; needs no compiler.

    Raises:
        ValueError: The file was not written by `cuda`, is damaged (its length and hash are
            checked), or has no such kernel. The file is code that runs: load only what you trust.
    """
    saved = _Saved(Path(path))
    found = Kernel(saved, kernel, None)
    _find(saved._content, kernel)
    return found


def _find(compiled: Compiled, name: str) -> tuple[str, Signature]:
    """The symbol of a kernel by its name in the source."""
    there = {report.symbol: signature_of(report.symbol) for report in compiled.reports}
    fits = [symbol for symbol, signature in there.items() if same_name(name, signature.name)]
    if not fits:  # float16 may be written half, and 4 as 2 * 2: the only instance will be meant
        base = name.partition("<")[0].strip()
        fits = [s for s, signature in there.items() if signature.name.partition("<")[0] == base]
    if len(fits) != 1:
        names = ", ".join(signature.name for signature in there.values()) or "none"
        raise ValueError(f"the source has no kernel {name}; its kernels: {names}")
    return fits[0], there[fits[0]]


def _three(sizes: Sizes) -> tuple[int, int, int]:
    if isinstance(sizes, int):
        return sizes, 1, 1
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _device(name: str, args: Sequence[Any]) -> int:
    for arg in args:
        if hasattr(arg, "data_ptr"):
            index: int = arg.get_device()
            if index < 0:
                raise ValueError(
                    f"kernel {name}: tensors must be on a CUDA device, got {arg.device}"
                )
            return index
    raise ValueError(f"kernel {name}: one argument must be a tensor, whose device it runs on")


@functools.cache
def _arch_of_device(index: int) -> str:
    major, minor = _C.device_capability(index)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _current_arch() -> str:
    if not _C.driver_info()["ok"]:
        return "sm_90a"
    torch = sys.modules.get("torch")
    current = torch.cuda.current_device() if torch and torch.cuda.is_initialized() else 0
    return _arch_of_device(current)
