# SPDX-License-Identifier: Apache-2.0
"""Which commit the wheels of a folder are of: build.json beside them, written by ci/build.sh.

record.py FOLDER        run in the checkout, after the wheels were copied there
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


def write(folder: pathlib.Path, root: pathlib.Path) -> None:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, check=True, text=True
        ).stdout.strip()

    record = {
        "commit": git("rev-parse", "HEAD"),
        "clean": not git("status", "--porcelain"),
        "wheels": wheels(folder),
    }
    part = folder / f".{NAME}.part"
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(folder / NAME)


def problem(folder: pathlib.Path, commit: str) -> str:
    """Why the wheels of a folder are not known to be of a commit; "" where they are."""
    try:
        record = json.loads((folder / NAME).read_text())
        of, clean, listed = record["commit"], record["clean"], record["wheels"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder} has no {NAME} of ci/build.sh"
    if of != commit:
        return f"the wheels in {folder} are of another commit: {of[:12]}, this is {commit[:12]}"
    if not clean:
        return f"the wheels in {folder} were built from a dirty tree"
    if listed != wheels(folder):
        return f"the wheels in {folder} are not those that were built there"
    return "" if listed else f"{folder} has no wheels"


if __name__ == "__main__":
    try:
        write(pathlib.Path(sys.argv[1]), pathlib.Path.cwd())
    except (OSError, subprocess.CalledProcessError):
        print("record: not a git checkout: build.json is not written", file=sys.stderr)
