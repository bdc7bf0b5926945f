# SPDX-License-Identifier: Apache-2.0
"""Describe the part of a Bazel module's API that this repository may use, from its sources.

    describe_api.py FOLDER [FOLDER ...]     # unpacked rules_cuda 0.3.0, rules_python 2.3.2

Writes modules/api.json: names, types and defaults of files, symbols, attributes, tags, provider
fields and targets. tests/build/test_module_api.py holds the stand-ins and our BUILD files to it.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from starlark_reader import Declared, Function, Reader, parse, targets

API = pathlib.Path(__file__).resolve().parent / "modules" / "api.json"

# What is described. Widen it here when a BUILD file needs more, then describe again.
SCOPE = {
    "rules_cuda": {
        "version": "0.3.0",
        "symbols": {
            "cuda/defs.bzl": ["cuda_library"],
            "cuda/extensions.bzl": ["toolchain"],
            "cuda/repositories.bzl": ["cuda_toolkit"],
        },
        "packages": ["cuda"],
        # The repository that toolchain.toolkit(name = "cuda") makes, from its templates.
        "repositories": {
            "cuda": ["cuda/private/templates/BUILD.cudart", "cuda/private/templates/BUILD.nvcc"],
        },
    },
    "rules_python": {
        "version": "2.3.2",
        "symbols": {
            "python/defs.bzl": [
                "PyRuntimeInfo",
                "py_binary",
                "py_library",
                "py_runtime_pair",
                "py_test",
            ],
            "python/extensions/python.bzl": ["python"],
            "python/packaging.bzl": ["py_wheel"],
        },
        "packages": ["python", "python/cc", "python/config_settings"],
        "repositories": {},
    },
}

# Targets that nobody outside depends on.
INTERNAL_KINDS = ("bzl_library", "construct_config_settings", "filegroup")


def describe_symbol(reader: Reader, path: str, name: str) -> dict | None:
    """The facts about one symbol of one file; None where the file does not have it."""
    module = reader.module(path)
    if module is None or name not in {**module.values, **module.functions}:
        return None
    found = reader.symbol(path, name)
    if isinstance(found, Function):
        found = reader.macro(found)
    if not isinstance(found, Declared):
        return {"kind": "opaque"}
    return {"kind": found.kind, **found.facts}


def describe_package(reader: Reader, package: str) -> dict[str, dict]:
    for name in ("BUILD.bazel", "BUILD"):
        found = targets(reader, f"{package}/{name}".lstrip("/"))
        if found:
            break
    return {
        name: found[name]
        for name in sorted(found)
        if found[name]["kind"] not in INTERNAL_KINDS and not name.endswith(("_bzl", ".bzl"))
    }


def describe_repository(reader: Reader, templates: list[str]) -> dict[str, dict]:
    found: dict[str, dict] = {}
    for template in templates:
        text = 'package(default_visibility = ["//visibility:public"])\n'
        text += (reader.folder / template).read_text()
        reader.modules[template] = parse(text, template)
        found |= targets(reader, template)
    return {name: found[name] for name in sorted(found) if "*" not in name}


def describe(folder: pathlib.Path, name: str, scope: dict) -> dict:
    """The description of one module as api.json holds it."""
    reader = Reader(folder, name)
    files: dict = {}
    for path, symbols in scope["symbols"].items():
        files[path] = {symbol: describe_symbol(reader, path, symbol) for symbol in symbols}
        missing = [symbol for symbol, facts in files[path].items() if facts is None]
        if missing:
            sys.exit(f"{folder}: {path} does not have {', '.join(missing)}")
    return {
        "version": scope["version"],
        "symbols": files,
        "packages": {p: describe_package(reader, p) for p in scope["packages"]},
        "repositories": {
            repository: describe_repository(reader, templates)
            for repository, templates in scope["repositories"].items()
        },
    }


def module_name(folder: pathlib.Path) -> str:
    module = parse((folder / "MODULE.bazel").read_text(), "MODULE.bazel")
    call = next(node.value for node in module.tree.body if hasattr(node, "value"))
    return next(keyword.value.value for keyword in call.keywords if keyword.arg == "name")


def main(folders: list[str]) -> None:
    if not folders:
        sys.exit(__doc__)
    api = json.loads(API.read_text()) if API.exists() else {}
    for folder in map(pathlib.Path, folders):
        name = module_name(folder)
        if name not in SCOPE:
            sys.exit(f"{folder} has the module {name}; described are {', '.join(SCOPE)}")
        api[name] = describe(folder, name, SCOPE[name])
        print(f"described {name} {api[name]['version']}")
    API.write_text(json.dumps(dict(sorted(api.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
