# SPDX-License-Identifier: Apache-2.0
"""ci/'s scripts around a release: what reaches Bazel, and what does not."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path("tools/release").absolute()))

from shell import SECRETS

# Notes how it was called, its environment and its settings; `run --script_path` leaves a program.
BAZELW = """#!/bin/bash
set -eu
echo "$*" >>calls
env >environment
for word in "$@"; do
  case $word in
    --bazelrc=*) cp "${word#--bazelrc=}" settings ;;
    --script_path=*)
      printf '#!/bin/sh\\nenv >program\\necho "$@" >arguments\\nexit 7\\n' >"${word#*=}"
      chmod +x "${word#*=}" ;;
  esac
done
"""


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "checkout"
    (folder / "ci").mkdir(parents=True)
    for script in os.environ["SCRIPTS"].split():
        shutil.copy(script, folder / "ci" / pathlib.Path(script).name)
    (folder / "tools" / "release").mkdir(parents=True)
    shutil.copy("tools/release/record.py", folder / "tools" / "release" / "record.py")
    shutil.copy(os.environ["BAZELRC"], folder / ".bazelrc")
    (folder / ".bazelrc.user").write_text("build --copt=-DOURS_ALONE\n")
    (folder / "bazelw").write_text(BAZELW)
    (folder / "bazelw").chmod(0o755)
    (folder / "dist").mkdir()
    names = "/calls /environment /settings /program /arguments /dist/ /out/ .bazelrc.user"
    (folder / ".gitignore").write_text("\n".join(names.split()) + "\n")
    git = ["git", "-C", folder, "-c", "user.name=A", "-c", "user.email=a@example.com"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "One"], check=True)
    return folder


def call(root: pathlib.Path, script: str, *words: str, **env: str) -> subprocess.CompletedProcess:
    plain = {"PATH": os.environ["PATH"], "HOME": str(root.parent)}
    command = ["bash", root / "ci" / script, *words]
    return subprocess.run(command, cwd=root, env=plain | env, capture_output=True, text=True)


@pytest.mark.parametrize("script", ["release.sh", "nightly.sh"])
def test_secrets_reach_the_program_and_not_bazel(root: pathlib.Path, script: str) -> None:
    secrets = {name: f"secret-{n}" for n, name in enumerate(SECRETS)}
    result = call(root, script, "0.1.0", "--dry-run", **secrets)
    assert result.returncode == 7, result.stderr  # as the program ended
    seen = (root / "environment").read_text()
    assert "secret-" not in seen and "TIERCEL_BAZEL_MODE=airgap" in seen
    program = (root / "program").read_text()
    assert all(f"{name}={value}" in program for name, value in secrets.items())
    assert (root / "arguments").read_text() == "0.1.0 --dry-run\n"
    assert f"BAZELW_INVOKED_FROM={root}" in program
    call(root, script, TIERCEL_BAZEL_MODE="registry")
    assert "TIERCEL_BAZEL_MODE=registry" in (root / "environment").read_text()


def test_a_release_is_built_with_committed_settings(root: pathlib.Path) -> None:
    mine = {"TIERCEL_REMOTE_CACHE": "http://cache", "TIERCEL_DISK_CACHE": "/cache"}
    mine |= {"BAZEL_CXXOPTS": "-DOURS_ALONE", "CC": "/opt/ours/gcc", "CPATH": "/opt/ours"}
    result = call(root, "build.sh", "--release", "dist", **mine)
    assert result.returncode == 0, result.stderr
    options = "--nosystem_rc --nohome_rc --noworkspace_rc"
    for line in (root / "calls").read_text().splitlines():
        assert line.startswith(f"{options} --bazelrc={root}/out/release.bazelrc "), line
    settings = (root / "settings").read_text()
    assert "build --compilation_mode=opt" in settings and ".bazelrc.airgap" in settings
    assert not re.search(r"^try-import .*[.](user|ci)$", settings, re.MULTILINE)
    seen = (root / "environment").read_text()
    assert not [name for name in mine if f"{name}=" in seen]
    assert not (root / ".bazelrc.ci").exists()
    assert json.loads((root / "dist" / "build.json").read_text())["settings"] == "committed"


def test_any_other_build_says_so(root: pathlib.Path) -> None:
    result = call(root, "build.sh", "dist", TIERCEL_DISK_CACHE="/cache")
    assert result.returncode == 0, result.stderr
    assert "rc" not in (root / "calls").read_text()
    assert json.loads((root / "dist" / "build.json").read_text())["settings"] != "committed"


def test_the_settings_that_a_release_leaves_out_are_all_there_are() -> None:
    """A new import in .bazelrc is either the toolchain's or left out in ci/build.sh."""
    imports = re.findall(
        r"^(?:try-)?import (.*)$", pathlib.Path(os.environ["BAZELRC"]).read_text(), re.M
    )
    names = [pathlib.PurePath(path).name for path in imports]
    assert sorted(names) == [".bazelrc.airgap", ".bazelrc.ci", ".bazelrc.user"]


def test_bazelisk_is_held_to_the_version_that_is_asked_for() -> None:
    text = pathlib.Path(os.environ["BAZELISKRC"]).read_text()
    version = pathlib.Path(os.environ["BAZELVERSION"]).read_text().strip()
    assert re.search(r"^BAZELISK_VERIFY_SHA256=[0-9a-f]{64}$", text, re.M)
    assert f"Bazel {version} " in text, "another version has another hash"


def test_the_cache_keeps_what_was_used(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    made = (root / "ci" / "trim_cache.sh").stat().st_mtime
    for name, time in {"before": made - 9, "since": made + 9}.items():
        (tmp_path / "cache" / "cas").mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / "cas" / name).touch()
        os.utime(tmp_path / "cache" / "cas" / name, (time, time))
    result = call(root, "trim_cache.sh", TIERCEL_DISK_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr
    assert [path.name for path in (tmp_path / "cache" / "cas").iterdir()] == ["since"]
    assert "TIERCEL_DISK_CACHE" in call(root, "trim_cache.sh").stderr
