# SPDX-License-Identifier: Apache-2.0
"""The CI jobs: valid, pinned, with few permissions, and nothing but calls of ci/'s scripts."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

FILES = [pathlib.Path(path) for path in os.environ["WORKFLOWS"].split()]
SCRIPTS = {pathlib.Path(path).name for path in os.environ["SCRIPTS"].split()}
# Events that run with this repository's rights on what strangers wrote.
UNTRUSTED = {"pull_request", "pull_request_target", "workflow_run", "issue_comment", "issues"}
MAY_WRITE = {
    ("nightly", "publish"): {"contents"},
    ("release", "test-upload"): {"id-token"},
    ("release", "publish"): {"attestations", "id-token"},
    ("release", "tag"): {"contents"},
}
MAY_READ = {("nightly", "publish"): {"actions"}, ("release", "gpu"): {"actions", "contents"}}
PUBLISH = "pypa/gh-action-pypi-publish"
# What such a job may call: git, gh and Python alone.
WITHOUT_BAZEL = {
    "nightly.sh --publish",
    "release.sh --only tag",
    "gpu_run.sh",
    "toolchain.sh --attach",
}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> pathlib.Path:
    return request.param


@pytest.fixture
def workflow(path: pathlib.Path) -> dict:
    return YAML(typ="safe").load(path.read_text())


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_are_these() -> None:
    assert {path.stem for path in FILES} == {"canary", "gpu", "nightly", "push", "release"}


def check(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "check_jsonschema", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_published_schema(tmp_path: pathlib.Path) -> None:
    schema = ("--builtin-schema", "vendor.github-workflows")
    result = check(*schema, *map(str, FILES))
    assert result.returncode == 0, result.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(FILES[0].read_text().replace("runs-on:", "run-on:"))
    assert check(*schema, str(wrong)).returncode == 1


def test_actions_are_pinned_by_commit(path: pathlib.Path) -> None:
    used = re.findall(r"^ *-? *uses: *(.*)$", path.read_text(), re.MULTILINE)
    assert used
    for action in used:
        name = rf"(actions/[\w-]+|{PUBLISH})"
        assert re.fullmatch(rf"{name}@[0-9a-f]{{40}} # v\d+\.\d+\.\d+", action), action


def test_one_version_of_each_action() -> None:
    text = "".join(path.read_text() for path in FILES)
    used = set(re.findall(r"uses: *(\S+)", text))
    assert len(used) == len({action.partition("@")[0] for action in used})


def test_least_permissions(path: pathlib.Path, workflow: dict) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        granted = job.get("permissions", {})
        written = {scope for scope, level in granted.items() if level == "write"}
        assert written == MAY_WRITE.get((path.stem, name), set()), name
        assert set(granted) - written == MAY_READ.get((path.stem, name), set()), name
        assert job["timeout-minutes"] <= 180


def test_images_are_pinned() -> None:
    images = {
        job["container"]
        for path in FILES
        for job in YAML(typ="safe").load(path.read_text())["jobs"].values()
        if "container" in job
    }
    (image,) = images  # one for all: what the canary builds with every week, releases do too
    assert re.fullmatch(r"debian:12@sha256:[0-9a-f]{64}", image)


def test_jobs_with_rights_run_nothing_that_was_fetched(path: pathlib.Path, workflow: dict) -> None:
    for name, job in workflow["jobs"].items():
        if (path.stem, name) not in MAY_WRITE | MAY_READ:
            continue
        assert "container" not in job, name
        for step in job["steps"]:
            words = step.get("run", "").split()
            if words:
                command = " ".join(words).removeprefix("ci/").replace('"$VERSION" ', "")
                assert any(command.startswith(allowed) for allowed in WITHOUT_BAZEL), command


def test_what_is_uploaded_has_attestations() -> None:
    release = YAML(typ="safe").load(next(p for p in FILES if p.stem == "release").read_text())
    jobs = release["jobs"]
    uploads = {
        name: step["with"]
        for name, job in jobs.items()
        for step in job["steps"]
        if step.get("uses", "").startswith(f"{PUBLISH}@")
    }
    assert set(uploads) == {"test-upload", "publish"}
    for name, options in uploads.items():
        assert options["attestations"] is True and "password" not in options, name
        assert jobs[name]["permissions"]["id-token"] == "write"
        # Publishes what the build made, and does nothing else.
        assert [step for step in jobs[name]["steps"] if "run" in step] == []
        (taken,) = [s["with"] for s in jobs[name]["steps"] if "download-artifact" in s["uses"]]
        assert taken == {"name": "wheels", "path": "dist"}
    assert jobs["publish"]["environment"] == "release"
    # In this order, so that nothing goes up that was not tried, nor was the GPU tests' failure.
    needs = {name: job.get("needs") for name, job in jobs.items()}
    assert needs == {
        "build": None,
        "gpu": None,
        "test-upload": ["build", "gpu"],
        "install": "test-upload",
        "publish": "install",
        "tag": "publish",
    }


def test_a_release_has_the_toolchain_that_built_it() -> None:
    release = YAML(typ="safe").load(next(p for p in FILES if p.stem == "release").read_text())
    build, tag = (
        [s.get("run", "") for s in release["jobs"][job]["steps"]] for job in ("build", "tag")
    )
    assert build.index("ci/toolchain.sh out/toolchain") > build.index("ci/build.sh --release dist")
    commands = [word for word in tag if word]
    assert commands[-1] == 'ci/toolchain.sh --attach "$VERSION" out/toolchain'
    assert "--only tag" in commands[-2]


def test_releases_and_nightlies_build_without_a_registry(workflow: dict, path) -> None:
    """Registry mode has no lock file: what signs and what is committed decides."""
    if path.stem not in ("nightly", "release"):
        pytest.skip("nothing that is published")
    for name, job in workflow["jobs"].items():
        runs = " ".join(step.get("run", "") for step in job["steps"])
        if "ci/pythons.sh" in runs:
            assert "container" in job, name
    runs = " ".join(step.get("run", "") for step in steps(workflow))
    assert "ci/build.sh --release" in runs or path.stem == "nightly"
    assert "TIERCEL_BAZEL_MODE" not in path.read_text()
    assert "secrets.TIERCEL_REMOTE_CACHE" not in path.read_text()


def test_our_machines_run_no_strangers_code(workflow: dict) -> None:
    events = set(workflow["on"])
    ours = [job for job in workflow["jobs"].values() if "self-hosted" in str(job["runs-on"])]
    secrets = "secrets." in str(workflow) or "write" in str(workflow)
    if ours or secrets:
        assert not events & UNTRUSTED
        assert all("refs/heads/main" in job["if"] for job in workflow["jobs"].values())
    assert not events & (UNTRUSTED - {"pull_request"})


def test_gpu_tests_run_on_our_gpus(path: pathlib.Path, workflow: dict) -> None:
    found = [job for job in workflow["jobs"].values() if "h100" in str(job["runs-on"])]
    assert bool(found) == (path.stem == "gpu")
    for job in found:
        # A label is anybody's to name; the group is bound to this file on main, as the page says.
        assert job["runs-on"]["group"] == "tiercel-gpu"
        page = pathlib.Path(os.environ["CI_RUNNERS"]).read_text()
        assert "`tiercel-gpu`" in page and "gpu.yml@refs/heads/main" in page
        commands = [step.get("run") for step in job["steps"]]
        assert "ci/test_gpu.sh --sanitize" in commands
        logs = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
        assert [(step["if"], step["with"]["path"]) for step in logs] == [("always()", "out")]


def test_steps_only_call_scripts(path: pathlib.Path, workflow: dict) -> None:
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    called = [command for command in commands if command.startswith("ci/")]
    assert called
    for command in called:
        assert "\n" not in command and command.split()[0].removeprefix("ci/") in SCRIPTS
    # What a bare image lacks is the only thing beside.
    others = [command for command in commands if command not in called]
    images = [job for job in workflow["jobs"].values() if "container" in job]
    assert len(others) == len(images) and len(set(others)) <= 1
    assert all(command.startswith("apt-get update && apt-get install ") for command in others)


def test_nothing_is_pasted_into_a_command(workflow: dict) -> None:
    assert not [s["run"] for s in steps(workflow) if "${{" in s.get("run", "")]


def test_a_checkout_keeps_no_credentials_that_it_does_not_need(
    path: pathlib.Path, workflow: dict
) -> None:
    for name, job in workflow["jobs"].items():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                kept = step.get("with", {}).get("persist-credentials", True)
                assert kept == ((path.stem, name) == ("release", "tag")), name


def test_docs_say_that_they_have_not_been_run() -> None:
    text = " ".join(pathlib.Path(os.environ["RELEASING"]).read_text().split())
    assert "The workflows have not been run yet" in text
