# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr: one line that is redrawn on a terminal, an occasional line elsewhere."""

import sys
import time


def say(text: str) -> None:
    print(f"bazelw: {text}", file=sys.stderr, flush=True)


class Progress:
    """Shows `what: 12/141 packages, 30.1 of 195.9 MB`; call `update` as often as you like."""

    def __init__(self, what: str, *, quiet_seconds: float = 5.0):
        self._what = what
        self._tty = sys.stderr.isatty()
        self._interval = 0.2 if self._tty else quiet_seconds
        self._last = 0.0
        self._started = time.monotonic()
        self._open_line = False

    def update(self, done: str) -> None:
        now = time.monotonic()
        if now - self._last < self._interval:
            return
        self._last = now
        if self._tty:
            sys.stderr.write(f"\r\x1b[Kbazelw: {self._what}: {done}")
            sys.stderr.flush()
            self._open_line = True
        else:
            say(f"{self._what}: {done}")

    def finish(self, done: str) -> None:
        self.close()
        say(f"{self._what}: {done} ({time.monotonic() - self._started:.0f} s)")

    def close(self) -> None:
        if self._open_line:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._open_line = False


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"
