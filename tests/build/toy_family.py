# SPDX-License-Identifier: Apache-2.0
"""Copies a checkout and adds a family of one op to it, `toy`, as a developer would.

Its files are in tests/build/toy under other names, so that nothing takes them for this tree's own.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator

TOY = pathlib.Path("tests/build/toy")
OWN = {
    "kernels/toy": {
        "kernels.BUILD": "BUILD",
        **{name: name for name in ("contract.json", "toy.cc", "toy.cu", "toy.h", "toy_kernels.h")},
    },
    "python/tiercel/ops/toy": {
        "init.py": "__init__.py",
        **{
            name: name
            for name in (
                *("binding.cc", "cases.py", "contract.py", "op.py", "reference.py", "spec.py"),
                "suite.yaml",
            )
        },
    },
    "tests/toy": {
        "cpu.py": "test_toy_cpu.py",
        "declarations.txt": "declarations.txt",
        "plan.py": "test_toy_plan.py",
        "tests.BUILD": "BUILD",
    },
    "docs/kernels": {"page.md": "toy_shift.md"},
}


def _sources(tree: pathlib.Path) -> Iterator[pathlib.Path]:
    """The files of an earlier copy, without what Bazel has put there."""
    for folder, folders, names in os.walk(tree):
        inside = pathlib.Path(folder).relative_to(tree)
        folders[:] = [name for name in folders if not name.startswith("bazel-")]
        generated = (".bazelrc.", "MODULE.bazel.lock", "bazel-")
        yield from (inside / name for name in names if not name.startswith(generated))


def make(root: pathlib.Path, files: Iterable[pathlib.Path], tree: pathlib.Path) -> list[str]:
    """Copies `files` of the checkout `root` to `tree` and adds the family. Returns what it added.

    A file that is the same already keeps its time, so that a build there repeats nothing.
    """
    there = set(_sources(tree))
    added = {
        pathlib.Path(folder, name): TOY / source
        for folder, names in OWN.items()
        for source, name in names.items()
    }
    wanted = {path: path for path in files} | added
    for path in there - wanted.keys():
        (tree / path).unlink()
    for path, source in wanted.items():
        data = (root / source).read_bytes()
        if path not in there or (tree / path).read_bytes() != data:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / source, tree / path)
    return sorted(map(str, added))
