# SPDX-License-Identifier: Apache-2.0
"""docs/fast-builds.md has the figures that ci/fast_builds.py measured, and no others."""

import json
import pathlib
import re
import sys

import pytest

sys.path.insert(0, str(pathlib.Path("tools/lint").absolute()))

import workspace

ROOT = workspace.root()
sys.path.insert(0, str(ROOT / "ci"))

import fast_builds
import figures
import first_compile
import torch_versions


@pytest.mark.parametrize("script", [fast_builds, first_compile, torch_versions])
def test_the_page_has_the_committed_figures(script) -> None:
    text = script.PAGE.read_text()
    content = script.rendered(json.loads(script.RESULTS.read_text()))
    assert figures.page(text, script.SCRIPT, content) == text, f"run {script.SCRIPT} --write"


def test_a_first_compile_is_5_times_faster_than_pytorchs_and_kept() -> None:
    found = json.loads(first_compile.RESULTS.read_text())
    (first, _), (again, _) = found["took"][first_compile.WAYS[0]]
    assert min(found["ratios"]) >= 5 and first < 4 and again < 0.05


def test_the_op_layer_passes_on_the_oldest_pytorch() -> None:
    versions = json.loads(torch_versions.RESULTS.read_text())
    assert torch_versions.number(versions[0]) == (2, 9, 1)
    assert all(one["passed"] > 500 and not one["failed"] for one in versions)


def test_a_page() -> None:
    took = {"a": {"seconds": 1.25, "cpu_seconds": 2.0}, "b": {"seconds": 0.5}}
    found = {"cpus": 2, "cpu": "x", "nvcc": "CUDA 13.0", "date": "2026-01-02"}
    content = fast_builds.rendered(found | {"load": 0.1, "took": took})
    assert "| a | 1.25 | 2.00 |" in content and "| b | 0.50 |  |" in content
    begin = "<!-- figures: begin (written by x.py --write; do not edit) -->"
    text = figures.page(f"before\n{begin}\nold\n<!-- figures: end -->\nafter\n", "x.py", content)
    assert content in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("after\n")
    assert figures.page(text, "x.py", content) == text
    with pytest.raises(AssertionError, match=r"markers of x\.py"):
        figures.page("nothing", "x.py", content)


def test_times_are_of_the_clock_and_of_the_cpus() -> None:
    busy = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    took = fast_builds.run([sys.executable, "-c", busy], [sys.executable, "-c", busy])
    assert took["cpu_seconds"] >= 0.4 and took["seconds"] >= 0.2
    with pytest.raises(SystemExit, match="false"):
        fast_builds.run(["false"])


def test_doctor_names_the_dsl_that_the_build_takes() -> None:
    checks = (ROOT / "python/tiercel/workbench/doctor/checks.py").read_text()
    lock = (ROOT / "tools/python/locks/cute.lock").read_text()
    version = re.search(r'^DSL = "(.+)"$', checks, re.M)[1]
    assert f"nvidia-cutlass-dsl=={version} " in lock
