# SPDX-License-Identifier: Apache-2.0
"""ci/bump.py changes the version and the changelog together, or nothing."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(os.environ["BUMP"])
spec = importlib.util.spec_from_file_location("bump", SOURCE)
bump = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bump)

CHANGELOG = """\
# Changelog

## [Unreleased]

To become 0.2.0.

### Added

- A thing.

## [0.1.0] - 2026-01-02

- The first.
"""


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "bump.py").write_bytes(SOURCE.read_bytes())
    (tmp_path / "version.bzl").write_text('"""The version."""\n\nVERSION = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "README.md").write_text("pip install dist/tiercel-0.1.0-cp312-x.whl\n")
    return tmp_path


def run(root: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, root / "ci" / "bump.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def state(root: pathlib.Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in root.iterdir() if path.is_file()}


def test_bump(root: pathlib.Path) -> None:
    result = run(root, "--date", "2026-03-04", "0.2.0")
    assert result.returncode == 0, result.stderr
    assert (root / "version.bzl").read_text() == '"""The version."""\n\nVERSION = "0.2.0"\n'
    assert "tiercel-0.2.0-cp312" in (root / "README.md").read_text()
    assert (root / "CHANGELOG.md").read_text() == CHANGELOG.replace(
        "To become 0.2.0.\n\n", "\n## [0.2.0] - 2026-03-04\n\n"
    ).replace("]\n\n\n##", "]\n\n##")
    assert run(root, "--check", "0.2.0").returncode == 0
    assert len(state(root)) == 3


def test_twice(root: pathlib.Path) -> None:
    assert run(root, "0.2.0").returncode == 0
    before = state(root)
    result = run(root, "0.2.0")
    assert result.returncode == 1 and "0.2.0 does not come after 0.2.0" in result.stderr
    assert state(root) == before


def test_first_release(root: pathlib.Path) -> None:
    """The version is there already, the changelog's section is not."""
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- All of it.\n")
    assert run(root, "--date", "2026-03-04", "0.1.0").returncode == 0
    expected = "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-03-04\n\n- All of it.\n"
    assert (root / "CHANGELOG.md").read_text() == expected


@pytest.mark.parametrize(
    ("version", "error"),
    [
        ("0.0.9", "0.0.9 does not come after 0.1.0"),
        ("0.1.0rc1", "does not come after"),
        ("v0.2.0", "'v0.2.0' is no version"),
        ("0.2", "'0.2' is no version"),
        ("0.2.00", "is no version"),
        ("0.2.0.dev20260101", "is no version"),
        ("", "is no version"),
    ],
)
def test_versions_that_are_refused(root: pathlib.Path, version: str, error: str) -> None:
    before = state(root)
    result = run(root, version)
    assert result.returncode == 1 and error in result.stderr
    assert state(root) == before


def test_a_changelog_with_nothing_new(root: pathlib.Path) -> None:
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("- A thing.\n", ""))
    before = state(root)
    result = run(root, "0.2.0")
    assert result.returncode == 1 and "nothing is listed under [Unreleased]" in result.stderr
    assert state(root) == before


def test_check(root: pathlib.Path) -> None:
    result = run(root, "--check", "0.2.0")
    assert result.returncode == 1 and "version.bzl says 0.1.0, not 0.2.0" in result.stderr
    assert run(root, "--check", "0.1.0").returncode == 0
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## [0.1.0]\n\n- A.\n")
    assert "no dated section [0.1.0]" in run(root, "--check", "0.1.0").stderr


def test_order() -> None:
    versions = ["0.2.0a1", "0.2.0b1", "0.2.0rc1", "0.2.0rc2", "0.2.0", "0.2.1", "0.10.0", "1.0.0"]
    shuffled = [*versions[3:], *versions[:3]]
    assert sorted(shuffled, key=bump.order) == versions


def test_what_cannot_be_written_changes_nothing(root: pathlib.Path, monkeypatch) -> None:
    before = state(root)

    def full(*_args, **_kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(bump.os, "chmod", full)
    with pytest.raises(OSError, match="No space"):
        bump.bump(root, "0.2.0", "2026-03-04")
    assert state(root) == before


def test_this_repository() -> None:
    text = pathlib.Path(os.environ["CHANGELOG"]).read_text()
    date, unreleased = bump.section(text, "Unreleased")
    assert date == "" and (unreleased or bump.section(text, os.environ["VERSION"])[0])
