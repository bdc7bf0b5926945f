# SPDX-License-Identifier: Apache-2.0
"""Calls GitHub by its own command line (gh): the rolling prerelease, GPU test runs."""

import json
import os
import pathlib
import shutil
import subprocess
import time

import record
from shell import Failed, Shell

TAG = "tiercel-nightly"
GPU_WORKFLOW = "gpu.yml"
WITHOUT = "--without-gpu-run goes on without"


class GitHub:
    def __init__(self, root: pathlib.Path, shell: Shell) -> None:
        self.root, self.shell = root, shell
        self.program = os.environ.get("GH_PROGRAM") or "gh"
        keys = ("GH_TOKEN", "GITHUB_TOKEN")
        secrets = {key: os.environ[key] for key in keys if os.environ.get(key)}
        self.env = shell.environment(secrets | {"GH_PROMPT_DISABLED": "1", "NO_COLOR": "1"})

    def require(self, purpose: str) -> None:
        """Failed where there is no gh, before anything that takes time."""
        if not shutil.which(self.program):
            raise Failed(f"gh is not installed: the GitHub command line {purpose}")

    def require_for_gpu_runs(self) -> None:
        self.require(f"knows of the GPU tests; {WITHOUT}")

    def _output(self, *words) -> subprocess.CompletedProcess:
        command = [self.program, *words]
        return subprocess.run(
            command, cwd=self.root, env=self.env, capture_output=True, text=True, timeout=300
        )

    def gpu_runs(self, commit: str) -> list[dict]:
        path = f"repos/{{owner}}/{{repo}}/actions/workflows/{GPU_WORKFLOW}/runs?head_sha={commit}"
        result = self._output("api", path)
        if result.returncode:
            raise Failed(self.shell.redacted(f"gh api: {result.stderr.strip()}; {WITHOUT}"))
        # A run of another branch may have the same commit, but did not pass main's protection.
        return [r for r in json.loads(result.stdout)["workflow_runs"] if r["head_branch"] == "main"]

    def wait_for_gpu_run(self, commit: str, minutes: float) -> None:
        """Until the GPU tests have passed at the commit; Failed where they have not."""
        self.require_for_gpu_runs()
        limit, said = time.monotonic() + 60 * minutes, ""
        while True:
            runs = self.gpu_runs(commit)
            passed = [run for run in runs if run["conclusion"] == "success"]
            if passed:
                self.shell.say(f"the GPU tests passed: {passed[0]['html_url']}")
                return
            active = [run for run in runs if run["status"] != "completed"]
            if not active:
                what = f"have not run ({GPU_WORKFLOW})"
                if runs:
                    what = f"failed: {runs[0]['html_url']}"
                raise Failed(f"the GPU tests of {commit[:12]} {what}; {WITHOUT}")
            if time.monotonic() > limit:
                raise Failed(f"the GPU tests still run: {active[0]['html_url']}; {WITHOUT}")
            if said != active[0]["html_url"]:
                said = active[0]["html_url"]
                self.shell.say(f"waiting for the GPU tests: {said}")
            time.sleep(min(30, 0.6 * minutes))

    def _run(self, *words, fails: str) -> None:
        self.shell.run(
            [self.program, *words], cwd=self.root, env=self.env, fails=fails, timeout=1800
        )

    def release(self) -> dict:
        """Body and assets of the prerelease, or {} where there is none yet."""
        result = self._output("release", "view", TAG, "--json", "body,assets,isDraft")
        if result.returncode == 0:
            found = json.loads(result.stdout)
            if not found["isDraft"]:
                return found
            # The first run was killed: gh had not made it public.
            self._run("release", "delete", TAG, "--yes", fails="the draft could not be deleted")
            return {}
        if "release not found" in result.stderr:
            return {}
        raise Failed(self.shell.redacted(f"gh release view: {result.stderr.strip()}"))

    def create(self, version: str, commit: str, notes: pathlib.Path, files: list) -> None:
        options = ["--prerelease", "--target", commit, "--title", f"Nightly {version}"]
        options += ["--latest=false", "--notes-file", notes]
        self._run("release", "create", TAG, *options, *files, fails=f"{TAG} was not created")

    def upload(self, files: list[pathlib.Path], there: list[dict]) -> None:
        """Uploads what is not there with the same contents."""
        digests = {asset["name"]: asset.get("digest") for asset in there}
        files = [f for f in files if digests.get(f.name) != f"sha256:{record.sha256(f)}"]
        if files:
            fails = f"the upload failed: {TAG} is still what it was; run it again"
            self._run("release", "upload", TAG, "--clobber", *files, fails=fails)

    def point_at(self, version: str, commit: str, notes: pathlib.Path) -> None:
        """The tag, then title and notes, which say what to install."""
        path = f"repos/{{owner}}/{{repo}}/git/refs/tags/{TAG}"
        options = ["--method", "PATCH", "-f", f"sha={commit}", "-F", "force=true", "--silent"]
        self._run("api", path, *options, fails=f"the tag {TAG} could not be moved")
        options = ["--title", f"Nightly {version}", "--notes-file", notes, "--prerelease"]
        self._run("release", "edit", TAG, *options, fails="the notes could not be changed")

    def delete(self, name: str) -> None:
        fails = f"{name} could not be deleted"
        self._run("release", "delete-asset", TAG, name, "--yes", fails=fails)
