#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds a family of one op to a copy of this checkout, builds that and runs its tests.

    ci/toy_family.py [BAZEL_TEST_OPTION_OR_TARGET...]

It shows that a new op touches only its own folders: the copy, out/toy, differs by them alone. With
the settings and caches of this checkout that compiles one kernel and four files of host code.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
for folder in ("tests/build", "tools/lint"):
    sys.path.insert(0, str(ROOT / folder))

import toy_family  # noqa: E402

os.environ["WORKSPACE_MARKER"] = str(ROOT / "README.md")
import workspace  # noqa: E402

TREE = ROOT / "out" / "toy"
# These go through all ops, or all families.
ACROSS = [
    "//tests/api:test_checkpoint",
    "//tests/api:test_torch_ops",
    "//tests/build:kernel_budget_test",
    "//tests/build:kernel_folders_test",
    "//tests/docs:test_ops_table",
    "//tests/packaging:import_test_cp311",
    "//tests/plugins:test_register",
]


def bazelw(*words: str) -> str:
    command = ["./bazelw", *words]
    done = subprocess.run(command, cwd=TREE, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stdout + f"toy_family: {' '.join(command)} failed")
    return done.stdout


def targets(family: str) -> set[str]:
    """The tests that a family's BUILD files declare."""
    return set(bazelw("query", f"tests(//kernels/{family}/... + //tests/{family}/...)").split())


def main() -> int:
    files = workspace.files("*")
    added = toy_family.make(ROOT, files, TREE)
    for name in (".bazelrc.ci", ".bazelrc.user"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, TREE / name)
    subprocess.run([sys.executable, "ci/ops_table.py", "--write"], cwd=TREE, check=True)
    other = [f for f in files if (ROOT / f).read_bytes() != (TREE / f).read_bytes()]
    assert other == [pathlib.Path("README.md")], other  # its table, which no hand wrote
    found, transpose = targets("toy"), targets("transpose")
    expected = {
        re.sub("(copy_)?transpose", "toy", name) for name in transpose if "_gpu" not in name
    }
    assert found == expected, found ^ expected
    print(bazelw("test", *sorted(found), *ACROSS, *sys.argv[1:]))
    print(f"toy_family: {len(added)} files in its own folders, none elsewhere: it works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
