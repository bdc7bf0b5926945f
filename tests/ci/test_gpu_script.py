# SPDX-License-Identifier: Apache-2.0
"""ci/test_gpu.sh finds the GPU tests of this checkout with a wheel; no GPU takes part in that."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Under Bazel the checkout is where a file of it leads: all of its tests are collected.
MARKER = os.environ.get("WORKSPACE_MARKER")
ROOT = Path(MARKER).resolve().parent if MARKER else Path(__file__).absolute().parents[2]
WHEEL = Path(os.environ["WHEEL"]).absolute()
PIP = [str(Path(path).absolute()) for path in os.environ.get("PIP", "").split() if "/pip-" in path]


def run(root: Path, out: Path, *words: str) -> subprocess.CompletedProcess:
    # As on a GPU machine: nothing of what Bazel sets.
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "OUT": str(out)}
    if PIP:
        environment["PYTHONPATH"] = os.pathsep.join(PIP)
    return subprocess.run(
        ["bash", str(root / "ci" / "test_gpu.sh"), *map(str, words)],
        cwd=out.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> str:
    done = run(ROOT, tmp_path_factory.mktemp("collect") / "out", "--collect-only", WHEEL)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_all_gpu_tests_are_found(collected: str) -> None:
    assert int(re.search(r"^(\d+)/\d+ tests collected", collected, re.MULTILINE)[1]) > 3000
    files = {line.partition("::")[0] for line in collected.splitlines() if "::" in line}
    tests = ROOT / "tests"
    due = {
        path.relative_to(tests).as_posix()
        for path in tests.rglob("test_*.py")
        if re.search(r"^pytestmark.*mark\.gpu|^@pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
        and path.parent.name not in ("examples", "integrations")  # transformers is not there
    }
    assert due and due <= files


def test_the_sanitizers_see_every_family() -> None:
    marked = {
        path.parent.name
        for path in (ROOT / "tests").glob("*/test_*_gpu*.py")
        if "mark.sanitize" in path.read_text()
    }
    kernels = {path.parent.name for path in (ROOT / "kernels").glob("*/*contract.json")}
    assert kernels and kernels <= marked


def test_exceptions_are_of_tests_that_there_are(collected: str) -> None:
    ids = [line for line in collected.splitlines() if "::" in line]
    exceptions = json.loads((ROOT / "tools/sanitizer/exceptions.json").read_text())
    for entry in exceptions:
        assert any(re.search(entry["test"], test) for test in ids), entry


def test_one_that_cannot_be_collected_is_a_failure(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    for name in ("ci/test_gpu.sh", "ci/usage.sh", "tests/conftest.py", "tests/pytest.ini"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "tests" / "norm").mkdir()
    test = root / "tests" / "norm" / "test_norm_gpu.py"
    test.write_text("import os\n\nos.environ['TIERCEL_LIBCUDA']\n")
    done = run(root, tmp_path / "out", "--collect-only", WHEEL)
    assert done.returncode != 0
    assert "KeyError: 'TIERCEL_LIBCUDA'" in done.stdout


def test_wrong_words(tmp_path: Path) -> None:
    done = run(ROOT, tmp_path / "out", "--sanitise")
    assert done.returncode == 2
    assert done.stderr == "test_gpu: error: no such option: --sanitise (--help)\n"
    done = run(ROOT, tmp_path / "out", "a.whl", "b.whl")
    assert done.stderr == "test_gpu: error: one wheel, not both a.whl and b.whl\n"
    done = run(ROOT, tmp_path / "out", "nosuch.whl")
    assert done.stderr.endswith("nosuch.whl is no file\n")
