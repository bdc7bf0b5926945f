# SPDX-License-Identifier: Apache-2.0
"""A process for each question, with a time limit.

They are forked from one that has imported PyTorch and the operators, which takes most of the time
of a short answer; it has started neither threads nor CUDA.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.workbench.smoke.worker import end

# A backend's row also says how its process ended.
RIGHT, HANG, CRASH = "right", "hang", "crash"

# Without the current folder on the path, where a file of the user's could hide a module; with the
# folder that this package is in, however it got here.
_START = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; "
    "from tiercel.workbench.smoke.worker import fork_on_request; sys.exit(fork_on_request())"
)
_PACKAGES = Path(__file__).parents[3]


@dataclass
class End:
    """The end of a process."""

    status: str
    how: str
    output: str
    said: bool = False  # whether the last line of its output is the reason

    def text(self, at: str) -> str:
        last = self.output.strip().splitlines()[-1:] if self.said else []
        return f"{self.how} at {at}" + "".join(f": {line.strip()[:200]}" for line in last)


def ask(request: dict[str, Any], timeout: float) -> tuple[list[dict[str, Any]], End]:
    """The report of a worker, and how it ended."""
    with tempfile.TemporaryDirectory(prefix="tiercel-smoke-") as folder:
        files = {name: Path(folder, name) for name in ("request", "reports", "output")}
        files["request"].write_text(json.dumps(request))
        code = _forker().run({name: str(path) for name, path in files.items()}, timeout)
        text = files["output"].read_text(errors="replace")
        return _read(files["reports"]), _end(code, timeout, text)


class _Forker:
    """The process that the others are forked from."""

    def __init__(self) -> None:
        # A session of its own: an interrupt from the keyboard is ours to handle.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(_PACKAGES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,  # what is read ahead, select does not see
        )
        self._answer()  # once everything is imported: no part of anyone's time

    def run(self, files: dict[str, str], timeout: float) -> int | None:
        """A worker's exit code as of subprocess, or None when it took too long."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(files).encode() + b"\n")
        pid = self._answer()
        ended = False
        try:
            ended = bool(select.select([self._process.stdout], [], [], timeout)[0])
        finally:
            if not ended:
                end(pid)
        code = self._answer()
        return code if ended else None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ImportError(f"importing PyTorch and tiercel.ops ended with exit code {code}")
        return int(line)


@functools.cache
def _forker() -> _Forker:
    forker = _Forker()
    atexit.register(forker.close)
    return forker


def _end(code: int | None, timeout: float, output: str) -> End:
    if code is None:
        return End(HANG, f"no end after {timeout:g} s", output)
    if code < 0:
        with contextlib.suppress(ValueError):
            return End(CRASH, f"killed by {signal.Signals(-code).name}", output)
        return End(CRASH, f"killed by signal {-code}", output)
    if code > 0:
        return End(CRASH, f"ended with exit code {code}", output, said=True)
    return End(RIGHT, "", output)


def _read(reports: Path) -> list[dict[str, Any]]:
    if not reports.exists():
        return []
    found = []
    for line in reports.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a last line cut short
            found.append(json.loads(line))
    return found
