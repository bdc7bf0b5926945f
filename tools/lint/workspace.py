# SPDX-License-Identifier: Apache-2.0
"""The repository's own source files, for checks of the tree itself.

A check of all sources cannot name them as Bazel inputs (globs end at a package's edge), so such
tests take one file of the root package and follow its link to the checkout: they are tagged
`no-sandbox` and `external`, and run each time.
"""

import os
import pathlib
import subprocess

# Generated, fetched, or a person's own.
SKIPPED = {"__pycache__", "dist", "node_modules"}
SHOWN_DOT_FOLDERS = {".ci", ".github"}


def root() -> pathlib.Path:
    """The checkout: where WORKSPACE_MARKER's link leads, or where `bazel run` was called."""
    if folder := os.environ.get("BUILD_WORKSPACE_DIRECTORY"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ["WORKSPACE_MARKER"]).resolve().parent


def _walk(folder: pathlib.Path) -> list[pathlib.Path]:
    found = []
    for entry in sorted(folder.iterdir()):
        name = entry.name
        if entry.is_symlink() or name in SKIPPED or name.startswith("bazel-"):
            continue
        if entry.is_dir():
            if not name.startswith(".") or name in SHOWN_DOT_FOLDERS:
                found += _walk(entry)
        else:
            found.append(entry)
    return found


def files(*patterns: str) -> list[pathlib.Path]:
    """Files whose names match a pattern, relative to the root: what git has or would add."""
    folder = root()
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others"]
    try:
        listed = subprocess.run(
            [*command, "--exclude-standard"], capture_output=True, check=True, text=True
        ).stdout.split("\0")
        found = [pathlib.Path(name) for name in sorted(set(listed)) if (folder / name).is_file()]
        found = [path for path in found if not (folder / path).is_symlink()]
    except (OSError, subprocess.CalledProcessError):
        found = [path.relative_to(folder) for path in _walk(folder)]
    return [path for path in found if any(path.match(pattern) for pattern in patterns)]
