# SPDX-License-Identifier: Apache-2.0
"""Writes the type stub of a package or module of tiercel that is filled when it is imported.

python stubs.py SOURCE... OUT, where OUT ends in tiercel/__init__.pyi, tiercel/ops/__init__.pyi, ...
or tiercel/plugins/types.pyi.
"""

from __future__ import annotations

import ast
import pathlib
import sys
import types
from collections.abc import Iterator

# Imported as modules of this, so that importing them needs nothing that is built.
_package = sys.modules["tiercel"] = types.ModuleType("tiercel")


def _defined(root: pathlib.Path, kind: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each function and class at the top of the families' files of a kind."""
    from tiercel import _families

    for module in _families.files(kind):
        tree = ast.parse((root.parent / f"{module.replace('.', '/')}.py").read_text())
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield module, node.name


def _literal(root: pathlib.Path, name: str) -> object:
    """A constant of tiercel/__init__.py."""
    for node in ast.parse((root / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


def _homes(root: pathlib.Path, package: str) -> dict[str, str]:
    """The package's public names, and where each is imported from."""
    from tiercel import _families

    if package == "nn":
        return {n: home for home, n in _defined(root, "module") if not n.startswith("_")}
    if package in ("ops", "ref"):
        kind = {"ops": "op", "ref": "reference"}[package]
        public = _families.public_names()
        return {name: home for home, name in _defined(root, kind) if name in public}
    homes = dict.fromkeys(_literal(root, "_SUBMODULES"), "tiercel")
    return homes | _literal(root, "_LAZY") | dict.fromkeys(_homes(root, "ops"), "tiercel.ops")


def main(*sources: str, out: str) -> None:
    init = next(s for s in sources if s.endswith("python/tiercel/__init__.py"))
    root = pathlib.Path(init).absolute().parent
    _package.__path__ = [str(root)]
    if out.endswith("plugins/types.pyi"):
        from tiercel.plugins import type_names

        pathlib.Path(out).write_text(type_names.source())
        return
    package = pathlib.Path(out).parent.name
    homes = _homes(root, package)
    lines = [f"from {home} import {name} as {name}" for name, home in sorted(homes.items())]
    if package == "tiercel":
        homes["__version__"] = ""
        lines.append("__version__: str")
    lines += [f"__all__ = {sorted(homes)!r}", ""]
    pathlib.Path(out).write_text("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:-1], out=sys.argv[-1])
