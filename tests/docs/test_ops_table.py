# SPDX-License-Identifier: Apache-2.0
"""README's table of ops is the one that the declarations give."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(os.environ.get("README", Path(__file__).parents[2] / "README.md")).absolute()
ROOT = README.parent
SPEC = Path("python/tiercel/ops/transpose/spec.py")
PAGE = Path("docs/kernels/copy_transpose.md")


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, root / "ci" / "ops_table.py", *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path):
    """A copy of what the table is made of."""
    for folder in ("ci", "docs/kernels", "python/tiercel"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=lambda *_: ["__pycache__"])
    shutil.copy(README, tmp_path)
    return tmp_path


def test_the_table_is_up_to_date():
    done = run(ROOT)
    assert done.returncode == 0, done.stderr


def test_a_changed_declaration_changes_its_row(tree):
    spec, readme = tree / SPEC, tree / "README.md"
    before = readme.read_text().splitlines()
    spec.write_text(
        spec.read_text().replace("    check=_check,\n", '    check=_check, limits="few",\n')
    )
    assert run(tree).returncode == 1 and readme.read_text().splitlines() == before
    assert run(tree, "--write").returncode == 0
    changed = set(readme.read_text().splitlines()) ^ set(before)
    assert len(changed) == 2 and all("[`copy_transpose`]" in line for line in changed)
    assert run(tree).returncode == 0


def test_an_op_without_a_page(tree):
    (tree / PAGE).unlink()
    done = run(tree)
    assert done.returncode == 1
    assert "copy_transpose lacks a page in docs/kernels whose title names it" in done.stderr
