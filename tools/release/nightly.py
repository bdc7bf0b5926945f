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
        self.github = GitHub(root, shell)
        self.restore()
        self.version = version_in(args.folder) if args.publish else self.next_version()
        self.folder = args.folder or root / "out" / "nightly" / self.version
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
        if not self.args.dry_run:
            self.github.require("publishes nightlies")
            self.github.release()  # before the build: also the token has to be right
            if not self.args.without_gpu_run:
                self.github.wait_for_gpu_run(self.commit, self.args.gpu_minutes)
        if not self.args.publish:
            self.make()
        if self.args.dry_run:
            self.write_notes("")
            self.shell.say(f"dry run of {self.version} passed: nothing was published")
            return
        self.publish(self.files())

    def make(self) -> None:
        """Tonight's wheels in the folder, audited and tried."""
        self.build()
        self.shell.step("audit", "ci/audit.sh")
        command = [sys.executable, os.environ["AUDIT"], "--version", self.version, self.folder]
        env = self.shell.environment({"PYTHONPATH": os.environ["PYTHONPATH"]})
        self.shell.run(command, env=env, fails="the audit failed, see above")
        self.shell.step("install", "in a fresh environment of each Python")
        source = ["--no-index", "--find-links", str(self.folder)]
        wheels = record.wheels(self.folder)
        smoke(os.environ["PYTHONS"].split(), pip_wheel(), self.version, wheels, source, self.shell)

    def files(self) -> list[pathlib.Path]:
        """The files to publish: those that passed the audit, which wrote the sums."""
        wheels = record.wheels(self.folder)
        passed = (self.folder / "SHA256SUMS").read_text().splitlines()
        if other := [n for n, digest in wheels.items() if f"{digest}  {n}" not in passed]:
            raise Failed(f"{', '.join(other)} in {self.folder}: not what was audited there")
        # Sums under a name of their own: last night's stay right until they go.
        sums = self.folder / f"tiercel-{self.version}.SHA256SUMS"
        shutil.copy(self.folder / "SHA256SUMS", sums)
        return [*(self.folder / name for name in wheels), *self.folder.glob("*.cdx.json"), sums]

    def build(self) -> None:
        self.shell.step("build", str(self.folder))
        if self.args.folder and self.folder.exists():
            raise Failed(f"--folder {self.folder} exists already")
        shutil.rmtree(self.folder, ignore_errors=True)
        committed = (self.root / "version.bzl").read_text()
        try:
            self.write_version(self.bump.VERSION.sub(f'VERSION = "{self.version}"', committed))
            command = [self.root / "ci" / "build.sh", "--release", self.folder]
            self.shell.run(command, cwd=self.root)
        finally:
            self.write_version(committed)
        (self.folder / record.NAME).unlink(missing_ok=True)  # it speaks of a changed version.bzl

    def write_version(self, text: str) -> None:
        """At once, so that a kill leaves one or the other, and nothing beside."""
        part = self.root / "out" / "nightly" / "version.bzl.part"
        part.write_text(text)
        part.replace(self.root / "version.bzl")

    def write_notes(self, before: str) -> pathlib.Path:
        path = self.folder / "notes.md"
        path.write_text(notes.nightly(self.checkout, self.version, self.commit, before))
        return path

    def publish(self, files: list[pathlib.Path]) -> None:
        self.shell.step("publish", TAG)
        github, release = self.github, self.github.release()
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


def version_in(folder: pathlib.Path) -> str:
    """The version of the wheels that a dry run left there."""
    names = [path.name for path in folder.glob("tiercel-*.whl")]
    versions = {name.split("-")[1] for name in names}
    if len(versions) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+\.dev\d{8}", min(versions)):
        raise Failed(f"{folder} does not hold the wheels of one nightly: {sorted(names)}")
    return versions.pop()


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
    parser.add_argument("--folder", type=pathlib.Path, help="default: out/nightly/VERSION")
    parser.add_argument("--publish", action="store_true", help="what --dry-run left in --folder")
    parser.add_argument("--without-gpu-run", action="store_true", help="whatever the GPU tests say")
    parser.add_argument("--gpu-minutes", type=float, default=150, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.publish and (args.dry_run or not args.folder):
        parser.error("--publish needs --folder, and is not for a dry run")
    if args.folder:
        args.folder = pathlib.Path(os.environ.get("BAZELW_INVOKED_FROM", "."), args.folder)
        args.folder = args.folder.absolute()
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
