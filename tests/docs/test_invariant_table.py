# SPDX-License-Identifier: Apache-2.0
"""The costs in docs/numerics.md are those of the committed records."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(os.environ.get("README", Path(__file__).parents[2] / "README.md")).absolute()
ROOT = README.parent
RUN = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11",
    "commit": "0123456789abcdef",
    "command": "tiercel bench",
}


def run(root, *words):
    command = [sys.executable, root / "ci" / "invariant_table.py", *words]
    return subprocess.run(command, capture_output=True, text=True)


def record(op, case, impl, ms, **given):
    times = {"op": op, "case": case, "impl": impl, "ms_median": ms}
    return {**RUN, **times, "dtype": "bfloat16", "timing": "graph", "status": "ok", **given}


@pytest.fixture
def tree(tmp_path):
    for folder in ("ci", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=lambda *_: ["__pycache__"])

    def with_records(*records):
        folder = tmp_path / "benchmarks" / "invariant"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "NVIDIA_H200.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return tmp_path

    return with_records


def test_the_table_is_up_to_date():
    done = run(ROOT)
    assert done.returncode == 0, done.stderr


def test_ratios(tree):
    root = tree(
        record("copy", "64 MB", "torch", 1.0),
        record("reduce", "1x5", "tiercel", 0.004),
        record("reduce", "1x5", "tiercel:invariant", 0.005),
        record("reduce", "9x5", "tiercel", 0.25),
        record("reduce", "9x5", "tiercel:invariant", 1.0),
        record("reduce", "9x5", "tiercel", 7.0, timing="host"),
        record("softmax", "1", "tiercel", 0.1),
    )
    assert run(root).returncode == 1
    assert run(root, "--write").returncode == 0
    assert run(root).returncode == 0
    page = (root / "docs" / "numerics.md").read_text()
    assert "commit 0123456789ab: `tiercel bench`" in page
    assert "| reduce | 2 | 1.25 | 2.24 | 4.00 |" in page
    assert "| reduce | 1x5 | bfloat16 | 4.00 | 5.00 | 1.25 |" in page
    assert "| reduce | 9x5 | bfloat16 | 250 | 1000 | 4.00 |" in page
    assert "| softmax | 1 |" not in page


def test_a_failure_makes_no_table(tree):
    root = tree(record("reduce", "1x5", "tiercel", None, status="wrong"))
    done = run(root, "--write")
    assert done.returncode == 1 and "reduce 1x5: wrong" in done.stderr
