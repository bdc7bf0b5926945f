# SPDX-License-Identifier: Apache-2.0
"""Releases a version: `ci/release.sh VERSION [--dry-run]`. docs/releasing.md tells the whole.

Each step looks at what is there before it does anything, so the command can be run again after
whatever went wrong: it goes on where it stopped, and does nothing when all is done.
"""

import argparse
import fcntl
import os
import pathlib
import subprocess
import sys

import record
from checkout import Checkout
from github import GitHub
from index import Index
from shell import Failed, Shell
from smoke import smoke
from wheels import Copies, Passed


class Release:
    def __init__(self, root: pathlib.Path, args: argparse.Namespace, shell: Shell) -> None:
        self.root, self.args, self.shell, self.version = root, args, shell, args.version
        self.checkout, self.github = Checkout(root, shell), GitHub(root, shell)
        self.folder = args.wheels or root / "out" / "release" / args.version / "wheels"
        self.test_index, self.index = Index.test(), Index.production()
        self.commit = ""
        self.copies: Copies
        self.ours: dict[str, str] = {}

    def run(self) -> None:
        self.check()
        self.build()
        if self.args.only:
            getattr(self, f"only_{self.args.only}")()
            return
        self.audit()
        if self.args.dry_run:
            source = ["--no-index", "--find-links", str(self.copies.folder)]
            self.try_out("install", "from the folder", source)
            self.say_what_is_there()
            self.shell.say(f"dry run of {self.version} passed: nothing was uploaded or tagged")
            return
        if self.index.missing(self.ours, self.version):
            self.gpu_tests()
            self.upload_to_test_index()
            self.try_out_test_index()
            self.upload()
        else:
            self.shell.say(f"the index has {self.version} already, with these contents")
        self.tag()

    def only_install(self) -> None:
        """A job of its own, after another one uploaded: it needs no credentials."""
        self.test_index.wait_for(self.ours, self.version)
        self.try_out_test_index()

    def only_tag(self) -> None:
        self.index.wait_for(self.ours, self.version)
        self.tag()

    def check(self) -> None:
        self.shell.step("check", f"version {self.version}")
        self.commit = self.checkout.require_ready(self.version)
        self.shell.say(f"{self.version} is commit {self.commit}")
        if not self.args.dry_run and self.args.only != "install":
            self.checkout.require_can_tag(self.args.remote, f"v{self.version}", self.commit)
        if not (self.args.dry_run or self.args.only or self.args.without_gpu_run):
            self.github.require_for_gpu_runs()

    def gpu_tests(self) -> None:
        self.shell.step("gpu-tests", "a run of them that has passed at this commit")
        if self.args.without_gpu_run:
            self.shell.say("not asked for: --without-gpu-run")
            return
        self.github.wait_for_gpu_run(self.commit, self.args.gpu_minutes)

    def build(self) -> None:
        self.shell.step("build", str(self.folder))
        if self.folder.exists():
            if problem := record.problem(self.folder, self.commit):
                raise Failed(f"{problem}; remove the folder, or check the other commit out")
            self.shell.say("the wheels are there")
        elif self.args.wheels:
            raise Failed(f"{self.folder} does not exist")
        else:
            # What is built is moved there whole, or not at all.
            part = self.folder.with_name("wheels.part")
            subprocess.run(["rm", "-rf", part], check=True)
            command = [self.root / "ci" / "build.sh", "--release", part]
            self.shell.run(command, cwd=self.root, timeout=36000)
            if problem := record.problem(part, self.commit):
                raise Failed(problem)
            part.rename(self.folder)
        self.copies = Copies(self.folder)
        self.ours = self.copies.hashes
        for name in self.ours:
            if not name.startswith(f"tiercel-{self.version}-"):
                raise Failed(f"{name} is not of version {self.version}")

    def audit(self) -> None:
        self.shell.step("audit", "ci/audit.sh")
        file = self.root / "out" / "release" / self.version / "audited.json"
        passed = Passed(file, self.commit, self.copies)
        if passed:
            self.shell.say("these wheels passed before")
            return
        command = [sys.executable, os.environ["AUDIT"], "--version", self.version]
        env = self.shell.environment({"PYTHONPATH": os.environ["PYTHONPATH"]})
        fails = "the audit failed, see above"
        self.shell.run([*command, self.copies.folder], env=env, fails=fails)
        self.copies.keep()
        file.parent.mkdir(parents=True, exist_ok=True)
        passed.write()

    def upload_to_test_index(self) -> None:
        self.shell.step("test-upload", self.test_index.repository)
        if missing := self.test_index.missing(self.ours, self.version):
            self.send(self.test_index, missing)
        self.test_index.wait_for(self.ours, self.version)

    def send(self, index: Index, names: list[str]) -> None:
        self.copies.require_unchanged()
        index.upload(self.copies.folder, names, self.shell)

    def try_out_test_index(self) -> None:
        source = ["--index-url", self.test_index.simple_address]
        self.try_out("install", "from the test index", source)

    def try_out(self, step: str, text: str, source: list[str]) -> None:
        self.shell.step(step, f"{text}, in a fresh environment of each Python")
        pythons, pip = os.environ["PYTHONS"].split(), pip_wheel()
        smoke(pythons, pip, self.version, self.ours, source, self.shell)

    def upload(self) -> None:
        self.shell.step("upload", self.index.repository)
        missing = self.index.missing(self.ours, self.version)
        self.ask(f"Upload {len(missing)} files of {self.version} to {self.index.repository}?")
        if self.checkout.dirty() or self.checkout.commit() != self.commit:
            raise Failed("the checkout changed in the meantime")
        self.send(self.index, missing)
        self.index.wait_for(self.ours, self.version)

    def ask(self, question: str) -> None:
        if self.args.yes:
            return
        sys.stdout.write(f"{question} It cannot be undone. Type the version to go on: ")
        sys.stdout.flush()
        if sys.stdin.readline().strip() != self.version:
            raise Failed("not confirmed: nothing was uploaded to the index")

    def tag(self) -> None:
        tag = f"v{self.version}"
        self.shell.step("tag", tag)
        if not self.checkout.tagged(tag):
            self.checkout.git("tag", "-a", tag, "-m", f"Tiercel {self.version}", self.commit)
        remote = self.args.remote
        if remote in self.checkout.git("remote").split():
            there = self.checkout.tagged_remotely(remote, tag)
            if not there:
                self.shell.run(["git", "push", remote, f"refs/tags/{tag}"], cwd=self.root)
        self.shell.say(f"{self.version} is released: {tag} is {self.commit}")

    def say_what_is_there(self) -> None:
        """A dry run needs no index; where one answers, a version that it has is an error."""
        for index in (self.test_index, self.index):
            try:
                there = index.files(self.version, timeout=5)
            except Failed as error:
                self.shell.say(f"not asked: {error}")
                continue
            if any(self.ours.get(name) != digest for name, digest in there.items()):
                index.missing(self.ours, self.version)
            self.shell.say(f"the {index.title} has {len(there)} files of {self.version}")


def pip_wheel() -> pathlib.Path:
    wheels = [pathlib.Path(path) for path in os.environ["TEST_WHEELS"].split()]
    return next(path for path in wheels if path.name.startswith("pip-"))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ci/release.sh", description=__doc__.splitlines()[0])
    parser.add_argument("version", help="the version that version.bzl and CHANGELOG.md say")
    parser.add_argument("--dry-run", action="store_true", help="all but uploads and the tag")
    parser.add_argument("--yes", action="store_true", help="do not ask before the upload")
    parser.add_argument("--wheels", type=pathlib.Path, help="a folder that ci/build.sh filled")
    parser.add_argument("--remote", default="origin", help="where the tag goes (default: origin)")
    parser.add_argument("--only", choices=("install", "tag"), help="that step, of --wheels")
    parser.add_argument("--without-gpu-run", action="store_true", help="whatever the GPU tests say")
    parser.add_argument("--gpu-minutes", type=float, default=150, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.only and (args.dry_run or not args.wheels):
        parser.error(f"--only {args.only} needs --wheels, and is not for a dry run")
    root = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    if args.wheels:
        args.wheels = pathlib.Path(os.environ.get("BAZELW_INVOKED_FROM", "."), args.wheels)
    folder = root / "out" / "release"
    shell = Shell(folder / f"{pathlib.Path(args.version).name}.log")
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Release(root, args, shell).run()
        except BlockingIOError:
            shell.say("error: another release runs in this checkout")
            return 1
        except Failed as error:
            shell.say(f"error: {error}")
            return 1
        except KeyboardInterrupt:
            shell.say("interrupted: the same command goes on from here")
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
