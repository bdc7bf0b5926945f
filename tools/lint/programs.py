# SPDX-License-Identifier: Apache-2.0
"""The formatters and linters: where they are, which files they look at, how they are called."""

import pathlib
import subprocess

import workspace

PYTHON = ("*.py", "*.pyi")
CXX = ("*.cc", "*.cu", "*.cuh", "*.h")
STARLARK = ("*.bzl", "BUILD", "BUILD.bazel", "MODULE.bazel", "WORKSPACE")

# Documentation of every helper, and loads that not every supported Bazel mode has.
WITHOUT = ["constant-glob", "native-cc-common", "native-cc-info", "native-sh-binary"]
WITHOUT += ["function-docstring", "function-docstring-args", "function-docstring-return"]
WARNINGS = "-warnings=" + ",".join("-" + warning for warning in WITHOUT)


class Programs:
    def __init__(self, site: str, buildifier: str) -> None:
        """`site` is the folder with the packages ruff and clang-format."""
        folder = pathlib.Path(site).absolute()
        self.ruff = folder / "bin" / "ruff"
        self.clang_format = folder / "clang_format" / "data" / "bin" / "clang-format"
        self.buildifier = pathlib.Path(buildifier).absolute()

    def run(self, command: list, patterns: tuple[str, ...]) -> subprocess.CompletedProcess:
        """Runs a command in the checkout on the files that match."""
        files = workspace.files(*patterns)
        assert files, f"no file matches {patterns}"
        return subprocess.run(
            [*command, *files], capture_output=True, cwd=workspace.root(), text=True
        )

    def ruff_check(self, fix: bool = False) -> subprocess.CompletedProcess:
        options = ["--fix"] if fix else []
        return self.run(
            [self.ruff, "check", "--no-cache", *options, "--output-format=concise"], PYTHON
        )

    def ruff_format(self, fix: bool = False) -> subprocess.CompletedProcess:
        options = [] if fix else ["--diff"]
        return self.run([self.ruff, "format", "--no-cache", "--quiet", *options], PYTHON)

    def clang_format_all(self, fix: bool = False) -> subprocess.CompletedProcess:
        options = ["-i"] if fix else ["--dry-run", "--Werror", "--ferror-limit=3"]
        return self.run([self.clang_format, *options], CXX)

    def buildifier_all(self, fix: bool = False) -> subprocess.CompletedProcess:
        options = ["-mode=fix", "-lint=fix"] if fix else ["-mode=diff", "-lint=warn"]
        return self.run([self.buildifier, *options, WARNINGS], STARLARK)
