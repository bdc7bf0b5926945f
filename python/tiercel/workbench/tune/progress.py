# SPDX-License-Identifier: Apache-2.0
"""How far a sweep is and how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """A line that is rewritten on a terminal, and else printed every ten seconds."""

    def __init__(
        self,
        total: int,
        known: int,
        out: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._known = total, known
        self._out = out or sys.stderr
        self._now = now
        self._started = now()
        self._tty = self._out.isatty()
        self._shown = -float("inf")

    def line(self, done: int) -> str:
        elapsed = self._now() - self._started
        fresh = done - self._known
        words = [f"{done} of {self._total} trials", duration(elapsed)]
        if fresh > 0:  # what a journal brought took no time, and tells nothing of it
            words.append(f"about {duration(elapsed / fresh * (self._total - done))} left")
        return ", ".join(words)

    def show(self, done: int, what: str = "") -> None:
        now = self._now()
        last = done >= self._total
        if not last and now - self._shown < (0.2 if self._tty else 10.0):
            return
        self._shown = now
        text = self.line(done) + (f"  {what}" if what else "")
        if self._tty:
            print(f"\r\x1b[K{text}", end="\n" if last else "", file=self._out, flush=True)
        else:
            print(text, file=self._out, flush=True)
