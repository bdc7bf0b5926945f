# SPDX-License-Identifier: Apache-2.0
"""The table of docs/numerics.md is the one that the declarations give."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

README = Path(os.environ.get("README", Path(__file__).parents[2] / "README.md")).absolute()
ROOT = README.parent
SPEC = Path("python/tiercel/ops/transpose/spec.py")


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, root / "ci" / "numerics_table.py", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_table_is_up_to_date():
    done = run(ROOT)
    assert done.returncode == 0, done.stderr


def test_a_changed_declaration_changes_its_row(tmp_path):
    for folder in ("ci", "docs", "python/tiercel"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=lambda *_: ["__pycache__"])
    spec, page = tmp_path / SPEC, tmp_path / "docs" / "numerics.md"
    before = page.read_text().splitlines()
    text = spec.read_text()
    assert "numerics=Numerics(0)" in text
    spec.write_text(text.replace("Numerics(0)", "Numerics(2**-20)"))
    assert run(tmp_path).returncode == 1 and page.read_text().splitlines() == before
    assert run(tmp_path, "--write").returncode == 0
    changed = set(page.read_text().splitlines()) ^ set(before)
    assert len(changed) == 2 and any("2^-20 of the result" in line for line in changed)
    spec.write_text(text.replace("    numerics=Numerics(0),\n", ""))
    done = run(tmp_path)
    assert done.returncode == 1 and "copy_transpose lacks `numerics`" in done.stderr
