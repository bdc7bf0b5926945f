# SPDX-License-Identifier: Apache-2.0
"""Every script of ci/ says how it is called, and does nothing else then."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).absolute().parents[2] / "ci").glob("*.sh"))
# What another script sources is no command of its own.
SOURCED = {
    name for path in SCRIPTS for name in re.findall(r"^source ci/([\w.]+)", path.read_text(), re.M)
}
COMMANDS = [path for path in SCRIPTS if path.name not in SOURCED]


def test_there_are_commands() -> None:
    assert {"build.sh", "release.sh", "test_gpu.sh"} <= {path.name for path in COMMANDS}
    assert "cache.sh" in SOURCED


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["first", "--help"]], ids=" ".join)
@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_help(path: Path, words: list[str], tmp_path: Path) -> None:
    # A copy: beside it is neither Bazel nor anything else that a script may start before it looks.
    ci = tmp_path / "ci"
    shutil.copytree(path.parent, ci)
    before = sorted(tmp_path.rglob("*"))
    result = subprocess.run(
        ["bash", ci / path.name, *words],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
    first, *_ = result.stdout.splitlines()
    assert first and "SPDX" not in first
    if path.name != "usage.sh":
        assert re.search(rf"^usage: .*ci/{re.escape(path.name)}\b", result.stdout, re.M)
    assert sorted(tmp_path.rglob("*")) == before
