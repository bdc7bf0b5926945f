# SPDX-License-Identifier: Apache-2.0
"""Bazel's packages by apt's own resolver and signature checks, in an apt state of our own.

Nothing on the machine changes: apt gets a private state, cache and dpkg status, the machine's
mirror address and transport settings, and is only ever asked to download.
"""

import hashlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import proc
import progress
import recipe
from errors import SetupError, one_line

_DEBIAN_SUITES = {"stable", "oldstable", "testing", "unstable", "sid"}
_DEBIAN_SUITES |= {"bookworm", "trixie", "forky", "duke"}


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def keyring() -> str:
    for path in recipe.KEYRINGS:
        if os.path.exists(path):
            return path
    raise SetupError(
        "Debian's archive keys not found: install the package debian-archive-keyring"
        " (apt-get install debian-archive-keyring)"
    )


class Apt:
    """A private apt in `folder`, which is kept between runs so that a download goes on."""

    def __init__(self, folder: Path, packages=recipe.PACKAGES, left_out=recipe.LEFT_OUT):
        self.folder = folder
        self.archives = folder / "cache" / "archives"
        self.packages = packages
        self.left_out = left_out

    def prepare(self) -> None:
        for name in ("etc", "state/lists/partial", "cache/archives/partial", "cache/empty/partial"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "status").write_text("".join(map(_installed, self.left_out)))
        self._write_config()

    def _write_config(self) -> None:
        # The machine's transport settings (proxies, certificates, dates) hold here too; its hooks
        # do not, which is why its configuration is copied and not included.
        dump = proc.run(["apt-config", "dump"]).stdout.splitlines()
        lines = [line for line in dump if line.startswith("Acquire::")]
        etc = "/etc/apt"
        lines += [
            f'Dir::Etc "{self.folder}/etc";',
            f'Dir::Etc::netrc "{etc}/auth.conf";',
            f'Dir::Etc::netrcparts "{etc}/auth.conf.d";',
            f'Dir::State "{self.folder}/state";',
            f'Dir::State::status "{self.folder}/status";',
            f'Dir::Cache "{self.folder}/cache";',
            f'Dir::Log "{self.folder}/log";',
            f'APT::Architecture "{recipe.ARCHITECTURE}";',
            f'APT::Architectures "{recipe.ARCHITECTURE}";',
            'APT::Install-Recommends "false";',
            'APT::Sandbox::User "root";',
            'APT::Update::Error-Mode "any";',
            'Acquire::Languages "none";',
            'Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";',
            'Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";',
            'Acquire::http::Timeout "20";',
            'Acquire::https::Timeout "20";',
            'Acquire::Retries "1";',
        ]
        (self.folder / "apt.conf").write_text("\n".join(lines) + "\n")

    def _environment(self) -> dict:
        return proc.environment(APT_CONFIG=str(self.folder / "apt.conf"))

    def call(self, *arguments: str) -> subprocess.CompletedProcess:
        slow = "the Debian mirror" if arguments[0] == "update" else ""
        return proc.run(["apt-get", "-q", *arguments], env=self._environment(), slow=slow)

    def use(self, mirror: str, suite: str) -> None:
        line = f"deb [signed-by={keyring()}] {mirror} {suite} main\n"
        (self.folder / "etc" / "sources.list").write_text(line)

    def candidate(self) -> str:
        result = proc.run(["apt-cache", "policy", recipe.BAZEL_PACKAGE], env=self._environment())
        match = re.search(r"Candidate: (\S+)", result.stdout)
        return match.group(1) if match and match.group(1) != "(none)" else ""

    def plan(self) -> list:
        """[(file name, size)] of all packages that the resolver picked."""
        result = self.call(
            "install", "--yes", "--print-uris", "-q",
            "-o", f"Dir::Cache::archives={self.folder}/cache/empty/", *self.packages,
        )  # fmt: skip
        found = re.findall(r"^'[^']+' (\S+\.deb) (\d+) ", result.stdout, re.MULTILINE)
        if result.returncode != 0 or not found:
            raise SetupError(
                f"apt found no way to get {recipe.BAZEL_PACKAGE}: {_reason(result.stderr)}"
            )
        return [(name, int(size)) for name, size in found]

    def download(self, plan: list) -> None:
        """Downloads what is still missing, with progress; apt verifies every hash."""
        total = sum(size for _, size in plan)
        errors = self.folder / "download.log"
        bar = progress.Progress("fetching packages")
        with open(errors, "w") as log:
            child = proc.popen(
                ["apt-get", "-q", "install", "--yes", "--download-only", *self.packages],
                env=self._environment(),
                stdout=log,
                stderr=log,
            )
            try:
                while child.poll() is None:
                    bar.update(self._done(plan, total))
                    time.sleep(0.1)
            finally:
                bar.close()
                if child.poll() is None:
                    child.terminate()
                    child.wait()
        if child.returncode != 0:
            raise SetupError(f"the packages could not be fetched: {_reason(errors.read_text())}")
        bar.finish(self._done(plan, total))

    def _done(self, plan: list, total: int) -> str:
        wanted = {name for name, _ in plan}
        count = size = 0
        for folder in (self.archives, self.archives / "partial"):
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name in wanted:
                        try:
                            size += entry.stat().st_size
                        except FileNotFoundError:
                            continue  # moved out of partial/ meanwhile
                        count += folder == self.archives
        return (
            f"{count} of {len(plan)} packages,"
            f" {progress.megabytes(size)} of {progress.megabytes(total)} MB"
        )


def _installed(package: str) -> str:
    return (
        f"Package: {package}\nStatus: install ok installed\nArchitecture: all\n"
        "Maintainer: nobody\nVersion: 999:0\nDescription: left out\n\n"
    )


def _reason(text: str) -> str:
    """The first error (or else warning) that apt printed, without its prefix."""
    lines = text.splitlines()
    for mark in ("E: ", "W: "):
        for line in lines:
            if line.startswith(mark):
                if "No space left" in text:
                    return "the disk is full"
                return one_line(line[len(mark) :])
    return one_line(text[-300:]) or "apt said nothing"


def mirrors() -> list:
    """The addresses of Debian's main archive that apt on this machine is configured with."""
    # An empty state makes apt print what it would fetch from its sources, in whatever format
    # they are written.
    result = proc.run(["apt-get", "update", "--print-uris", "-o", "Dir::State::Lists=/nonexistent"])
    if not result.stdout:
        result = proc.run(["apt-get", "update", "--print-uris", "-o", "Debug::NoLocking=1"])
    bases = []
    for base, suite in re.findall(r"'([^']+?)/dists/([^/']+)/main/", result.stdout):
        if suite in _DEBIAN_SUITES and base not in bases:
            bases.append(base)
    if not bases:
        raise SetupError(
            "apt's sources on this machine name no Debian mirror (/etc/apt/sources.list,"
            " sources.list.d): add one, install bazelisk, or use ./bazelw --import-toolchain FILE"
        )
    return bases


def fetch(apt_folder: Path, target: Path) -> dict:
    """Fetches all packages into `target`; returns {"bazel": version, "suite": …, "package": …}."""
    apt = Apt(apt_folder)
    apt.prepare()
    rejected, failures = [], []
    for mirror in mirrors():
        for suite in recipe.SUITES:
            progress.say(f"reading the package lists of Debian {suite}")
            apt.use(mirror, suite)
            result = apt.call("update")
            if result.returncode != 0:
                failures.append(f"{mirror} {suite}: {_reason(result.stderr)}")
                if _unreachable(result.stderr):
                    break
                continue
            version = apt.candidate()
            if not recipe.version_fits(version):
                rejected.append(f"{suite} has {version or 'none'}")
                continue
            download(apt, target)
            return {"bazel": recipe.upstream_version(version), "suite": suite, "package": version}
    if rejected:
        raise SetupError(
            f"no fitting {recipe.BAZEL_PACKAGE}: {', '.join(rejected)}; the tested range is"
            f" {recipe.range_text()} (./bazelw --import-toolchain FILE takes a kept one)"
        )
    raise SetupError(
        f"could not fetch Bazel from the Debian mirror that apt is configured with: {failures[0]}"
    )


def _unreachable(stderr: str) -> bool:
    marks = ("resolving", "Could not connect", "Cannot initiate", "timed out", "Unable to connect")
    return any(mark in stderr for mark in marks)


def download(apt: Apt, target: Path) -> None:
    plan = apt.plan()
    try:
        apt.download(plan)
    except SetupError:
        # The mirror may have moved on between the lists and the packages: one more try.
        if apt.call("update").returncode != 0:
            raise
        plan = apt.plan()
        apt.download(plan)
    target.mkdir(parents=True, exist_ok=True)
    for name, size in plan:
        path = apt.archives / name
        if path.stat().st_size != size:
            raise SetupError(f"{name} is damaged: remove {apt.folder} and try again")
        shutil.move(path, target / name)
