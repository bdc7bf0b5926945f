# SPDX-License-Identifier: Apache-2.0
"""Builds tonight's wheels and publishes them as the prerelease `tiercel-nightly`: ci/nightly.sh.

What is there stays usable until all of tonight's is: files have the date in their names, the notes
that point at them change after their upload, and older files go last.
"""

import argparse
import fcntl
import os
import pathlib
import re
import shutil
import sys
import time

import notes
import record
from checkout import Checkout, bump_module
from github import TAG, GitHub
from main import pip_wheel
from shell import Failed, Shell
from smoke import smoke

KEPT = 2  # nightlies whose files stay: tonight's and the one before


class Nightly:
    def __init__(self, root: pathlib.Path, args: argparse.Namespace, shell: Shell) -> None:
        self.root, self.args, self.shell = root, args, shell
        self.checkout, self.bump = Checkout(root, shell), bump_module(root)
        self.restore()
        self.version = self.next_version()
        self.folder = root / "out" / "nightly" / self.version
        self.commit = self.checkout.commit()

    def restore(self) -> None:
        """version.bzl as committed, after a run that was killed while it had the nightly's."""
        if ".dev" in self.bump.current(self.root):
            self.checkout.git("checkout", "--", "version.bzl")
        if dirty := self.checkout.dirty():
            raise Failed(f"the tree is dirty: commit or remove these first\n{dirty}")

    def next_version(self) -> str:
        """What comes after the last release, as of today."""
        major, minor, patch, stage, _ = self.bump.order(self.bump.current(self.root))
        if stage == "z" and self.checkout.tagged(f"v{major}.{minor}.{patch}"):
            patch += 1
        return f"{major}.{minor}.{patch}.dev{self.args.date}"

    def run(self) -> None:
        self.shell.say(f"{self.version} is commit {self.commit}")
        self.build()
        self.shell.step("audit", "ci/audit.sh")
        command = [sys.executable, os.environ["AUDIT"], "--version", self.version, self.folder]
        env = self.shell.environment({"PYTHONPATH": os.environ["PYTHONPATH"]})
        self.shell.run(command, env=env, fails="the audit failed, see above")
        self.shell.step("install", "in a fresh environment of each Python")
        source = ["--no-index", "--find-links", str(self.folder)]
        wheels = record.wheels(self.folder)
        smoke(os.environ["PYTHONS"].split(), pip_wheel(), self.version, wheels, source, self.shell)
        # Sums under a name of their own: last night's stay right until they go.
        sums = self.folder / f"tiercel-{self.version}.SHA256SUMS"
        shutil.copy(self.folder / "SHA256SUMS", sums)
        files = [*sorted(self.folder.glob("tiercel-*.whl")), *self.folder.glob("*.cdx.json"), sums]
        if self.args.dry_run:
            self.write_notes("")
            self.shell.say(f"dry run of {self.version} passed: nothing was published")
            return
        self.publish(files)

    def build(self) -> None:
        self.shell.step("build", str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        committed = (self.root / "version.bzl").read_text()
        try:
            self.write_version(self.bump.VERSION.sub(f'VERSION = "{self.version}"', committed))
            self.shell.run([self.root / "ci" / "build.sh", self.folder], cwd=self.root)
        finally:
            self.write_version(committed)
        (self.folder / record.NAME).unlink(missing_ok=True)  # it speaks of a changed version.bzl

    def write_version(self, text: str) -> None:
        """At once, so that a kill leaves one or the other, and nothing beside."""
        part = self.folder.with_name("version.bzl.part")
        part.write_text(text)
        part.replace(self.root / "version.bzl")

    def write_notes(self, before: str) -> pathlib.Path:
        path = self.folder / "notes.md"
        path.write_text(notes.nightly(self.checkout, self.version, self.commit, before))
        return path

    def publish(self, files: list[pathlib.Path]) -> None:
        self.shell.step("publish", TAG)
        github = GitHub(self.root, self.shell)
        release = github.release()
        if not release:
            # gh makes a draft, uploads, and publishes the draft: all of it or nothing.
            github.create(self.version, self.commit, self.write_notes(""), files)
        else:
            text = self.write_notes(notes.commit_of(release["body"]))
            github.upload(files, release["assets"])
            github.point_at(self.version, self.commit, text)
        names = [asset["name"] for asset in github.release()["assets"]]
        if missing := sorted({path.name for path in files} - set(names)):
            raise Failed(f"{TAG} lacks {', '.join(missing)} after the upload")
        for name in outdated(names):
            github.delete(name)
        self.shell.say(f"{TAG} is {self.version}")


def outdated(names: list[str]) -> list[str]:
    """The files of all nightlies but the last ones."""
    nights = {name: m[0] for name in names if (m := re.search(r"\.dev\d{8}", name))}
    kept = sorted(set(nights.values()))[-KEPT:]
    return sorted(name for name, night in nights.items() if night not in kept)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ci/nightly.sh", description=__doc__.splitlines()[0])
    today = time.strftime("%Y%m%d", time.gmtime())
    parser.add_argument("--date", default=today, help="YYYYMMDD (default: today, UTC)")
    parser.add_argument("--dry-run", action="store_true", help="build and try, publish nothing")
    args = parser.parse_args(arguments)
    try:
        time.strptime(args.date, "%Y%m%d")
    except ValueError:
        parser.error(f"--date is {args.date!r}, expected YYYYMMDD")
    root = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    shell = Shell(root / "out" / "nightly" / f"{args.date}.log", "nightly")
    with (root / "out" / "nightly" / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Nightly(root, args, shell).run()
        except BlockingIOError:
            shell.say("error: another nightly runs in this checkout")
            return 1
        except Failed as error:
            shell.say(f"error: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
