# SPDX-License-Identifier: Apache-2.0
"""Which Bazel modules are in the graph, and which folder each is taken from.

An override of a module outside the graph is an error, and one that is missing would be looked up in
a registry, so the list is derived from the MODULE.bazel files themselves.
"""

import ast
from pathlib import Path

import recipe
from errors import SetupError

STAND_INS = Path(__file__).resolve().parent / "modules"


def dependencies(module_file: Path, *, root: bool) -> list:
    """Names of the bazel_deps; those for development count in the root module only."""
    try:
        tree = ast.parse(module_file.read_text())
    except SyntaxError as error:
        raise SetupError(f"{module_file}: {error.msg} (line {error.lineno})") from error
    names = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "bazel_dep":
            continue
        values = {word.arg: word.value for word in node.keywords}
        dev = values.get("dev_dependency")
        if dev is not None and ast.literal_eval(dev) and not root:
            continue
        name = values.get("name", node.args[0] if node.args else None)
        names.append(ast.literal_eval(name))
    return names


def resolve(workspace: Path, install_base: Path, modules_dir=None) -> dict:
    """{module name: folder} of every module that the workspace's graph reaches."""
    found = {}
    todo = dependencies(workspace / "MODULE.bazel", root=True)
    todo += dependencies(install_base / "embedded_tools" / "MODULE.bazel", root=False)
    while todo:
        name = todo.pop(0)
        if name in found:
            continue
        folder = _folder(name, install_base, modules_dir)
        if folder is None:
            raise SetupError(
                f"the Bazel module {name} is asked for, but neither Bazel's packages nor"
                f" tools/airgap/modules have it"
                + (f", nor has {modules_dir}" if modules_dir else "")
            )
        found[name] = folder
        todo += dependencies(folder / "MODULE.bazel", root=False)
    return dict(sorted(found.items()))


def _folder(name: str, install_base: Path, modules_dir):
    choices = [STAND_INS / name]
    if modules_dir:
        choices.insert(0, Path(modules_dir) / name)
    if name in recipe.PREFIX_MODULES:
        choices.append(install_base / recipe.PREFIX_MODULES[name])
    for folder in choices:
        if (folder / "MODULE.bazel").is_file():
            return folder
    return None
