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
    ("nightly", "nightly"): {"contents"},
    ("release", "publish"): {"attestations", "contents", "id-token"},
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
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


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
        assert written == set(granted), f"{name}: write implies read"
        assert job["timeout-minutes"] <= 180


def test_our_machines_run_no_strangers_code(workflow: dict) -> None:
    events = set(workflow["on"])
    ours = [job for job in workflow["jobs"].values() if "self-hosted" in job["runs-on"]]
    secrets = "secrets." in str(workflow) or "write" in str(workflow)
    if ours or secrets:
        assert not events & UNTRUSTED
        assert all("refs/heads/main" in job["if"] for job in workflow["jobs"].values())
    assert not events & (UNTRUSTED - {"pull_request"})


def test_gpu_tests_run_on_our_gpus(path: pathlib.Path, workflow: dict) -> None:
    labels = [job["runs-on"] for job in workflow["jobs"].values() if "h100" in job["runs-on"]]
    assert bool(labels) == (path.stem == "gpu")
    assert all("self-hosted" in found for found in labels)


def test_steps_only_call_scripts(path: pathlib.Path, workflow: dict) -> None:
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    called = [command for command in commands if command.startswith("ci/")]
    assert called
    for command in called:
        assert "\n" not in command and command.split()[0].removeprefix("ci/") in SCRIPTS
    # What a bare machine lacks is the only thing beside.
    others = [command.split()[0] for command in commands if command not in called]
    assert others == (["apt-get", "python3"] if path.stem == "canary" else [])


def test_nothing_is_pasted_into_a_command(workflow: dict) -> None:
    assert not [s["run"] for s in steps(workflow) if "${{" in s.get("run", "")]


def test_a_checkout_keeps_no_credentials_that_it_does_not_need(
    path: pathlib.Path, workflow: dict
) -> None:
    for name, job in workflow["jobs"].items():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                kept = step.get("with", {}).get("persist-credentials", True)
                assert kept == ((path.stem, name) == ("release", "publish")), name


def test_docs_say_that_nobody_has_run_them() -> None:
    text = " ".join(pathlib.Path(os.environ["RELEASING"]).read_text().split())
    assert "Nobody has run the workflows yet" in text
