# SPDX-License-Identifier: Apache-2.0
"""pybind11 modules without torch's headers: compiled in seconds instead of a minute, and cached."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from tiercel import cache
from tiercel.jit import toolchain
from tiercel.jit.sources import SourceFile, included, read


def extension(
    name: str,
    sources: str | Path | Sequence[str | Path],
    *,
    include: Sequence[str | Path] = (),
    options: Sequence[str] = (),
    cuda_options: Sequence[str] = (),
    link: Sequence[str] = (),
    arch: str = "sm_90a",
    verbose: bool = False,
) -> ModuleType:
    """Compiles and imports a pybind11 module; the same sources again come from the cache.

    Nothing of torch is included, so it compiles in seconds and works with every torch. Pass
    ``tensor.data_ptr()``, sizes and ``torch.cuda.current_stream().cuda_stream`` as integers.

    Args:
        name: The module's name, as in its ``PYBIND11_MODULE``.
        sources: C++ text, or paths; ``.cu`` files go through nvcc and link its static runtime.
        include: Folders for ``#include``.
        options: More options for the C++ compiler (``CXX``, else ``c++``).
        cuda_options: More options for nvcc.
        link: More options for the link.
        arch: What CUDA code is compiled for.
        verbose: Print the commands.

    Raises:
        CompileError: A compiler refused a source.
        RuntimeError: A compiler or pybind11 is missing.
        ImportError: The module does not load, usually because it has another name.

    Example:
        >>> module = tiercel.jit.extension("mine", ["mine.cpp", "kernels.cu"])
    """
    files = [
        read(source) for source in ([sources] if isinstance(sources, (str, Path)) else sources)
    ]
    if not files:
        raise ValueError("tiercel.jit.extension: there are no sources")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++, or set CXX to one")
    cuda = any(_is_cuda(file) for file in files)
    nvcc = toolchain.find_nvcc() if cuda else None
    folders = [sysconfig.get_path("include"), _pybind11(), *map(str, include)]
    common = ["-O2", "-std=c++17", *(f"-I{folder}" for folder in folders)]
    fields = {
        "kind": "extension",
        "name": name,
        "sources": [file.text for file in files],
        "paths": [None if file.path is None else str(file.path) for file in files],
        "includes": [included(file, include) for file in files],
        "flags": [common, [*options], [*cuda_options], [*link], arch],
        "compilers": [toolchain.run([compiler, "--version"]).partition("\n")[0]]
        + (toolchain.identity(nvcc) if nvcc else []),
        "python": f"{sys.implementation.cache_tag} {sysconfig.get_platform()}",
    }

    def build(out: Path) -> None:
        folder = out.parent
        jobs = []
        for i, file in enumerate(files):
            path = file.path
            if path is None:
                path = folder / f"source{i}.cpp"
                path.write_text(file.text, encoding="utf-8")
            target = str(folder / f"object{i}.o")
            if _is_cuda(file):
                assert nvcc is not None
                to_host = ["-Xcompiler=-fPIC,-fvisibility=hidden", f"-arch={arch}", *cuda_options]
                jobs.append([nvcc, "-c", *to_host, *common, "-o", target, str(path)])
            else:
                flags = ["-fPIC", "-fvisibility=hidden", *common, *options]
                jobs.append([compiler, "-c", *flags, "-o", target, str(path)])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda command: _run(command, folder, verbose), jobs))
        objects = [job[-2] for job in jobs]
        runtime = _runtime(nvcc) if nvcc else []
        _run([compiler, "-shared", "-o", str(out), *objects, *runtime, *link], folder, verbose)

    path = cache.get_or_build(fields, build)
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _is_cuda(file: SourceFile) -> bool:
    return file.path is not None and file.path.suffix == ".cu"


def _pybind11() -> str:
    try:
        import pybind11
    except ImportError:
        raise RuntimeError(
            "pybind11 is not installed: pip install pybind11, or 'tiercel[jit]'"
        ) from None
    found: str = pybind11.get_include()
    return found


def _runtime(nvcc: str) -> list[str]:
    root = Path(shutil.which(nvcc) or nvcc).resolve().parents[1]
    folders = [root / name for name in ("lib64", "lib", "targets/x86_64-linux/lib")]
    found = next((f for f in folders if (f / "libcudart_static.a").exists()), None)
    if found is None:
        raise RuntimeError(f"the CUDA toolkit in {root} has no libcudart_static.a")
    return [f"-L{found}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


def _run(command: list[str], folder: Path, verbose: bool) -> None:
    if verbose:
        shown = shlex.join(command).replace(f"{folder}/", "")
        print(f"tiercel.jit: {shown}", file=sys.stderr)
    toolchain.run(command, hide=str(folder))
