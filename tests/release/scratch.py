# SPDX-License-Identifier: Apache-2.0
"""A checkout to release from, a package index to release to, and the release as a process."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

from pip_folder import pip_folder

VERSION = os.environ["VERSION"]
HERE = pathlib.Path.cwd()
WHEELS = [pathlib.Path(path).absolute() for path in sorted(os.environ.get("WHEELS", "").split())]
# Everything real in every test, which takes minutes: //tests/release:whole_test.
WHOLE = bool(os.environ.get("WHOLE"))
PYTHONS = os.environ["PYTHONS"].split()
# What stands for the audit where that is not what is tested.
AUDIT = """
import pathlib, subprocess, sys
folder = pathlib.Path(sys.argv[3])
names = sorted(path.name for path in folder.glob("*.whl"))
assert len(names) == 4 and all(name.startswith(f"tiercel-{sys.argv[2]}-cp") for name in names)
with (folder / "SHA256SUMS").open("w") as sums:
    subprocess.run(["sha256sum", "--", *names], check=True, cwd=folder, stdout=sums)
"""
# What stands for the build: the wheels are there, //python:wheels made them.
BUILD = """#!/bin/sh
set -eu
[ "$1" = --release ]
shift
mkdir -p "$1"
env >"$1/../environment"
echo building
for wheel in {wheels}; do install -m 644 "$wheel" "$1/"; done
{python} tools/release/record.py --release "$1"
"""


class Checkout:
    """A git repository with the files that a release looks at."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        for folder in ("ci", "tools/release"):
            (root / folder).mkdir(parents=True)
        for name in ("ci/bump.py", "tools/release/record.py"):
            shutil.copy(HERE / name, root / name)
        names = " ".join(map(str, WHEELS))
        (root / "ci" / "build.sh").write_text(BUILD.format(wheels=names, python=sys.executable))
        (root / "ci" / "build.sh").chmod(0o755)
        (root / "ci" / "audit.py").write_text(AUDIT)
        (root / ".gitignore").write_text("/out/\n__pycache__/\n")
        (root / "version.bzl").write_text(f'VERSION = "{VERSION}"\n')
        (root / "README.md").write_text("# Tiercel\n")
        (root / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- A thing.\n")
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "A Releaser")
        self.git("config", "user.email", "releaser@example.com")
        self.commit("A first")

    def git(self, *words: str) -> str:
        result = subprocess.run(["git", *words], cwd=self.root, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def commit(self, text: str) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", text)
        return self.git("rev-parse", "HEAD")

    def bump(self) -> None:
        subprocess.run([sys.executable, self.root / "ci" / "bump.py", VERSION], check=True)
        self.commit(f"Version {VERSION}")

    @property
    def log(self) -> str:
        return (self.root / "out" / "release" / f"{VERSION}.log").read_text()


class Index:
    """pypiserver on a port of its own."""

    def __init__(self, folder: pathlib.Path, user: str, password: str) -> None:
        self.folder, self.user, self.password = folder, user, password
        folder.mkdir()
        program = str(HERE / "tests" / "release" / "index_server.py")
        self.process = subprocess.Popen(
            [sys.executable, program, str(folder)],
            env=os.environ | {"INDEX_USER": user, "INDEX_PASSWORD": password},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self.process.stdout.readline().strip()

    @property
    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.glob("*.whl")}

    @property
    def requests(self) -> str:
        return self.folder.with_suffix(".log").read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _groups_of(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)


class Releaser:
    """Runs the release with given indexes; can be killed when it says something."""

    def __init__(
        self,
        checkout: Checkout,
        home: pathlib.Path,
        test: str = "",
        production: str = "",
        whole: bool = WHOLE,
    ) -> None:
        self.checkout = checkout
        home.mkdir(exist_ok=True)
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("TWINE_", "PIP_"))}
        self.env = keep | {
            "BUILD_WORKSPACE_DIRECTORY": str(checkout.root),
            "HOME": str(home),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path.endswith("_site")),
            "TEST_WHEELS": str(pip_folder()),
            "TIERCEL_REPOSITORY": production,
            "TIERCEL_TEST_REPOSITORY": test,
        }
        if not whole:
            self.env |= {"AUDIT": str(checkout.root / "ci" / "audit.py"), "PYTHONS": PYTHONS[-1]}
        self.program = "tools/release/main.py"
        self.arguments = [VERSION, "--without-gpu-run"]
        self.command_lines: set[str] = set()

    def start(self, *options: str, **env: str) -> subprocess.Popen:
        command = [sys.executable, self.program, *self.arguments, *options]
        return subprocess.Popen(
            command,
            env=self.env | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )

    def run(self, *options: str, answer: str = "", **env: str) -> tuple[int, str]:
        process = self.start(*options, **env)
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,))
        watcher.start()
        try:
            text, _ = process.communicate(answer + "\n", timeout=300)
        finally:
            done.set()
            watcher.join()
            _groups_of(process)
        return process.returncode, text

    def _watch(self, done: threading.Event) -> None:
        """What any user of the machine could see of the processes."""
        while not done.is_set():
            for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    self.command_lines.add(path.read_text(errors="replace").replace("\0", " "))
            time.sleep(0.02)

    def kill_when(self, pattern: str, *options: str, **env: str) -> None:
        """Starts it and kills it, with all that it started, as soon as a line matches."""
        process = self.start(*options, **env)
        try:
            process.stdin.write(f"{VERSION}\n")
            process.stdin.flush()
            seen = []
            for line in process.stdout:
                seen.append(line)
                if re.search(pattern, line):
                    return
            raise AssertionError(f"it never said {pattern!r}:\n{''.join(seen)}")
        finally:
            _groups_of(process)
            process.wait()
            process.stdout.close()
            process.stdin.close()
