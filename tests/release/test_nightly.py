# SPDX-License-Identifier: Apache-2.0
"""A nightly, whole: the real gh talks to a local stand-in of the part of GitHub's API it needs."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path("tests/release").absolute()))

from nightly_wheels import write_wheels
from scratch import VERSION, Checkout, Releaser

TAG = "tiercel-nightly"
SITES = [pathlib.Path(path) for path in sys.path if path.endswith("_site")]
GH = next(site / "bin" / "gh" for site in SITES if (site / "bin" / "gh").is_file())
SECRET = "gh-secret"


class GitHub:
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder / "github"
        self.folder.mkdir()
        config = folder / "gh"
        config.mkdir()
        # Relative to the checkout, where gh runs: a socket's path has 107 bytes at most.
        (config / "config.yml").write_text("http_unix_socket: ../gh.sock\n")
        self.env = {"GH_CONFIG_DIR": str(config), "GH_PROGRAM": str(GH), "GH_TOKEN": SECRET}
        self.env["GH_REPO"] = "someone/tiercel"
        program = str(pathlib.Path("tests/release/github_server.py").absolute())
        self.process = subprocess.Popen(
            [sys.executable, program, "gh.sock", str(self.folder)],
            cwd=folder,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout.readline() == b"ready\n"

    @property
    def state(self) -> dict:
        return json.loads((self.folder / "state.json").read_text())

    @property
    def release(self) -> dict:
        (release,) = [r for r in self.state["releases"] if not r["draft"]]
        return release

    @property
    def files(self) -> dict[str, bytes]:
        """What a user could download now."""
        folder = self.folder / "assets"
        return {a["name"]: (folder / str(a["id"])).read_bytes() for a in self.release["assets"]}

    def fail(self, request: str, number: int) -> None:
        """The number-th of such requests from now on gets an error."""
        count = number + self.state["requests"].count(request)
        (self.folder / "fail").write_text(f"{request} {count}")


class Nightly(Releaser):
    """ci/nightly.sh's program."""

    def __init__(self, checkout: Checkout, home: pathlib.Path, github: GitHub) -> None:
        super().__init__(checkout, home, whole=False)
        self.env |= github.env
        self.program, self.arguments = "tools/release/nightly.py", []


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> Checkout:
    found = Checkout(tmp_path / "checkout")
    build = found.root / "ci" / "build.sh"
    write_wheels(found.root / "ci" / "make_wheels.py")
    build.write_text(f'#!/bin/sh\nexec {sys.executable} ci/make_wheels.py "$@"\n')
    (found.root / "benchmarks").mkdir()
    page = "Read me.\n<!-- results: begin (do not edit) -->\n| op | ms |\n<!-- results: end -->\n"
    (found.root / "benchmarks" / "README.md").write_text(page)
    found.commit("A second")
    return found


@pytest.fixture
def github(tmp_path: pathlib.Path) -> Iterator[GitHub]:
    found = GitHub(tmp_path)
    yield found
    found.process.kill()
    found.process.wait()


@pytest.fixture
def nightly(checkout: Checkout, github: GitHub, tmp_path: pathlib.Path) -> Nightly:
    return Nightly(checkout, tmp_path / "home", github)


def passes(nightly: Nightly, date: str, *options: str, **env: str) -> str:
    code, text = nightly.run("--date", date, *options, **env)
    assert code == 0, text
    return text


def usable(github: GitHub, date: str) -> None:
    """The notes name a version of which all files are there."""
    version = f"{VERSION}.dev{date}"
    assert f"`{version}`, a nightly build" in github.release["body"]
    names = [name for name in github.files if version in name]
    assert len([name for name in names if name.endswith(".whl")]) == 4
    assert f"tiercel-{version}.SHA256SUMS" in names


def test_first_and_later_nights(checkout: Checkout, github: GitHub, nightly: Nightly) -> None:
    first = checkout.git("rev-parse", "HEAD")
    text = passes(nightly, "20260101")
    usable(github, "20260101")
    release = github.release
    assert release["prerelease"] and release["tag_name"] == TAG
    assert github.state["tags"] == {TAG: first}
    assert "- A second (" in release["body"] and "| op | ms |" in release["body"]
    assert "Read me" not in release["body"]
    assert text.count(f"tiercel {VERSION}.dev20260101, ") == 1

    second = checkout.commit("Something new")
    passes(nightly, "20260102")
    usable(github, "20260102")
    assert github.state["tags"] == {TAG: second}
    body = github.release["body"]
    assert f"## Since {first[:12]}" in body and "Something new" in body and "A second" not in body
    passes(nightly, "20260103")
    assert "Nothing." in github.release["body"]
    nights = {name.partition(".dev")[2][:8] for name in github.files}
    assert nights == {"20260102", "20260103"}, "two nights are kept"
    assert checkout.git("status", "--porcelain") == ""
    assert not [r for r in github.state["requests"] if r.startswith("UNKNOWN")]
    seen = "\n".join(nightly.command_lines)
    assert SECRET not in seen and SECRET not in text and "gh release upload" in seen
    assert SECRET not in (checkout.root / "out" / "environment").read_text()


def test_a_failure_leaves_the_last_night(
    checkout: Checkout, github: GitHub, nightly: Nightly
) -> None:
    passes(nightly, "20260101")
    before = github.files
    for request, number in (("POST assets", 3), ("PATCH move_tag", 1), ("PATCH edit", 1)):
        github.fail(request, number)
        code, text = nightly.run("--date", "20260102")
        assert code == 1 and "nightly: error: " in text, text
        usable(github, "20260101")
        assert before.items() <= github.files.items()
    # By now all is uploaded, and not again.
    (github.folder / "fail").unlink()
    count = github.state["requests"].count("POST assets")
    passes(nightly, "20260102")
    usable(github, "20260102")
    assert github.state["requests"].count("POST assets") == count


def test_killed_at_each_step(checkout: Checkout, github: GitHub, nightly: Nightly) -> None:
    nightly.kill_when("^nightly: step publish", "--date", "20260101")
    nightly.kill_when(r"^\+ .*release create", "--date", "20260101")
    passes(nightly, "20260101")
    before = github.files
    for line in ("step build", "step audit", "step install", "step publish"):
        nightly.kill_when(f"^nightly: {line}", "--date", "20260102")
        usable(github, "20260101")
    nightly.kill_when("^building", "--date", "20260102")
    assert ".dev" in (checkout.root / "version.bzl").read_text()
    nightly.kill_when(r"^\+ .*release upload", "--date", "20260102")
    usable(github, "20260101")
    assert before.items() <= github.files.items()
    passes(nightly, "20260102")
    usable(github, "20260102")
    drafts = [release for release in github.state["releases"] if release["draft"]]
    assert not drafts and ".dev" not in (checkout.root / "version.bzl").read_text()


RUN = {"head_branch": "main", "html_url": "https://github.com/someone/tiercel/actions/runs/7"}


def test_the_gpu_tests_have_to_have_passed(
    checkout: Checkout, github: GitHub, nightly: Nightly
) -> None:
    runs = github.folder / "gpu_runs.json"
    failed = RUN | {"status": "completed", "conclusion": "failure"}
    passed = RUN | {"status": "completed", "conclusion": "success"}
    for known, error in (
        ([failed], f"failed: {RUN['html_url']}; --without-gpu-run goes on without"),
        ([], "have not run (gpu.yml); --without-gpu-run goes on without"),
        ([passed | {"head_branch": "another"}], "have not run"),
        ([RUN | {"status": "in_progress", "conclusion": None}], "still run"),
    ):
        runs.write_text(json.dumps(known))
        code, text = nightly.run("--date", "20260101", "--gpu-minutes", "0.01")
        assert code == 1 and error in text, text
        assert "step build" not in text and github.state["releases"] == []
    runs.write_text(json.dumps([failed]))
    passes(nightly, "20260101", "--without-gpu-run")
    # A rerun that passed counts, and one that passes while we wait.
    runs.write_text(json.dumps([failed, passed]))
    passes(nightly, "20260102")
    runs.write_text(json.dumps([RUN | {"status": "queued", "conclusion": None}]))
    process = nightly.start("--date", "20260103", "--gpu-minutes", "1")
    for line in process.stdout:
        if f"waiting for the GPU tests: {RUN['html_url']}" in line:
            runs.write_text(json.dumps([passed]))
    assert process.wait() == 0
    process.stdin.close()
    usable(github, "20260103")


def test_gpu_run_script(checkout: Checkout, github: GitHub, nightly: Nightly) -> None:
    command = [sys.executable, pathlib.Path("tools/release/gpu_run.py").absolute()]
    wait = [*command, "--minutes", "0.01"]
    options = {"cwd": checkout.root, "env": nightly.env, "capture_output": True, "text": True}
    result = subprocess.run(wait, **options)
    assert result.returncode == 0 and "the GPU tests passed: " in result.stdout
    (github.folder / "gpu_runs.json").write_text("[]")
    result = subprocess.run([*wait, "0" * 40], **options)
    assert result.returncode == 1 and f"{'0' * 12} have not run" in result.stdout


def test_gh_is_looked_for_before_the_build(checkout: Checkout, nightly: Nightly) -> None:
    code, text = nightly.run("--date", "20260101", GH_PROGRAM="/nowhere/gh")
    assert code == 1 and "gh is not installed" in text and "step build" not in text
    passes(nightly, "20260101", "--dry-run")


def test_one_job_builds_and_another_publishes(
    checkout: Checkout, github: GitHub, nightly: Nightly, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "dist"
    passes(nightly, "20260101", "--dry-run", "--folder", str(folder), GH_PROGRAM="/nowhere/gh")
    assert github.state["releases"] == []
    code, text = nightly.run("--date", "20260101", "--folder", str(folder))
    assert code == 1 and "exists already" in text
    # The job that publishes has nothing of Bazel's, and may begin after midnight.
    for name in ("AUDIT", "PYTHONS", "TEST_WHEELS", "PYTHONPATH"):
        nightly.env.pop(name, None)
    (wheel, *_) = sorted(folder.glob("*.whl"))
    built = wheel.read_bytes()
    wheel.write_bytes(built + b"more")
    code, text = nightly.run("--publish", "--folder", str(folder))
    assert code == 1 and f"{wheel.name} in {folder}: not what was audited there" in text
    wheel.write_bytes(built)
    passes(nightly, "20260102", "--publish", "--folder", str(folder))
    usable(github, "20260101")
    assert github.files[wheel.name] == built


def test_next_version(checkout: Checkout, nightly: Nightly) -> None:
    """After a release the nightly is of the one to come."""
    checkout.git("tag", f"v{VERSION}")
    major, minor, patch = VERSION.split(".")
    text = passes(nightly, "20260101", "--dry-run")
    assert f"dry run of {major}.{minor}.{int(patch) + 1}.dev20260101 passed" in text


def test_what_is_refused(checkout: Checkout, github: GitHub, nightly: Nightly) -> None:
    code, text = nightly.run("--date", "20261301")
    assert code == 2 and "expected YYYYMMDD" in text
    (checkout.root / "left_over.py").write_text("")
    code, text = nightly.run("--date", "20260101")
    assert code == 1 and "the tree is dirty" in text
    (checkout.root / "left_over.py").unlink()
    code, text = nightly.run("--date", "20260101", GH_TOKEN="wrong")
    assert code == 1 and "gh release view: " in text and "wrong" not in text
    assert github.state["releases"] == []


def test_the_toolchain_joins_its_release(github: GitHub, tmp_path: pathlib.Path) -> None:
    root = tmp_path / "checkout"  # gh looks for its socket beside it
    (root / "ci").mkdir(parents=True)
    for name in ("toolchain.sh", "usage.sh"):
        shutil.copy(pathlib.Path("ci") / name, root / "ci" / name)
    bazelw = root / "bazelw"
    bazelw.write_text('#!/bin/sh\necho "$TIERCEL_BAZEL_MODE $1" >called\necho Bazel >"$2"\n')
    bazelw.chmod(0o755)

    def call(*words: str) -> subprocess.CompletedProcess:
        command = ["bash", root / "ci" / "toolchain.sh", *words]
        env = os.environ | github.env
        return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)

    assert call("out").returncode == 0
    assert (root / "called").read_text() == "airgap --export-toolchain\n"
    (root / "out" / "toolchain.tar").write_text("Bazel, damaged\n")
    assert call("--attach", VERSION, "out").returncode == 1
    assert github.state["releases"] == []
    assert call("out").returncode == 0
    for _ in range(2):  # the second finds the release, and replaces what it has
        result = call("--attach", VERSION, "out")
        assert result.returncode == 0, result.stderr
        assert github.release["tag_name"] == f"v{VERSION}" and not github.release["prerelease"]
        assert github.files["toolchain.tar"] == b"Bazel\n"
        assert github.files["toolchain.tar.sha256"].endswith(b"  toolchain.tar\n")
