# SPDX-License-Identifier: Apache-2.0
"""Finds the machine's Python interpreters, one per version in MODULE.bazel's PYTHON_VERSIONS.

`python3 tools/airgap/pythons.py [VERSION…]` prints JSON: {version: {executable, include, …}}.
"""

import ast
import glob
import json
import os
import pwd
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VERSIONS_FILE = Path(__file__).resolve().parents[2] / "MODULE.bazel"

# Runs in the interpreter that is looked at.
_PROBE = """
import importlib.util as u, json, os, sys, sysconfig
paths = sysconfig.get_paths()
include = paths["include"]
json.dump({
    "executable": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "version": "%d.%d" % sys.version_info[:2],
    "full_version": "%d.%d.%d" % sys.version_info[:3],
    "implementation": sys.implementation.name,
    "abi_flags": getattr(sys, "abiflags", ""),
    "ext_suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    "base_prefix": sys.base_prefix,
    "virtual": sys.prefix != sys.base_prefix,
    "include": include,
    "platinclude": paths["platinclude"],
    "stdlib": paths["stdlib"],
    "has_headers": os.path.exists(os.path.join(include, "Python.h")),
    "has_venv": all(u.find_spec(name) for name in ("venv", "ensurepip")),
    "has_pip": u.find_spec("pip") is not None,
}, sys.stdout)
"""


def wanted_versions(path: Path = VERSIONS_FILE) -> list:
    """PYTHON_VERSIONS of the Starlark file, whose syntax Python shares."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "PYTHON_VERSIONS":
            return ast.literal_eval(node.value)
    raise ValueError(f"{path} defines no PYTHON_VERSIONS")


def _home() -> str:
    return os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir


def _candidates(version: str) -> list:
    """Paths that may be that Python, the likeliest first."""
    name = f"python{version}"
    folders = [part for part in os.environ.get("PATH", "").split(os.pathsep) if part]
    folders += ["/usr/bin", "/usr/local/bin"]
    found = [os.path.join(folder, name) for folder in folders]
    home = _home()
    pyenv = os.environ.get("PYENV_ROOT") or os.path.join(home, ".pyenv")
    found += _newest_first(f"{pyenv}/versions/{version}.*/bin/{name}")
    uv = os.environ.get("UV_PYTHON_INSTALL_DIR")
    if not uv:
        data = os.environ.get("XDG_DATA_HOME") or os.path.join(home, ".local", "share")
        uv = os.path.join(data, "uv", "python")
    found += _newest_first(f"{uv}/cpython-{version}.*/bin/{name}")
    found += [os.path.join(folder, "python3") for folder in folders]
    seen = {}
    for path in found:
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            seen.setdefault(path, True)
    return list(seen)


def _newest_first(pattern: str) -> list:
    def numbers(path):
        return [int(part) for part in re.findall(r"\d+", path[len(pattern.split("*")[0]) :])]

    return sorted(glob.glob(pattern), key=numbers, reverse=True)


def probe(path: str):
    """What the interpreter at `path` says of itself, or None when it does not run."""
    try:
        # A shim answers only outside of a folder that selects another version.
        result = subprocess.run(
            [path, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=20, cwd="/"
        )
        return json.loads(result.stdout) if result.returncode == 0 else None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _score(info: dict) -> tuple:
    return (info["has_headers"], info["has_venv"])


def find(version: str):
    """The best interpreter of `version` (one with headers and venv, if any), or None."""
    best, seen = None, set()
    for path in _candidates(version):
        info = probe(path)
        if info and info["virtual"]:
            info = probe(info["executable"])  # the build wants the interpreter below the venv
        if not info or info["executable"] in seen:
            continue
        seen.add(info["executable"])
        if (info["version"], info["implementation"], info["abi_flags"]) != (version, "cpython", ""):
            continue
        if best is None or _score(info) > _score(best):
            best = info
        if all(_score(best)):
            break
    return best


def find_all(versions=None) -> dict:
    versions = wanted_versions() if versions is None else versions
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(versions, pool.map(find, versions), strict=True))


def missing_line(version: str) -> str:
    return (
        f"Python {version} not found on this machine (looked in PATH, pyenv and uv):"
        f" install it, for example by `pyenv install {version}` or `uv python install {version}`"
    )


def headers_line(info: dict) -> str:
    version, executable = info["version"], info["executable"]
    return (
        f"Python.h of {executable} not found: install the package python{version}-dev"
        f" (apt-get install python{version}-dev)"
    )


def venv_line(info: dict) -> str:
    version, executable = info["version"], info["executable"]
    return (
        f"venv and ensurepip of {executable} not found: install the package python{version}-venv"
        f" (apt-get install python{version}-venv)"
    )


def problem(version: str, info) -> str:
    """Why the build cannot use that interpreter, as one line; empty when it can."""
    if info is None:
        return missing_line(version)
    if not info["has_headers"]:
        return headers_line(info)
    return "" if info["has_venv"] else venv_line(info)


def main() -> int:
    """Versions given as arguments must be there; without any, a missing one is null."""
    asked = sys.argv[1:]
    found = find_all(asked or None)
    problems = [problem(version, info) for version, info in found.items()]
    if asked and any(problems):
        print("\n".join(filter(None, problems)), file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
