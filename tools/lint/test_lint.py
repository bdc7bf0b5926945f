# SPDX-License-Identifier: Apache-2.0
"""Formatting, lint, licence headers and length of all sources of the checkout."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path("tools/lint").absolute()))

import programs
import workspace

FIX = "mend it with: ./bazelw run //tools/lint:fix"
HEADER = "SPDX-License-Identifier: Apache-2.0"
SOURCES = (
    *(*programs.PYTHON, *programs.CXX, *programs.STARLARK),
    *("*.lds", "*.sh", "*.toml", "*.yaml", "*.yml", ".bazelrc", "bazelw", "run"),
)
DATA = ("*.jsonl", "*.lock")  # of any length
MAX_LINES = 500
MAX_KERNEL_LINES = 800  # a kernel reads top to bottom: it is not cut into classes for its length


@pytest.fixture
def tools() -> programs.Programs:
    return programs.Programs(os.environ["LINT_SITE"], os.environ["BUILDIFIER"])


def passes(result: subprocess.CompletedProcess) -> None:
    text = (result.stdout + result.stderr).strip()
    if result.returncode:
        pytest.fail(f"{text}\n\n{FIX}", pytrace=False)
    print(text)


def test_ruff_check(tools: programs.Programs) -> None:
    passes(tools.ruff_check())


def test_ruff_format(tools: programs.Programs) -> None:
    passes(tools.ruff_format())


def test_ruff_without_arguments_agrees(tools: programs.Programs) -> None:
    """Plain `ruff format --check .`, which looks at the docs' examples too."""
    command = [tools.ruff, "format", "--check", "--no-cache", "."]
    passes(subprocess.run(command, cwd=workspace.root(), capture_output=True, text=True))


def test_clang_format(tools: programs.Programs) -> None:
    passes(tools.clang_format_all())


def test_buildifier(tools: programs.Programs) -> None:
    result = tools.buildifier_all()
    if "npm is not installed" in result.stderr:
        pytest.skip(result.stderr.strip())
    passes(result)


def test_licence_header() -> None:
    root, missing = workspace.root(), []
    for path in workspace.files(*SOURCES):
        with (root / path).open(errors="replace") as file:
            first = [line for line, _ in zip(file, range(3), strict=False)]
        if first and not any(HEADER in line for line in first):
            missing.append(str(path))
    assert not missing, f"no '{HEADER}' in the first three lines of {missing}"


def test_file_length() -> None:
    root = workspace.root()
    listed = json.loads(pathlib.Path(os.environ["LONG_FILES"]).read_text())
    long = {}
    for path in workspace.files("*"):
        if not any(path.match(pattern) for pattern in DATA):
            lines = (root / path).read_bytes().count(b"\n")
            if lines > (MAX_KERNEL_LINES if path.parts[0] == "kernels" else MAX_LINES):
                long[str(path)] = lines
    new = {path: lines for path, lines in long.items() if path not in listed}
    limits = f"{MAX_LINES} lines ({MAX_KERNEL_LINES} in kernels/)"
    assert not new, f"over {limits}: split them, or say why not in long_files.json: {new}"
    assert set(listed) == set(long), "long_files.json lists files that are not long"


def test_pinned_versions() -> None:
    """pre-commit runs the versions that the tests run."""
    root = workspace.root()
    lock = (root / "tools/python/locks/lint.lock").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", lock, re.MULTILINE))
    source = (root / "tools/python/buildifier.bzl").read_text()
    pinned["buildifier"] = re.search(r'_VERSION = "([\d.]+)"', source)[1]
    config = (root / ".pre-commit-config.yaml").read_text()
    hooks = re.findall(r"repo: \S+/(?:mirrors-)?([\w-]+)\n +rev: v?(\S+)", config)
    hooks = {re.sub(r"-?pre-commit-?", "", name): version for name, version in hooks}
    assert hooks == pinned
    warnings = re.search(r"--warnings=(\S+)", config)[1]
    assert set(warnings.split(",")) == {"-" + warning for warning in programs.WITHOUT}
