# SPDX-License-Identifier: Apache-2.0
"""Resolve `locks/*.in` and write the exact, hashed `locks/*.lock` beside them.

    python3 tools/python/lock.py [NAME ...]        # all of them, or `lock.py build test`

Uses the machine's own pip configuration. A line `# pip: OPTIONS` in an .in file adds options for
that resolution.
"""

import json
import pathlib
import shlex
import subprocess
import sys

LOCKS = pathlib.Path(__file__).resolve().parent / "locks"


def resolve(source: pathlib.Path) -> str:
    """Returns the text of the lock file for `source`."""
    options = []
    for line in source.read_text().splitlines():
        if line.startswith("# pip:"):
            options += shlex.split(line.removeprefix("# pip:"))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--no-input", "--only-binary=:all:", "--report", "-", *options, "-r", str(source)]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    lines = [f"# Written by lock.py from {source.name}; do not edit."]
    for item in report["install"]:
        name = item["metadata"]["name"].lower().replace("_", "-").replace(".", "-")
        version = item["metadata"]["version"].partition("+")[0]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={version} --hash=sha256:{digest}")
    return "\n".join(lines[:1] + sorted(lines[1:])) + "\n"


def main(names: list[str]) -> None:
    sources = [LOCKS / f"{name}.in" for name in names] or sorted(LOCKS.glob("*.in"))
    for source in sources:
        source.with_suffix(".lock").write_text(resolve(source))
        print(f"wrote {source.stem}.lock")


if __name__ == "__main__":
    main(sys.argv[1:])
