# SPDX-License-Identifier: Apache-2.0
"""The exports that make PyTorch's extension builds fast here, to be sourced."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiercel.workbench.doctor.checks import pinned
from tiercel.workbench.doctor.tools import jobs

_CCACHE_LINKS = Path("/usr/lib/ccache")  # compilers' names, linked to ccache (Debian, Ubuntu)


def exports(facts: Mapping[str, Any], tools: Mapping[str, Any], links: Path = _CCACHE_LINKS) -> str:
    """Shell text: `source <(tiercel doctor --shell)`."""
    lines = ["# source <(tiercel doctor --shell)"]

    def export(name: str, value: str, why: str) -> None:
        lines.append(f"export {name}={shlex.quote(value)}  # {why}")

    export("TORCH_CUDA_ARCH_LIST", pinned(facts), "one arch: each file is compiled once")
    count = jobs(tools["cpus"], tools["memory"])
    export("MAX_JOBS", str(count), "what CPUs and memory bear")
    export("CMAKE_BUILD_PARALLEL_LEVEL", str(count), "the same for CMake")
    if tools["ninja"]:
        export("CMAKE_GENERATOR", "Ninja", "PyTorch takes ninja where it is there")
    else:
        lines.append("# no ninja, so file by file: pip install ninja")
    nvcc = tools["nvcc"]
    if nvcc:
        home = Path(nvcc["path"]).resolve().parents[1]
        named = tools["environment"].keys() - (tools.get("nvcc_missing") or {})
        if "CUDA_HOME" not in named and (home / "nvvm").is_dir():
            export("CUDA_HOME", str(home), f"CUDA {nvcc['release']}")
    else:
        lines.append("# no nvcc: pip install 'tiercel[jit]'")
    if tools["ccache"]:
        if nvcc:
            export("PYTORCH_NVCC", f"ccache {nvcc['path']}", "PyTorch's extensions, device code")
            export("CMAKE_CUDA_COMPILER_LAUNCHER", "ccache", "the same for CMake")
        export("CMAKE_CXX_COMPILER_LAUNCHER", "ccache", "host code, for CMake")
        if links.is_dir():
            lines.append(f'export PATH={shlex.quote(str(links))}:"$PATH"  # host code, for PyTorch')
    else:
        lines.append("# no ccache, so every build compiles anew: apt-get install ccache")
    folder = tools["caches"]["torch extensions"]["folder"]
    export("TORCH_EXTENSIONS_DIR", folder, "a build folder that stays")
    export("CUTE_DSL_ARCH", "sm_90a", "what the CuTe DSL compiles for")
    return "\n".join(lines) + "\n"
