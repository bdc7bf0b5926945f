# SPDX-License-Identifier: Apache-2.0
"""What stand-ins and our own Bazel files use beyond the described API, as a list of sentences."""

import ast
import fnmatch
import pathlib
import re

import describe_api
from starlark_reader import UNKNOWN, Declared, Function, Module, Reader, call_name, keywords

# Attributes that every rule has.
COMMON = {
    *("compatible_with", "deprecation", "exec_compatible_with", "exec_properties", "features"),
    *("name", "restricted_to", "tags", "target_compatible_with", "testonly", "toolchains"),
    "visibility",
}

# Where a stand-in differs from the module it stands for, and why that cannot be noticed.
DIFFERENT = {
    "rules_cuda //cuda:runtime default": (
        "the toolkit has no shared libcudart; .bazelrc sets the static one in both modes"
    ),
    "rules_python //python:wheelmaker.py": "the packer behind the stand-in's py_wheel",
}

LABEL = re.compile(r"@(rules_cuda|rules_python|cuda)//([\w/.-]*):([\w.*-]+)")

# Of our own rules.
OWN_OUTPUT_GROUPS = {"manifest", "ptx"}


def different(problems: list[tuple[str, str]]) -> list[str]:
    return [f"{where}: {what}" for where, what in problems if where not in DIFFERENT]


def _compare_attributes(where: str, mine: dict, real: dict) -> list[tuple[str, str]]:
    problems = []
    for name, facts in mine.items():
        place = f"{where} {name}"
        if name not in real:
            problems.append((place, "the real one has no such attribute"))
            continue
        for fact in ("type", "mandatory"):
            if facts[fact] != real[name][fact]:
                problems.append((place, f"{fact} is {facts[fact]}, really {real[name][fact]}"))
        known = "?" not in (facts["default"], real[name]["default"])
        if known and not facts["mandatory"] and facts["default"] != real[name]["default"]:
            problems.append(
                (place, f"default is {facts['default']!r}, really {real[name]['default']!r}")
            )
        if facts.get("files") and not real[name].get("files"):
            problems.append((place, "takes files, the real one takes only targets"))
    for name, facts in real.items():
        if facts["mandatory"] and name not in mine:
            problems.append((f"{where} {name}", "is mandatory in the real one, and missing here"))
    return problems


def stand_in_problems(folder: pathlib.Path, name: str, api: dict) -> list[str]:
    """Where the stand-in in `folder` goes beyond, or differs from, the module it stands for."""
    real, problems = api[name], []
    reader = Reader(folder, name)
    for path, symbols in real["symbols"].items():
        module = reader.module(path)
        for symbol in module.symbols() if module else []:
            where = f"{name} {path} {symbol}"
            if symbol not in symbols:
                problems.append((where, "the description does not have it"))
                continue
            mine = describe_api.describe_symbol(reader, path, symbol) or {}
            facts = symbols[symbol]
            if "attrs" in mine and "attrs" in facts:
                problems += _compare_attributes(where, mine["attrs"], facts["attrs"])
            for tag, attrs in mine.get("tags", {}).items():
                if tag in facts.get("tags", {}):
                    problems += _compare_attributes(f"{where} {tag}", attrs, facts["tags"][tag])
                else:
                    problems.append((f"{where} {tag}", "the real extension has no such tag"))
            for fact in ("provides", "output_groups"):
                extra = set(mine.get(fact, [])) - set(facts.get(fact, []))
                problems += [(where, f"{fact} {item}, the real one does not") for item in extra]
    for package, described in real["packages"].items():
        for target, facts in describe_api.describe_package(reader, package).items():
            where = f"{name} //{package}:{target}"
            match = next((t for t in described if fnmatch.fnmatch(target, t)), None)
            if match is None:
                problems.append((where, "the real package has no such target"))
                continue
            values = [facts.get("default", "?"), described[match].get("default", "?")]
            if "?" not in values and values[0] != values[1]:
                problems.append((where + " default", f"is {values[0]!r}, really {values[1]!r}"))
    version = _call(reader.module("MODULE.bazel"), "module").get("version")
    if version != real["version"]:
        problems.append((name, f"stands for {version}, described is {real['version']}"))
    return different(problems)


def _call(module: Module, name: str) -> dict:
    """The constant keyword arguments of the first call of `name`."""
    for node in ast.walk(module.tree):
        if call_name(node) == name:
            return {k: v.value for k, v in keywords(node).items() if isinstance(v, ast.Constant)}
    return {}


def known_label(api: dict, repository: str, package: str, target: str) -> bool:
    if repository in api:
        described = api[repository]
        if f"{package}/{target}".lstrip("/") in described["symbols"]:
            return True
        names = described["packages"].get(package, {})
    else:
        names = next(m["repositories"][repository] for m in api.values() if m["repositories"])
    return any(fnmatch.fnmatch(target, name) for name in names)


def label_problems(text: str, where: str, api: dict) -> list[str]:
    return [
        f"{where}: @{repository}//{package}:{target} is not described"
        for repository, package, target in LABEL.findall(text)
        if not known_label(api, repository, package, target)
    ]


def external_symbol(api: dict, label: str, symbol: str):
    """A symbol of another module as the description has it."""
    match = LABEL.match(label)
    if not match or match[1] not in api:
        return UNKNOWN
    path = f"{match[2]}/{match[3]}".lstrip("/")
    facts = api[match[1]]["symbols"].get(path, {}).get(symbol)
    return Declared(facts["kind"], facts | {"module": match[1]}) if facts else UNKNOWN


def file_problems(reader: Reader, path: str, api: dict) -> list[str]:
    """What one of our BUILD, .bzl and MODULE.bazel files uses that is not described."""
    module, problems = reader.module(path), []
    for label, symbol in module.loads.values():
        match = LABEL.match(label)
        if match and match[1] in api:
            file = f"{match[2]}/{match[3]}".lstrip("/")
            if symbol not in api[match[1]]["symbols"].get(file, {}):
                problems.append(f"{path}: {symbol} of {label} is not described")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            problems += _call_problems(reader, module, node)
        if call_name(node) == "filegroup" and "output_group" in keywords(node):
            group = keywords(node)["output_group"].value
            cuda_library = api["rules_cuda"]["symbols"]["cuda/defs.bzl"]["cuda_library"]
            if group not in cuda_library["output_groups"] and group not in OWN_OUTPUT_GROUPS:
                problems.append(f"{path}: output group {group} is not described")
        if isinstance(node, ast.FunctionDef):
            problems += _runtime_problems(node, path, api)
    if path == "MODULE.bazel":
        problems += _module_file_problems(module, api)
    return problems


def _call_problems(reader: Reader, module: Module, node: ast.Call) -> list[str]:
    made = reader.name(module, node.func.id)
    if isinstance(made, Function):
        made = reader.macro(made)
    if not isinstance(made, Declared) or not made.facts.get("module") or made.facts.get("open"):
        return []
    allowed = COMMON | set(made.facts["attrs"]) | set(made.facts.get("parameters", []))
    return [
        f"{module.label}:{node.lineno}: {node.func.id} has no attribute {name}"
        for name in keywords(node)
        if name not in allowed
    ]


def _runtime_problems(function: ast.FunctionDef, path: str, api: dict) -> list[str]:
    """Fields of the Python toolchain's runtime, where a function takes it into a variable."""
    fields = api["rules_python"]["symbols"]["python/defs.bzl"]["PyRuntimeInfo"]["fields"]
    names = {
        node.targets[0].id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "py3_runtime"
    }
    return [
        f"{path}:{node.lineno}: PyRuntimeInfo has no field {node.attr}"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in names
        and node.attr not in fields
    ]


def _module_file_problems(module: Module, api: dict) -> list[str]:
    problems, tags = [], {}
    for name, value in module.values.items():
        if call_name(value) != "use_extension":
            continue
        label, symbol = (arg.value for arg in value.args)
        match = LABEL.match(label)
        if not match:
            continue
        found = external_symbol(api, label, symbol)
        if isinstance(found, Declared):
            tags[name] = found.facts["tags"]
        else:
            problems.append(f"MODULE.bazel: {symbol} of {label} is not described")
    for node in ast.walk(module.tree):
        owner, _, tag = call_name(node).rpartition(".")
        if call_name(node) == "bazel_dep":
            given = {k: v.value for k, v in keywords(node).items()}
            described = api.get(given["name"], {}).get("version", given["version"])
            if given["version"] != described:
                problems.append(
                    f"MODULE.bazel: {given['name']} {given['version']}, described is {described}"
                )
        elif owner in tags and tag not in tags[owner]:
            problems.append(f"MODULE.bazel: {owner} has no tag {tag}")
        elif owner in tags:
            given, attrs = set(keywords(node)), tags[owner][tag]
            problems += [f"MODULE.bazel: {owner}.{tag} has no {a}" for a in given - set(attrs)]
            problems += [
                f"MODULE.bazel: {owner}.{tag} needs {name}"
                for name, facts in attrs.items()
                if facts["mandatory"] and name not in given
            ]
    return problems
