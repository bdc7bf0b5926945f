# SPDX-License-Identifier: Apache-2.0
"""The tools that compile kernels here, as data: programs, memory, environment, caches."""

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What a C++ compiler takes for a file with PyTorch's headers, or nvcc for heavy templates.
JOB_BYTES = 4 << 30


def examine(environment: "Mapping[str, str] | None" = None) -> dict[str, Any]:
    env = os.environ if environment is None else environment
    return {
        "nvcc": _nvcc(env),
        "nvcc_missing": _nvcc_missing(env),
        "cxx": _version([*(env.get("CXX") or "c++").split(), "--version"]),
        "ninja": _version(["ninja", "--version"]),
        "ccache": _version(["ccache", "--version"]),
        "cutlass_dsl": _package("nvidia-cutlass-dsl"),
        "cpus": cpus(),
        "memory": memory(),
        "environment": {name: env[name] for name in _READ if name in env},
        "caches": _caches(env),
    }


_READ = (
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDACXX",
    "CUTE_DSL_ARCH",
    "MAX_JOBS",
    "PYTORCH_NVCC",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_EXTENSIONS_DIR",
)


def _nvcc(env: Mapping[str, str]) -> "dict[str, str] | None":
    """The one that PyTorch would take, then the one that Tiercel would."""
    places = [env.get("CUDACXX"), shutil.which("nvcc", path=env.get("PATH"))]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(variable):
            places.insert(0, str(Path(env[variable], "bin", "nvcc")))
    try:
        from tiercel.jit.toolchain import find_nvcc

        places.append(find_nvcc())
    except Exception:  # it says that there is none
        pass
    for place in filter(None, places):
        release = _release(place)
        if release is not None:
            return {"path": str(place), "release": release}
    return None


def _nvcc_missing(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that name a toolkit or an nvcc which is not there: builds go by them."""
    named = {}
    if env.get("CUDACXX"):
        named["CUDACXX"] = env["CUDACXX"]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(variable):
            named[variable] = str(Path(env[variable], "bin", "nvcc"))
    return {name: env[name] for name, place in named.items() if _release(place) is None}


def _release(nvcc: "str | None") -> "str | None":
    found = re.search(r"release (\d+\.\d+)", _run([nvcc, "--version"]) or "") if nvcc else None
    return found[1] if found else None


def _version(command: list[str]) -> "str | None":
    said = _run(command)
    return said.splitlines()[0].strip() if said else None


def _run(command: list[str]) -> "str | None":
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _package(name: str) -> "str | None":
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpus() -> int:
    return len(os.sched_getaffinity(0))


def memory(root: Path = Path("/")) -> int:
    """Bytes that may be used: what is available, within the control group's limit."""
    bounds = []
    text = _read(root / "proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if found:
        bounds.append(int(found[1]) * 1024)
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        if (most := _read(root / limit).strip()).isdigit():
            now = _read(root / used).strip()
            bounds.append(max(int(most) - (int(now) if now.isdigit() else 0), 0))
    return min(bounds, default=0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def jobs(cpus: int, memory: int) -> int:
    """Compilations at once that neither CPUs nor memory are short of."""
    return max(min(cpus, memory // JOB_BYTES), 1) if memory else max(cpus, 1)


def _caches(env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The folders of compiled code: where, and how much room their disk has."""
    home = Path(env.get("HOME") or os.path.expanduser("~"))  # "~" itself where there is none
    base = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
    folders = {
        "torch extensions": Path(env.get("TORCH_EXTENSIONS_DIR") or base / "torch_extensions"),
        "ccache": Path(env.get("CCACHE_DIR") or base / "ccache"),
        "triton": Path(env.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
    }
    try:
        from tiercel.cache import default

        folders = {"tiercel": default().folder} | folders
    except Exception:  # a wrong setting: the cache's own commands say which
        pass
    return {name: {"folder": str(path), "free": _free(path)} for name, path in folders.items()}


def _free(path: Path) -> "int | None":
    for folder in (path, *path.parents):
        if folder.exists():
            try:
                return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else 0
            except OSError:
                return None
    return None
