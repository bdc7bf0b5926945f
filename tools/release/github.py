# SPDX-License-Identifier: Apache-2.0
"""The rolling prerelease on GitHub, by its own command line (gh)."""

import json
import os
import pathlib
import subprocess

import record
from shell import Failed, Shell

TAG = "tiercel-nightly"


class GitHub:
    def __init__(self, root: pathlib.Path, shell: Shell) -> None:
        self.root, self.shell = root, shell
        self.program = os.environ.get("GH_PROGRAM") or "gh"
        keys = ("GH_TOKEN", "GITHUB_TOKEN")
        secrets = {key: os.environ[key] for key in keys if os.environ.get(key)}
        self.env = shell.environment(secrets | {"GH_PROMPT_DISABLED": "1", "NO_COLOR": "1"})

    def _run(self, *words, fails: str) -> None:
        self.shell.run(
            [self.program, *words], cwd=self.root, env=self.env, fails=fails, timeout=1800
        )

    def release(self) -> dict:
        """Body and assets of the prerelease, or {} where there is none yet."""
        command = [self.program, "release", "view", TAG, "--json", "body,assets,isDraft"]
        try:
            result = subprocess.run(
                command, cwd=self.root, env=self.env, capture_output=True, text=True, timeout=300
            )
        except FileNotFoundError as error:
            raise Failed(
                "gh is not installed: the GitHub command line publishes nightlies"
            ) from error
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
