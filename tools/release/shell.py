# SPDX-License-Identifier: Apache-2.0
"""Running commands for a release: what they say goes to the terminal and a log, secrets do not."""

import os
import pathlib
import subprocess
import sys
import threading
import time


class Failed(Exception):
    """A step cannot go on; the text says why and what to do."""


# Only the program that uploads gets these; their values never reach the log. ci/run_tool.sh keeps
# the same ones from Bazel.
SECRETS = (
    *("TWINE_USERNAME", "TWINE_PASSWORD", "TWINE_TEST_USERNAME", "TWINE_TEST_PASSWORD"),
    *("GH_TOKEN", "GITHUB_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_TOKEN", "ACTIONS_RUNTIME_TOKEN"),
)
# What `bazel run` adds for this program alone.
OURS = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "BUILD_WORKSPACE_DIRECTORY", "RUNFILES_DIR")


class Shell:
    def __init__(self, log: pathlib.Path, name: str = "release") -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.name = log, name
        names = [key for key in SECRETS if not key.endswith("USERNAME")]
        self._hidden = [os.environ[key] for key in names if os.environ.get(key)]

    def redacted(self, text: str) -> str:
        for secret in self._hidden:
            text = text.replace(secret, "***")
        return text

    def write(self, text: str) -> None:
        text = self.redacted(text)
        sys.stdout.write(text)
        sys.stdout.flush()
        with self.log.open("a") as log:
            log.write(text)

    def say(self, text: str) -> None:
        self.write(f"{self.name}: {text}\n")

    def step(self, name: str, text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self.log.open("a") as log:
            log.write(f"-- {stamp}\n")
        self.say(f"step {name}: {text}")

    def environment(self, secrets: dict[str, str] | None = None) -> dict[str, str]:
        """The machine's, without secrets but those given and without what is only for us."""
        env = {k: v for k, v in os.environ.items() if k not in SECRETS and k not in OURS}
        return env | (secrets or {})

    def run(
        self,
        command: list,
        *,
        cwd: pathlib.Path | None = None,
        env: dict[str, str] | None = None,
        fails: str = "",
        timeout: float = 7200,
    ) -> None:
        """Runs with its output shown and logged; raises Failed where it fails."""
        words = [str(word) for word in command]
        self.write(f"+ {' '.join(words)}\n")
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=env or self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        # Also when it says nothing any more.
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                self.write(line)
            code = process.wait()
        finally:
            timer.cancel()
        if code:
            raise Failed(fails or f"{words[0]} failed ({code})")

    def output(self, command: list, *, cwd: pathlib.Path, check: bool = True) -> str:
        """What a short command prints; not logged."""
        words = [str(word) for word in command]
        result = subprocess.run(
            words,
            cwd=cwd,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if check and result.returncode:
            raise Failed(self.redacted(f"{' '.join(words)}: {result.stderr.strip()}"))
        return result.stdout.strip() if result.returncode == 0 else ""
