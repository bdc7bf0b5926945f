# SPDX-License-Identifier: Apache-2.0
"""A Debian release as a folder, to build in as on another machine.

    debian_root.py ROOT SUITE PACKAGE...

unpacks the release's essential packages, apt, mount and the named ones, from the machine's own
mirror. No maintainer script runs, so it needs no rights. ROOT gets the machine's certificates and
the settings of apt, pip and its name servers.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import debs
import proc
import progress
from errors import SetupError, one_line

# Files of the machine without which the root reaches no mirror.
_FROM_HERE = (
    "etc/hosts",
    "etc/pip.conf",
    "etc/resolv.conf",
    "etc/ssl/certs/ca-certificates.crt",
    "etc/xdg/pip",
)


_BASE = ("?essential", "apt", "debian-archive-keyring", "mount")


def fetch(folder: Path, suite: str, packages: tuple) -> str:
    """Leaves the packages in `folder`; returns the mirror that has them."""
    apt = debs.Apt(folder / "apt", (*_BASE, *packages), ())
    apt.prepare()
    errors = []
    for mirror in debs.mirrors():
        apt.use(mirror, suite)
        result = apt.call("update")
        if result.returncode == 0:
            debs.download(apt, folder / "debs")
            return mirror
        errors.append(f"{mirror}: {one_line(result.stderr[-200:])}")
    raise SetupError(f"the packages of Debian {suite} could not be listed: {', '.join(errors)}")


def unpack(package: Path, root: Path) -> None:
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE
    ) as contents:
        tar = ["tar", "--extract", "--no-same-owner", "--keep-directory-symlink", "-C", root]
        done = proc.run(tar, stdin=contents.stdout)
    if done.returncode or contents.returncode:
        raise SetupError(f"{package.name} could not be unpacked: {one_line(done.stderr)}")


def configure(root: Path, mirror: str, suite: str) -> None:
    """Does what the maintainer scripts would have done, as far as a build needs it."""
    for name in ("passwd", "group"):
        shutil.copy(root / "usr/share/base-passwd" / f"{name}.master", root / "etc" / name)
    (root / "usr/bin/awk").symlink_to("mawk")
    (root / "var/lib/dpkg/status").touch()
    (root / "etc/apt/sources.list").write_text(f"deb {mirror} {suite} main\n")
    dump = proc.run(["apt-config", "dump"]).stdout
    (root / "etc/apt/apt.conf").write_text("".join(re.findall(r"^Acquire::.*\n", dump, re.M)))
    for name in _FROM_HERE:
        here, there = Path("/", name), root / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if here.is_dir():
            shutil.copytree(here, there)
        elif here.exists():
            shutil.copy(here, there)


def main() -> int:
    root, suite, *packages = sys.argv[1:]
    root = Path(root).absolute()
    root.mkdir(parents=True)
    try:
        scratch = root / "var/cache/root"
        mirror = fetch(scratch, suite, tuple(packages))
        files = sorted((scratch / "debs").iterdir())
        # The links /bin and /lib come with base-files.
        for package in sorted(files, key=lambda path: not path.name.startswith("base-files")):
            unpack(package, root)
        configure(root, mirror, suite)
        shutil.rmtree(scratch)
    except SetupError as error:
        progress.say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
