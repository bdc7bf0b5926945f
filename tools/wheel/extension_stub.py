# SPDX-License-Identifier: Apache-2.0
"""Writes the type stub of the extension module: the part written by hand, then its own tables.

Fails where the stub and the module differ in a name, or in the arguments of a function.

usage: extension_stub.py EXTENSION MODULE.pyi OUT.pyi
"""

import ast
import importlib.util
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_loader("_C", ExtensionFileLoader("_C", path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(function: ast.FunctionDef) -> list[str]:
    given = function.args
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def of_signature(name: str, text: str) -> list[str]:
    function = ast.parse(f"def {name}{text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return arguments(function)


def differences(stub: str, module: ModuleType) -> list[str]:
    functions: dict[str, ast.FunctionDef] = {}
    classes: set[str] = set()
    for node in ast.parse(stub).body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            classes.add(node.name)
    present = {name for name in dir(module) if name[:2] != "__" and callable(getattr(module, name))}
    found = [f"{name} is in one only" for name in sorted(present ^ (classes | set(functions)))]
    for name in sorted(present & set(functions)):
        text = getattr(module, name).__text_signature__
        if text is not None and of_signature(name, text) != arguments(functions[name]):
            found.append(f"{name} has the arguments {text}")
    return found


def main(extension: str, by_hand: str, out: str) -> int:
    module = load(extension)
    stub = Path(by_hand).read_text() + "\n" + module._stub()
    found = differences(stub, module)
    Path(out).write_text(stub)
    for line in found:
        print(f"{by_hand}: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
