# SPDX-License-Identifier: Apache-2.0
"""The stand-ins and our own Bazel files keep to the API of the real rules_cuda and rules_python."""

import ast
import json
import pathlib
import re
import sys
from unittest import mock

import pytest

for folder in ("tests/build", "tools/lint"):
    sys.path.insert(0, str(pathlib.Path(folder).absolute()))

import workspace

sys.path.insert(0, str(workspace.root() / "tools" / "airgap"))

import api_check
from starlark_reader import Module, Reader, parse

ROOT = workspace.root()
MODULES = ROOT / "tools" / "airgap" / "modules"
API = json.loads((MODULES / "api.json").read_text())
BAZEL_FILES = ("BUILD", "BUILD.bazel", "*.bzl", "MODULE.bazel")


def our_files(*patterns: str) -> list[str]:
    files = workspace.files(*patterns)
    return [str(path) for path in files if not (ROOT / path).is_relative_to(MODULES)]


def our_reader() -> Reader:
    return Reader(
        ROOT, "tiercel", lambda label, symbol: api_check.external_symbol(API, label, symbol)
    )


@pytest.mark.parametrize("name", sorted(API))
def test_stand_in_keeps_to_the_api(name: str) -> None:
    assert api_check.stand_in_problems(MODULES / name, name, API) == []


def test_our_files_keep_to_the_api() -> None:
    reader, files = our_reader(), our_files(*BAZEL_FILES)
    assert {"MODULE.bazel", "python/BUILD", "tools/cuda/defs.bzl"} <= set(files)
    assert [p for path in files for p in api_check.file_problems(reader, path, API)] == []


def test_our_labels_are_described() -> None:
    files = our_files(*BAZEL_FILES, ".bazelrc", "*.sh", "bazelw")
    problems = []
    for path in files:
        problems += api_check.label_problems((ROOT / path).read_text(), path, API)
    assert problems == []


def not_loaded(module: Module) -> set[str]:
    """Rules and providers of other modules that only older Bazels know without a load."""
    names = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    gone = re.compile(
        r"(cc|py|sh)_(binary|library|shared_library|test)|py_runtime|CcInfo|PyInfo|cc_common"
    )
    return {name for name in names - module.loads.keys() if gone.fullmatch(name)}


def test_our_files_load_what_newer_bazels_lack() -> None:
    reader = our_reader()
    found = {path: not_loaded(reader.module(path)) for path in our_files(*BAZEL_FILES)}
    assert {path: names for path, names in found.items() if names} == {}
    assert not_loaded(parse('load(":a.bzl", "cc_test")\ncc_test()\nsh_test()', "BUILD")) == {
        "sh_test"
    }


def test_our_files_name_no_canonical_repository() -> None:
    """Bazel 7 writes them with ~, 8 with +."""
    for path in our_files(*BAZEL_FILES, ".bazelrc", "*.sh", "bazelw"):
        assert not re.search(r"_main[~+]|rules_\w+[~+]", (ROOT / path).read_text()), path


def problems_of(text: str, path: str = "python/BUILD") -> str:
    reader = our_reader()
    reader.modules[path] = parse(text, path)
    return " ".join(
        api_check.file_problems(reader, path, API) + api_check.label_problems(text, path, API)
    )


CUDA = 'load("@rules_cuda//cuda:defs.bzl", "cuda_library")\n'
OURS = 'load("//tools/cuda:defs.bzl", "sm90_cuda_library")\n'
RUNTIME = "def f(ctx):\n    r = ctx.toolchains[T].py3_runtime\n    return "
EXTENSION = 'python = use_extension("@rules_python//python/extensions:python.bzl", "python")\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            CUDA + 'cuda_library(name = "a", nvcc_flags = [])',
            "cuda_library has no attribute nvcc_flags",
        ),
        (
            OURS + 'sm90_cuda_library(name = "a", speed = 9)',
            "sm90_cuda_library has no attribute speed",
        ),
        ('load("@rules_cuda//cuda:defs.bzl", "cuda_wheel")', "cuda_wheel of"),
        ('load("@rules_python//python:wheel_names.bzl", "x")', "x of"),
        ('A = "@rules_cuda//cuda:speed"', "@rules_cuda//cuda:speed is not described"),
        ('A = "@cuda//:nvcc"', "@cuda//:nvcc is not described"),
        ('filegroup(name = "a", output_group = "cubins")', "output group cubins"),
        (RUNTIME + "r.headers", "PyRuntimeInfo has no field headers"),
    ],
)
def test_a_use_beyond_the_api_is_found(text: str, problem: str) -> None:
    assert problem in problems_of(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('bazel_dep(name = "rules_cuda", version = "0.4.0")', "rules_cuda 0.4.0"),
        (EXTENSION + "python.speed()", "python has no tag speed"),
        (EXTENSION + "python.defaults(fast = 1)", "python.defaults has no fast"),
        (EXTENSION + "python.toolchain()", "python.toolchain needs python_version"),
    ],
)
def test_a_module_file_beyond_the_api_is_found(text: str, problem: str) -> None:
    assert problem in problems_of(text, "MODULE.bazel")


@pytest.mark.parametrize(
    ("path", "old", "new", "problem"),
    [
        ("cuda/defs.bzl", '"hdrs": attr', '"headers": attr', "no such attribute"),
        ("cuda/defs.bzl", '"archs": attr.string_list', '"archs": attr.string', "type is string"),
        ("cuda/defs.bzl", "pic_objects =", "cubins =", "output_groups cubins"),
        (
            "cuda/defs.bzl",
            "\ncuda_library =",
            "\ncuda_wheel = 1\ncuda_library =",
            "does not have it",
        ),
        ("cuda/extensions.bzl", "(mandatory = True)", "()", "mandatory is False"),
        ("cuda/extensions.bzl", '"toolkit":', '"sdk":', "no such tag"),
        ("cuda/BUILD.bazel", '"runtime"', '"static_runtime"', "no such target"),
        ("MODULE.bazel", "0.3.0", "0.2.5", "stands for"),
    ],
)
def test_a_stand_in_beyond_the_api_is_found(
    tmp_path: pathlib.Path, path: str, old: str, new: str, problem: str
) -> None:
    for file in (MODULES / "rules_cuda").rglob("*"):
        copy = tmp_path / file.relative_to(MODULES / "rules_cuda")
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            copy.write_bytes(file.read_bytes())
    text = (tmp_path / path).read_text()
    assert old in text
    (tmp_path / path).write_text(text.replace(old, new))
    assert problem in " ".join(api_check.stand_in_problems(tmp_path, "rules_cuda", API))


def test_cuda_without_a_path_is_an_empty_repository() -> None:
    """An older output base asks for the @cuda that override_repo() replaces."""
    source = (MODULES / "rules_cuda" / "cuda" / "repositories.bzl").read_text()
    found = {"attr": mock.Mock(), "repository_rule": mock.Mock()}
    exec(source, found)  # This file's Starlark is Python too.
    rctx = mock.Mock()
    rctx.attr.toolkit_path = ""
    found["_cuda_toolkit_impl"](rctx)
    rctx.file.assert_called_once_with("BUILD.bazel")
    assert not rctx.symlink.called
