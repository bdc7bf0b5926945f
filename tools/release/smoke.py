# SPDX-License-Identifier: Apache-2.0
"""Installs a released version in a fresh environment of each Python and tries it."""

import json
import os
import pathlib
import subprocess
import tempfile

from shell import Failed, Shell

_VERSION = "import tiercel; print(tiercel.__version__)"
_REQUIRED = """
import importlib.metadata, json
from pip._vendor.packaging.requirements import Requirement
required = [Requirement(r) for r in importlib.metadata.requires("tiercel") or ()]
print(json.dumps([str(r) for r in required if not r.marker or r.marker.evaluate({"extra": ""})]))
"""


class Environment:
    """A virtual environment that knows nothing of the user's settings or packages."""

    def __init__(self, python: str, pip: pathlib.Path, folder: pathlib.Path, shell: Shell) -> None:
        self.shell, self.pip, self.folder = shell, pip.absolute(), folder
        subprocess.run(
            [pathlib.Path(python).absolute(), "-I", "-m", "venv", "--without-pip", folder],
            check=True,
            env=shell.environment(),
        )
        self.python = folder / "bin" / "python"

    def install(self, *options: str, plain: bool) -> None:
        """pip install; `plain` without any configuration of the machine, so nowhere else."""
        env = self.shell.environment({"PYTHONPATH": str(self.pip)})
        if plain:
            env = {k: v for k, v in env.items() if not k.startswith("PIP_") or k == "PIP_CERT"}
            env["PIP_CONFIG_FILE"] = os.devnull
        command = [self.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        command += ["--only-binary=:all:", "--no-cache-dir", "--no-compile", *options]
        self.shell.run(command, env=env, cwd=self.folder)

    def run(self, *words: str) -> str:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "NO_COLOR": "1"}
        result = subprocess.run(
            [self.folder / "bin" / words[0], *words[1:]],
            capture_output=True,
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=300,
        )
        if result.returncode:
            raise Failed(f"{' '.join(words)} failed: {result.stderr.strip() or result.stdout}")
        return result.stdout

    def required(self) -> list[str]:
        """What the installed package needs of others: nothing, today."""
        command = [self.python, "-c", _REQUIRED]
        env = {"PYTHONPATH": str(self.pip), "HOME": str(self.folder)}
        result = subprocess.run(command, capture_output=True, check=True, env=env, text=True)
        return json.loads(result.stdout)


def try_out(environment: Environment, version: str) -> str:
    """A line on what ran; Failed where the installed wheel does not do what it should."""
    found = environment.run("python", "-I", "-W", "error", "-c", _VERSION).strip()
    if found != version:
        raise Failed(f"the installed tiercel is {found}, expected {version}")
    doctor = json.loads(environment.run("tiercel", "doctor", "--json"))
    if doctor["tiercel"] != version:
        raise Failed(f"tiercel doctor is of {doctor['tiercel']}, expected {version}")
    kernels = json.loads(environment.run("tiercel", "kernels", "--json"))
    count = len(kernels["kernels"] if isinstance(kernels, dict) else kernels)
    if not count:
        raise Failed("tiercel kernels lists none")
    return f"Python {doctor['python'].split()[0]}: tiercel {found}, {count} kernels"


def smoke(
    pythons: list[str],
    pip: pathlib.Path,
    version: str,
    wheels: dict[str, str],
    source: list[str],
    shell: Shell,
) -> None:
    """Each Python installs its wheel from `source` (pip options), by the hash of what was built."""
    with tempfile.TemporaryDirectory(prefix="tiercel-release-") as scratch:
        lock = pathlib.Path(scratch) / "requirements.txt"
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in wheels.values())
        lock.write_text(f"tiercel=={version} {hashes}\n")
        for number, python in enumerate(pythons):
            environment = Environment(python, pip, pathlib.Path(scratch) / str(number), shell)
            options = ["--quiet", "--no-deps", "--require-hashes", *source, "-r", str(lock)]
            environment.install(*options, plain=True)
            # Never from the same place: anybody may upload a name there.
            if required := environment.required():
                environment.install("--quiet", *required, plain=False)
            shell.say(try_out(environment, version))
