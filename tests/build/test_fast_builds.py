# SPDX-License-Identifier: Apache-2.0
"""docs/fast-builds.md has the figures that ci/fast_builds.py measured, and no others."""

import importlib.util
import json
import pathlib
import re
import sys

import pytest

sys.path.insert(0, str(pathlib.Path("tools/lint").absolute()))

import workspace

ROOT = workspace.root()
spec = importlib.util.spec_from_file_location("fast_builds", ROOT / "ci" / "fast_builds.py")
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)


def test_the_page_has_the_committed_figures() -> None:
    figures = json.loads((ROOT / "docs/fast-builds.json").read_text())
    text = (ROOT / "docs/fast-builds.md").read_text()
    assert program.page(text, figures) == text, "run ci/fast_builds.py --write"


def test_a_page() -> None:
    took = {"a": {"seconds": 1.25, "cpu_seconds": 2.0}, "b": {"seconds": 0.5}}
    figures = {"cpus": 2, "cpu": "x", "nvcc": "CUDA 13.0", "date": "2026-01-02"}
    figures |= {"load": 0.1, "took": took}
    text = program.page(f"before\n{program.BEGIN}\nold\n{program.END}\nafter\n", figures)
    assert "| a | 1.25 | 2.00 |" in text and "| b | 0.50 |  |" in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("after\n")
    assert program.page(text, figures) == text
    with pytest.raises(AssertionError, match="markers"):
        program.page("nothing", figures)


def test_times_are_of_the_clock_and_of_the_cpus() -> None:
    busy = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    took = program.run([sys.executable, "-c", busy], [sys.executable, "-c", busy])
    assert took["cpu_seconds"] >= 0.4 and took["seconds"] >= 0.2
    with pytest.raises(SystemExit, match="false"):
        program.run(["false"])


def test_doctor_names_the_dsl_that_the_build_takes() -> None:
    checks = (ROOT / "python/tiercel/doctor/checks.py").read_text()
    lock = (ROOT / "tools/python/locks/cute.lock").read_text()
    version = re.search(r'^DSL = "(.+)"$', checks, re.M)[1]
    assert f"nvidia-cutlass-dsl=={version} " in lock
