# SPDX-License-Identifier: Apache-2.0
"""Everything that would stop the set-up or the first build, before anything is fetched."""

import importlib.util
import os
import platform
import shutil
from pathlib import Path

import debs
import progress
import pythons
import recipe
from errors import SetupError

_OTHER_WAYS = "install bazelisk, or set up by ./bazelw --import-toolchain FILE"


def check(store, *, fetching: bool) -> None:
    """Raises SetupError at the first thing that is missing; `fetching` when mirrors are needed."""
    check_machine()
    if fetching:
        check_debian()
        check_pip()
    check_pythons()
    check_disk(store.base)


def check_machine() -> None:
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in ("x86_64", "amd64"):
        raise SetupError(
            f"without a Bazel registry only Linux on x86_64 is supported, this is"
            f" {platform.system()} on {machine}: install bazelisk"
        )


def os_release(path: str = "/etc/os-release") -> dict:
    values = {}
    try:
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition("=")
            values[key] = value.strip("\"'")
    except OSError:
        pass
    return values


def check_debian() -> None:
    for program in ("apt-get", "apt-cache", "apt-config"):
        if not shutil.which(program):
            raise SetupError(f"{program} not found, so this is no Debian: {_OTHER_WAYS}")
    check_dpkg()
    release = os_release()
    version = release.get("VERSION_ID", "")
    if release.get("ID") == "debian" and version.isdigit() and int(version) < 12:
        raise SetupError(f"Debian {version} is too old, Debian 12 or newer is needed")
    debs.keyring()


def check_dpkg() -> None:
    if not shutil.which("dpkg-deb"):
        raise SetupError("dpkg-deb not found, so this is no Debian: install bazelisk")


def check_pip() -> None:
    if importlib.util.find_spec("pip") is None:
        raise SetupError(
            "pip not found: install the package python3-pip (apt-get install python3-pip)"
        )


def check_pythons() -> None:
    """A missing interpreter is a warning: what needs it fails by itself. The rest is an error."""
    for version, info in pythons.find_all().items():
        problem = pythons.problem(version, info)
        if info is not None and problem:
            raise SetupError(problem)
        if problem:
            progress.say(f"warning: {problem}")


def check_disk(folder: Path) -> None:
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        raise SetupError(f"{folder} cannot be written: set TIERCEL_CACHE to a folder that can")
    free = shutil.disk_usage(folder).free // 1_000_000
    if free < recipe.DISK_NEEDED_MB:
        raise SetupError(
            f"the disk is full: {folder} has {free} MB free, setting up Bazel needs"
            f" {recipe.DISK_NEEDED_MB} MB (TIERCEL_CACHE names another folder)"
        )
