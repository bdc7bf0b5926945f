# SPDX-License-Identifier: Apache-2.0
"""Registry mode or air-gapped mode: whichever works here, unless TIERCEL_BAZEL_MODE says."""

import os
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

import proc
import progress
from errors import SetupError

REGISTRY = "https://bcr.bazel.build/bazel_registry.json"
PROBE_SECONDS = 3
# How long an answer of the probe counts; bazelw has the same number.
REMEMBERED_SECONDS = 86400


def choose(root: Path, wanted_version: str) -> tuple:
    """("registry", program) or ("airgap", "")."""
    forced = os.environ.get("TIERCEL_BAZEL_MODE", "")
    if forced == "airgap":
        return "airgap", ""
    if forced not in ("", "registry"):
        raise SetupError(f"TIERCEL_BAZEL_MODE is `{forced}`: it can be registry or airgap")
    program = shutil.which("bazelisk") or shutil.which("bazel")
    if forced == "registry":
        if not program:
            raise SetupError("registry mode needs bazelisk (or Bazel) on PATH: none was found")
        return "registry", program
    if not program:
        return "airgap", ""
    return _remembered(root, program) or _probe(root, program, wanted_version)


def _remembered(root: Path, program: str):
    try:
        name, when, said = (root / "mode").read_text().strip().split("|")
        fresh = 0 <= time.time() - int(when) < REMEMBERED_SECONDS
    except (OSError, ValueError):
        return None
    if not fresh or said != program:
        return None
    return name, program if name == "registry" else ""


def _probe(root: Path, program: str, wanted_version: str) -> tuple:
    fits = registry_answers() and _fits(program, wanted_version)
    name = "registry" if fits else "airgap"
    progress.say(
        f"{name} mode, remembered for a day (TIERCEL_BAZEL_MODE=registry|airgap overrides)"
    )
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "mode").write_text(f"{name}|{int(time.time())}|{program}\n")
    except OSError:
        pass  # only a memory
    return name, program if fits else ""


def registry_answers() -> bool:
    try:
        with urllib.request.urlopen(REGISTRY, timeout=PROBE_SECONDS) as answer:
            return answer.status == 200
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _fits(program: str, wanted_version: str) -> bool:
    if os.path.basename(program) == "bazelisk":
        return True
    # A `bazel` may be bazelisk under another name, which then fetches the right one first.
    result = proc.run([program, "--version"], timeout=180)
    return result.stdout.split()[-1:] == [wanted_version]
