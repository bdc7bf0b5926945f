# SPDX-License-Identifier: Apache-2.0
"""Which commit the wheels of a folder are of: build.json beside them, written by ci/build.sh.

record.py [--release] FOLDER        run in the checkout, after the wheels were copied there
"""

import hashlib
import json
import pathlib
import subprocess
import sys

NAME = "build.json"


def sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheels(folder: pathlib.Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(folder.glob("tiercel-*.whl"))}


def write(folder: pathlib.Path, root: pathlib.Path, release: bool) -> None:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, check=True, text=True
        ).stdout.strip()

    record = {
        "commit": git("rev-parse", "HEAD"),
        "clean": not git("status", "--porcelain"),
        "settings": "committed" if release else "of this machine",
        "wheels": wheels(folder),
    }
    part = folder / f".{NAME}.part"
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(folder / NAME)


def listed(folder: pathlib.Path) -> dict[str, str]:
    """The hashes of the wheels that were built there."""
    return json.loads((folder / NAME).read_text())["wheels"]


def problem(folder: pathlib.Path, commit: str) -> str:
    """Why the wheels of a folder are not known to be of a commit; "" where they are."""
    try:
        record = json.loads((folder / NAME).read_text())
        of, clean, built = record["commit"], record["clean"], record["wheels"]
        settings = record["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder} has no {NAME} of ci/build.sh"
    if of != commit:
        return f"the wheels in {folder} are of another commit: {of[:12]}, this is {commit[:12]}"
    if not clean:
        return f"the wheels in {folder} were built from a dirty tree"
    if settings != "committed":
        return (
            f"the wheels in {folder} were built with settings of this machine (.bazelrc.user,"
            " ~/.bazelrc, a cache): ci/build.sh --release builds without"
        )
    if built != wheels(folder):
        return f"the wheels in {folder} are not those that were built there"
    return "" if built else f"{folder} has no wheels"


if __name__ == "__main__":
    *options, target = sys.argv[1:]
    try:
        write(pathlib.Path(target), pathlib.Path.cwd(), "--release" in options)
    except (OSError, subprocess.CalledProcessError):
        print("record: not a git checkout: build.json is not written", file=sys.stderr)
