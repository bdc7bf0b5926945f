# SPDX-License-Identifier: Apache-2.0
"""`pip install .`: the PEP 517 and PEP 660 backend, which has Bazel build for the running Python.

pip install . --config-settings arch=sm_90a --config-settings debug=true
pip install . --config-settings bazel=--disk_cache=FOLDER        (any option of bazel build)
"""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

_HERE = pathlib.Path(__file__).resolve()
ROOT = _HERE.parents[2]
sys.path.insert(0, str(_HERE.parent))

import editable
import progress
import sdist

LOG = ROOT / "out" / "pip.log"
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


class BuildError(SystemExit):
    def __init__(self, text: str) -> None:
        super().__init__(f"tiercel: error: {text}")


def _flag(key: str, value) -> bool:
    if value in _TRUE or value in _FALSE:
        return value in _TRUE
    raise BuildError(f"--config-settings {key}={value}: expected true or false")


def architectures() -> list[str]:
    """The architectures that kernels can be built for: tools/cuda/archs.bzl."""
    text = (ROOT / "tools" / "cuda" / "archs.bzl").read_text()
    return sorted(ast.literal_eval(re.search(r"^ARCHS = (\{.*?\})", text, re.M | re.S)[1]))


def _architecture(value) -> str:
    if value not in architectures():
        raise BuildError(
            f"--config-settings arch={value}: expected {' or '.join(architectures())}, the kernels"
            " are written for nothing else"
        )
    return value


def shows_progress(settings: dict | None) -> bool:
    return _flag("progress", (settings or {}).get("progress", "true"))


def bazel_options(settings: dict | None) -> list[str]:
    """What --config-settings ask for, as options of bazel build."""
    options = []
    for key, value in (settings or {}).items():
        if key == "arch":
            options.append(f"--//tools:arch={_architecture(value)}")
        elif key == "debug":
            options += ["--config=debug"] if _flag(key, value) else []
        elif key == "lineinfo":
            options += ["--//tools/cuda:lineinfo"] if _flag(key, value) else []
        elif key == "bazel":
            options += [value] if isinstance(value, str) else list(value)
        elif key == "progress":
            _flag(key, value)
        elif key not in ("editable_mode",):  # setuptools' own, which pip may pass on
            raise BuildError(
                f"--config-settings {key}: expected one of arch, bazel, debug, lineinfo, progress"
            )
    return options


def _environment() -> dict[str, str]:
    """The environment without what pip or uv set for this build alone.

    Their Python, first on PATH, has no pip; the build looks for the machine's.
    """
    env = dict(os.environ)
    for key in ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "VIRTUAL_ENV", "PIP_BUILD_TRACKER"):
        env.pop(key, None)
    own = [pathlib.Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
    own += [pathlib.Path(p) for p in (os.environ.get("VIRTUAL_ENV"),) if p]

    def ours(folder: str) -> bool:
        path = pathlib.Path(folder)
        return "pip-build-env-" in folder or any(path == p or p in path.parents for p in own)

    kept = [
        folder for folder in env.get("PATH", "").split(os.pathsep) if folder and not ours(folder)
    ]
    env["PATH"] = os.pathsep.join(kept or ["/usr/local/bin", "/usr/bin", "/bin"])
    return env


def _build(options: list[str], target: str, show: bool) -> None:
    """bazelw build; how far it is shows on the terminal also where pip hides what we print."""
    if sys.stderr.isatty():
        _bazelw("build", *options, target)
        return
    command = [str(ROOT / "bazelw"), "build", *options, target]
    if code := progress.run(command, log=LOG, show=show, cwd=ROOT, env=_environment()):
        raise BuildError(f"{' '.join(command)} failed ({code}), see above or {LOG}")


def _bazelw(*words: str, capture: bool = False) -> str:
    command = [str(ROOT / "bazelw"), *words]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    if result.returncode:
        raise BuildError(f"{' '.join(command)} failed ({result.returncode}), see above")
    return result.stdout or ""


def _built(settings: dict | None) -> pathlib.Path:
    """The wheel for the running Python."""
    supported = sdist.supported_pythons(ROOT)
    running = "{}.{}".format(*sys.version_info[:2])
    if running not in supported or sysconfig.get_platform() != "linux-x86_64":
        raise BuildError(
            f"Python {running} on {sysconfig.get_platform()} is not supported: expected"
            f" {', '.join(supported)} on linux-x86_64"
        )
    target = f"//python:wheel_cp{running.replace('.', '')}"
    options = bazel_options(settings)
    _build(options, target, shows_progress(settings))
    listed = _bazelw("cquery", *options, "--output=files", target, capture=True).split()
    wheels = [ROOT / path for path in listed if path.endswith(".whl")]
    if len(wheels) != 1 or not wheels[0].is_file():
        raise BuildError(f"{target} has built {listed}, expected one wheel")
    return wheels[0]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    wheel = _built(config_settings)
    out = pathlib.Path(wheel_directory) / wheel.name
    shutil.copyfile(wheel, out)
    return out.name


def build_editable(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    wheel = _built(config_settings)
    return editable.write(ROOT, wheel, pathlib.Path(wheel_directory))


def build_sdist(sdist_directory, config_settings=None) -> str:
    return sdist.write(ROOT, pathlib.Path(sdist_directory))
