# SPDX-License-Identifier: Apache-2.0
"""Compiles a family's CuTe DSL kernels ahead of time: no GPU, no driver.

A process costs seconds before its first kernel, so each compiles many. It writes a folder: cubins,
their PTX, and each function's pieces of the family's manifest and C++ source, which join.py puts
together. All of them are a function of the sources.
"""

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import sys
import tempfile

_ROOT = pathlib.Path(__file__).absolute().parents[2]

# What the package has of its own, to compile on a user's machine: declarations and the like.
_SHARED = _ROOT / "python" / "tiercel" / "jit" / "dsl"

_TRIPLE = "x86_64-unknown-linux-gnu"  # the host code runs in this build only, on any x86-64


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", action="append", default=[], help="folder with the DSL")
    parser.add_argument("--arch", required=True)
    parser.add_argument("--main", required=True, help="the file that defines functions()")
    parser.add_argument("--path", action="append", default=[], help="folder with more sources")
    parser.add_argument("--cc", required=True, type=pathlib.Path, help="links the checks")
    parser.add_argument("--arguments", default="", help="the struct of a launch's arguments")
    parser.add_argument("--part", default="0/1", help="0/3: each third function, from the first")
    parser.add_argument("--output", required=True, type=pathlib.Path, help="a folder")
    parser.add_argument("--only", default="", help="compile only names with this in them")
    return parser.parse_args()


@dataclasses.dataclass
class Compiled:
    function: object
    image: bytes
    ptx: str
    kernels: list
    symbols: list[str]


def compile_all(functions, arch: str, cc: str, folder: pathlib.Path) -> list[Compiled]:
    import cubin
    import oracle
    from build import compile_function

    options = f"--host-target 'llvm -mtriple={_TRIPLE} -mcpu=x86-64' --keep-ptx"
    images, texts, objects = [], [], {}
    for i, function in enumerate(functions):
        built = compile_function(function, arch, options)
        images.append(built.__cubin__)
        texts.append(built.__ptx__.rstrip("\0"))
        objects[f"function{i}"] = built.dump_to_object(f"function{i}")

    compiled, errors = [], []
    host = oracle.HostCode(objects, folder, cc)
    for i, (function, image, ptx) in enumerate(zip(functions, images, texts, strict=True)):
        kernels = cubin.kernels(image)
        symbols, wrong = oracle.check(function, f"function{i}", host, kernels)
        compiled.append(Compiled(function, image, ptx, kernels, symbols))
        errors += wrong
    if errors:
        sys.exit("\n".join(["the declaration does not fit the compiled kernels:", *errors]))
    return compiled


def main() -> None:
    options = _options()
    for name in ("cc", "output"):
        setattr(options, name, getattr(options, name).absolute())
    os.environ["CUTE_DSL_ARCH"] = options.arch  # before the import: else another target is built
    os.environ.setdefault("HOME", tempfile.gettempdir())
    for folder in reversed([pathlib.Path(folder).absolute() for folder in options.packages]):
        # The second is what the package's .pth file would add.
        sys.path[:0] = [str(folder / "nvidia_cutlass_dsl" / "dsl_packages"), str(folder)]
    for path in [*options.path, pathlib.Path(options.main).parent]:
        sys.path.insert(0, str(pathlib.Path(path).absolute()))
    sys.path.insert(0, str(_SHARED))
    sys.path.append(str(_ROOT))  # a family of several folders imports kernels.<family>.<folder>

    folder = tempfile.TemporaryDirectory()
    os.chdir(folder.name)  # the DSL leaves copies of its cubins in the folder it is imported in
    import cutlass
    import emit

    family = importlib.import_module(pathlib.Path(options.main).stem)
    functions = [f for f in family.functions() if options.only in f.name]
    names = [function.name for function in functions]
    if len(set(names)) != len(names):
        sys.exit("two functions have the same name")
    part, parts = map(int, options.part.split("/"))
    functions = functions[part::parts]
    compiled = compile_all(functions, options.arch, options.cc, pathlib.Path(folder.name))

    head = {
        "schema": 1,
        "arch": options.arch,
        "dsl": cutlass.__version__,
        "ptxas": f"{cutlass.CUDA_VERSION.major}.{cutlass.CUDA_VERSION.minor}",
    }
    pieces = emit.pieces(compiled, options.arguments, part, parts)
    for name in ("cubins", "ptx"):
        (options.output / name).mkdir(parents=True, exist_ok=True)
    for item in compiled:
        (options.output / "cubins" / f"{item.function.name}.cubin").write_bytes(item.image)
        (options.output / "ptx" / f"{item.function.name}.ptx").write_text(item.ptx)
    (options.output / "pieces.json").write_text(json.dumps({"head": head, "pieces": pieces}))


if __name__ == "__main__":
    main()
