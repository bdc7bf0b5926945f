# SPDX-License-Identifier: Apache-2.0
"""What needs Bazel is skipped by plain pytest, with the command that runs it; by Bazel never."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).absolute().parents[1]
NEEDY = "import os\nimport nosuch\n\nos.environ['NOSUCH']\n\ndef test_it():\n    pass\n"


@pytest.fixture
def collect(tmp_path):
    """pytest's collection of a tree: ({path: text}, environment) -> exit code, output."""

    def collect(files, **environment):
        root = tmp_path / "checkout"
        shutil.rmtree(root, ignore_errors=True)
        for path, text in files.items():
            (root / "tests" / path).parent.mkdir(parents=True, exist_ok=True)
            (root / "tests" / path).write_text(text)
        for name in ("conftest.py", "pytest.ini"):
            shutil.copy(TESTS / name, root / "tests" / name)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"]
        done = subprocess.run(
            [*command, "--collect-only", "-q"],
            cwd=root,
            env={"PATH": os.environ["PATH"], **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    return collect


PLACES = {
    "build/test_a.py": ("$TEST_SRCDIR", "//tests/build/..."),
    "cute/test_a.py": ("$CUTE_SITE", "//tests/cute/..."),
    "deploy/test_deploy.py": ("$WHEEL", "//tests/deploy:deploy_test"),
    "emulator/test_a.py": ("$TIERCEL_LIBCUDA", "//tests/emulator/..."),
    "emulator/tensor/test_a.py": ("$EMULATOR_PROBE", "//tests/emulator/tensor/..."),
    "packaging/test_a.py": ("$TEST_SRCDIR", "//tests/packaging/..."),
    "release/test_a.py": ("$TEST_SRCDIR", "//tests/release/..."),
    "routing/test_sorting_networks.py": (
        "kernels/routing/sorting.cuh",
        "//tests/routing:test_sorting_networks",
    ),
}


def test_it_is_skipped_and_the_reason_says_how_it_runs(collect) -> None:
    plain = {
        "norm/test_a.py": "def test_it():\n    pass\n",
        "cache/test_a.py": "def test_it(): 0\n",
    }
    code, output = collect(plain | dict.fromkeys(PLACES, NEEDY))
    assert code == 0, output
    assert "2 tests collected" in output and "error" not in output
    for thing, targets in PLACES.values():
        assert re.search(
            rf"^SKIPPED \[\d\] .*: needs {re.escape(thing)} of its Bazel target: "
            rf"\./bazelw test {re.escape(targets)}$",
            output,
            re.MULTILINE,
        ), (thing, output)


@pytest.mark.parametrize("variable", ["TEST_SRCDIR", "TIERCEL_LIBCUDA"])
def test_under_bazel_or_with_what_it_needs_it_is_not(collect, variable) -> None:
    files = {"norm/test_a.py": "def test_it():\n    pass\n", "emulator/test_a.py": NEEDY}
    code, output = collect(files, **{variable: "there"})
    assert code == 2
    assert "No module named 'nosuch'" in output and "SKIPPED" not in output


def test_what_needs_nothing_is_an_error_where_it_is_broken(collect) -> None:
    code, output = collect({"norm/test_a.py": "import os\n\nos.environ['NOSUCH']\n"})
    assert code == 2 and "KeyError: 'NOSUCH'" in output
