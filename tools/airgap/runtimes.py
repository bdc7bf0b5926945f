# SPDX-License-Identifier: Apache-2.0
"""What the real rules_python would download (--modules-dir), from this machine instead.

Its Python toolchains live in one repository a version: each is replaced by a folder that wraps the
machine's interpreter. Its wheel maker needs one wheel, which pip fetches into Bazel's distdir.
"""

import re
import shutil
from pathlib import Path

import progress
import pythons
import wheel

_BUILD = """\
load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_python//python:py_runtime.bzl", "py_runtime")
load("@rules_python//python:py_runtime_pair.bzl", "py_runtime_pair")
load("@rules_python//python/cc:py_cc_toolchain.bzl", "py_cc_toolchain")
load("@rules_python//python/private:py_exec_tools_toolchain.bzl", "py_exec_tools_toolchain")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "python_headers",
    hdrs = glob(["include/**/*.h"]),
    includes = ["include"],
)

cc_library(name = "libpython")

py_runtime(
    name = "py3_runtime",
    implementation_name = "cpython",
    interpreter_path = "{executable}",
    interpreter_version_info = {{
        "major": "{major}",
        "micro": "{micro}",
        "minor": "{minor}",
    }},
    python_version = "PY3",
)

py_runtime_pair(
    name = "python_runtimes",
    py2_runtime = None,
    py3_runtime = ":py3_runtime",
)

py_cc_toolchain(
    name = "py_cc_toolchain",
    headers = ":python_headers",
    headers_abi3 = ":python_headers",
    libs = ":libpython",
    python_version = "{full_version}",
)

py_exec_tools_toolchain(
    name = "py_exec_tools_toolchain",
    precompiler = "@rules_python//tools/precompiler:precompiler",
)
"""


def options(store, rules_python: Path) -> list:
    """Bazel's options that put all of it in place."""
    lines = []
    for version, info in pythons.find_all().items():
        if info is None:
            progress.say(f"warning: {pythons.missing_line(version)}")
            continue
        folder = store.base / "runtimes" / version
        _write(folder, info)
        name = f"python_{version.replace('.', '_')}_x86_64-unknown-linux-gnu"
        lines.append(f"--override_repository=rules_python~~python~{name}={folder}")
    requirement = _packaging(rules_python)
    if requirement:
        distfiles = store.base / "distfiles"
        wheel.fetch(distfiles, requirement)
        lines.append(f"--distdir={distfiles}")
    return lines


def _write(folder: Path, info: dict) -> None:
    major, minor, micro = info["full_version"].split(".")
    text = _BUILD.format(**info, major=major, minor=minor, micro=micro)
    include = folder / "include"
    current = folder / "BUILD.bazel"
    if current.exists() and current.read_text() == text and include.exists():
        return  # untouched, so that Bazel need not look again
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    include.symlink_to(info["include"])
    (folder / "REPO.bazel").write_text("")
    current.write_text(text)


def _packaging(rules_python: Path) -> str:
    """The requirement of the wheel maker's one dependency, as that revision pins it."""
    try:
        text = (rules_python / "python/private/pypi/deps.bzl").read_text()
    except OSError:
        return ""
    found = re.search(r'/packaging-([\d.]+)-py3-none-any\.whl",\s*"([0-9a-f]{64})"', text)
    return f"packaging=={found.group(1)} --hash=sha256:{found.group(2)}" if found else ""
