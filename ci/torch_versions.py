#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the op layer's tests without a GPU on several versions of PyTorch; docs/pytorch-versions.md.

    ci/torch_versions.py WHEEL [--torch VERSION ...] [--write]

Each version comes from the package index with all that it needs (a CUDA build, 3 to 8 GB), into a
virtual environment of its own, which is deleted before the next. The wheel is of this commit. By
default the versions of docs/pytorch-versions.json; --write keeps what they gave there, beside what
others gave before, and renders the page.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from xml.etree import ElementTree

import figures

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "pytorch-versions.md", ROOT / "docs" / "pytorch-versions.json"
SCRIPT = "ci/torch_versions.py"
# Registration, backends, crossing into C++, each operator; and what users register themselves.
TESTS = ("api", "*/test_*_cpu.py", "plugins/test_load*.py", "plugins/test_register.py")


def test_files() -> list[str]:
    return sorted(str(path) for tests in TESTS for path in (ROOT / "tests").glob(tests))


def run(*command: str | pathlib.Path, **kwargs) -> subprocess.CompletedProcess:
    print(f"$ {' '.join(map(str, command))[:160]}", flush=True)
    return subprocess.run(list(map(str, command)), text=True, **kwargs)


def installed(folder: pathlib.Path, version: str, wheel: pathlib.Path) -> pathlib.Path:
    """The Python of a new environment with that PyTorch and the wheel."""
    run(sys.executable, "-m", "venv", folder, check=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--no-cache-dir", f"torch=={version}", "numpy", "pytest", "pyyaml", check=True)
    run(*pip, "--no-deps", wheel, check=True)
    return python


def counts(report: pathlib.Path) -> dict[str, int]:
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    found = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = found["failures"] + found["errors"]
    return {
        "passed": found["tests"] - failed - found["skipped"],
        "failed": failed,
        "skipped": found["skipped"],
    }


def measure(version: str, wheel: pathlib.Path) -> dict:
    with tempfile.TemporaryDirectory(prefix="tiercel-torch-") as name:
        folder = pathlib.Path(name)
        python = installed(folder / "venv", version, wheel)
        says = "import torch, platform; print(torch.__version__, platform.python_version())"
        said = run(python, "-c", says, stdout=subprocess.PIPE, check=True).stdout.split()
        command = [python, "-m", "pytest", "-q", "-c", "tests/pytest.ini", "--rootdir", "tests"]
        command += ["--import-mode=importlib", "-p", "no:cacheprovider"]
        run(*command, f"--junitxml={folder / 'report.xml'}", *test_files(), cwd=ROOT)
        tested = {"torch": said[0], "python": said[1], "tiercel": wheel.name.split("-")[1]}
        return tested | {"date": figures.machine()["date"]} | counts(folder / "report.xml")


def number(one: dict) -> tuple[int, ...]:
    """The numbers of a version: 2.11.0+cu130 is (2, 11, 0)."""
    return tuple(map(int, one["torch"].partition("+")[0].split(".")))


def rendered(versions: list[dict]) -> str:
    names = ("torch", "python", "tiercel", "date", "passed", "failed", "skipped")
    lines = [
        "| PyTorch | Python | Tiercel | date | passed | failed | skipped |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
        *(f"| {' | '.join(str(one[name]) for name in names)} |" for one in versions),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=pathlib.Path, help="the one of this Python")
    parser.add_argument("--torch", nargs="+", metavar="VERSION", help="these versions")
    parser.add_argument("--write", action="store_true", help="into docs/pytorch-versions.*")
    args = parser.parse_args()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    names = args.torch or [one["torch"].partition("+")[0] for one in before]
    measured = [measure(name, args.wheel.resolve()) for name in names]
    others = [one for one in before if number(one) not in map(number, measured)]
    found = sorted([*others, *measured], key=number)
    print(rendered(found))
    if args.write:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
        PAGE.write_text(figures.page(PAGE.read_text(), SCRIPT, rendered(found)))
    return int(any(one["failed"] for one in measured))


if __name__ == "__main__":
    sys.exit(main())
