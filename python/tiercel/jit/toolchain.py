# SPDX-License-Identifier: Apache-2.0
"""The CUDA compiler: where it is, which one it is, and what it says when it refuses."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

_MISSING = (
    "no CUDA compiler: pip install 'tiercel[jit]', or install the CUDA toolkit 13 and set "
    "CUDA_HOME to its folder or CUDACXX to its nvcc (neither is set, PATH has no nvcc, and "
    "NVIDIA's Python packages are not installed)"
)


class CompileError(RuntimeError):
    """A compiler refused the source; the message is what it said."""


def find_nvcc() -> str:
    """The CUDA compiler: CUDACXX, CUDA_HOME, PATH, or the packages of ``tiercel[jit]``.

    Raises:
        RuntimeError: There is none.
    """
    named = os.environ.get("CUDACXX")
    if named:
        return named
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            return str(Path(os.environ[variable], "bin", "nvcc"))
    found = shutil.which("nvcc") or _packaged_nvcc()
    if found is None:
        raise RuntimeError(_MISSING)
    return found


def _packaged_nvcc() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True):
            for tool in (*nvcc.parent.iterdir(), *nvcc.parents[1].glob("nvvm/bin/*")):
                if not os.access(tool, os.X_OK):  # some of NVIDIA's packages lose that bit
                    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
            return str(nvcc)
    return None


def identity(nvcc: str) -> list[str]:
    """Facts that change when the compiler does, found without running it."""
    binary = Path(shutil.which(nvcc) or nvcc).resolve()
    found = []
    for path in _programs(binary):
        try:
            status = path.stat()
        except OSError:
            continue
        found.append(f"{path}:{status.st_size}:{status.st_mtime_ns}")
    if not found:
        raise RuntimeError(f"the CUDA compiler {nvcc} is not there")
    return found


def _programs(nvcc: Path) -> Iterator[Path]:
    yield nvcc
    yield nvcc.with_name("ptxas")
    yield nvcc.parents[1] / "nvvm" / "bin" / "cicc" if len(nvcc.parents) > 1 else nvcc


def run(command: Sequence[str], hide: str = "") -> str:
    """The messages of a compiler; `hide` is a folder that messages leave out.

    Raises:
        CompileError: It failed.
        RuntimeError: It could not be run.
    """
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"the compiler {command[0]} does not run: {error}") from None
    said = result.stdout + result.stderr
    if hide:
        said = said.replace(f"{hide}/", "")
    if result.returncode:
        raise CompileError(f"{Path(command[0]).name} failed: {said.strip()}")
    return said
