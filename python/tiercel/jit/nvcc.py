# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ to machine code, through the cache."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tiercel import cache
from tiercel.jit import toolchain
from tiercel.jit.compiled import FORMAT, Compiled, reports_of
from tiercel.jit.sources import SourceFile, included

# Environment variables that nvcc and its host compiler take more arguments from.
_VARIABLES = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
)


@dataclass(frozen=True)
class Options:
    """Compiler options; `instances` are the template instances to compile."""

    defines: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
    lineinfo: bool = True
    debug: bool = False

    def flags(self) -> list[str]:
        level = ["-G", "-g"] if self.debug else ["-O3", *(["-lineinfo"] if self.lineinfo else [])]
        standard = [] if any(flag.startswith("-std") for flag in self.more) else ["-std=c++17"]
        defines = [f"-D{define}" for define in self.defines]
        include = [f"-I{Path(folder).absolute()}" for folder in self.include]
        return [*standard, *level, *defines, *include, *self.more]


def command_of(nvcc: str, arch: str, options: Options, source: str, out: str) -> list[str]:
    return [
        *(nvcc, "-cubin", f"-arch={arch}", "-Xptxas=-v"),
        *options.flags(),
        *("-o", out, source),
    ]


def compile_file(source: SourceFile, arch: str, options: Options) -> tuple[Compiled, bool]:
    """The compiled file, and whether it was compiled just now.

    Raises:
        CompileError: nvcc refused the source.
        RuntimeError: There is no compiler, or it does not run.
    """
    nvcc = toolchain.find_nvcc()
    just_now = []

    def build(out: Path) -> None:
        just_now.append(True)
        folder = out.parent
        file = _written(source, options.instances, folder)
        image = folder / "kernels.cubin"
        command = command_of(nvcc, arch, options, str(file), str(image))
        said = toolchain.run(command, hide=str(folder))
        shown = shlex.join(command).replace(f"{folder}/", "")
        out.write_bytes(Compiled(image.read_bytes(), arch, shown, reports_of(said)).pack())

    fields = {
        "kind": "cuda",
        "format": FORMAT,
        "source": source.text,
        "path": None if source.path is None else str(source.path),
        "includes": included(source, options.include),
        "arch": arch,
        "flags": options.flags(),
        "instances": list(options.instances),
        "compiler": toolchain.identity(nvcc),
        "environment": [os.environ.get(variable) for variable in _VARIABLES],
    }
    data = cache.read_or_build(fields, build)
    return Compiled.unpack(data, "the cache entry"), bool(just_now)


def _written(source: SourceFile, instances: Sequence[str], folder: Path) -> Path:
    """The file to compile. Taking an instance's address is what makes the compiler emit it."""
    if source.path is not None and not instances:
        return source.path
    file = folder / "source.cu"
    text = source.text + "\n" if source.path is None else f'#include "{source.path}"\n'
    for i, name in enumerate(instances):
        text += f"[[maybe_unused]] static auto* const tiercel_instance_{i} = &{name};\n"
    file.write_text(text, encoding="utf-8")
    return file
