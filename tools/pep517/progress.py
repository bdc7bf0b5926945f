# SPDX-License-Identifier: Apache-2.0
"""How far a build is, on the terminal of whoever called pip.

pip keeps what a backend prints until it fails, so a first build would show nothing for minutes.
This writes one line to the terminal itself, and redraws it. Where there is none, in the background
and on request it writes nothing; all that Bazel says goes to the backend's output, and to a log.
"""

import contextlib
import os
import pathlib
import queue
import re
import subprocess
import sys
import threading
import time

_STEPS = re.compile(r"\[([\d,]+) / ([\d,]+)\] (.*?)(?:; \d+s\b.*)?$")
_BEFORE = re.compile(r"(?:bazelw|Loading|Analyzing|Fetching|Computing|Starting)\b.*")


def doing(line: str) -> str:
    """The progress that a line of Bazel's output reports, or ""."""
    line = "".join(c for c in line.strip() if c.isprintable())
    if match := _STEPS.fullmatch(line):
        done, total, what = match.groups()
        return f"{done} of {total} steps: {what}"
    return line if _BEFORE.fullmatch(line) else ""


class Terminal:
    """One line of the controlling terminal, if there is one that we may write to."""

    def __init__(self, wanted: bool) -> None:
        self._file, self._begun, self._since = -1, False, time.monotonic()
        with contextlib.suppress(OSError):
            if not wanted:
                return
            # Not waiting: who holds the terminal with Ctrl-S does not hold the build.
            self._file = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            if self._file >= 0 and os.tcgetpgrp(self._file) == os.getpgrp():
                os.write(self._file, text.encode(errors="replace"))

    def show(self, text: str) -> None:
        if self._file < 0:
            return
        minutes, seconds = divmod(int(time.monotonic() - self._since), 60)
        try:
            columns = os.get_terminal_size(self._file).columns or 80
        except OSError:
            columns = 80
        line = f"  tiercel: {minutes}:{seconds:02} {text}"[: max(columns - 4, 20)]
        # pip's own line stays; its spinner turns in the space at the end of ours.
        self._write(("\r\x1b[K" if self._begun else "\r\n") + line + "  ")
        self._begun = True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def run(command: list[str], *, log: pathlib.Path, show: bool, **options) -> int:
    """Runs a build; its output goes on to ours and to the log. Returns its exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    terminal = Terminal(show)
    lines: queue.Queue = queue.Queue()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        **options,
    )

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    now = f"building; Bazel's output is in {log.parent.name}/{log.name}"
    with log.open("w") as kept:
        try:
            while True:
                terminal.show(now)
                try:
                    line = lines.get(timeout=1)
                except queue.Empty:
                    continue
                if line is None:
                    return process.wait()
                kept.write(line)
                kept.flush()
                sys.stderr.write(line)
                sys.stderr.flush()
                now = doing(line) or now
        finally:
            terminal.close()
            if process.poll() is None:
                process.terminate()
                process.wait()
