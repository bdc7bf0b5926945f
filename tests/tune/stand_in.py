# SPDX-License-Identifier: Apache-2.0
"""A bench without a GPU: a candidate's time follows from its name. Named by --bench in tests."""

import hashlib
import os
import signal
import time
from pathlib import Path

from tiercel.workbench.bench.launch import WrongResult
from tiercel.workbench.tune.problem import name_of


def milliseconds(problem, tokens, candidate):
    if candidate is None:
        return 0.5
    text = f"{problem.name} {tokens} {name_of(candidate)}"
    return 0.1 + int(hashlib.sha256(text.encode()).hexdigest()[:6], 16) / 2**24


class Bench:
    """TUNE_LOG: a file that gets a line a check; TUNE_DELAY: seconds that each takes; TUNE_WAIT: a
    file that all wait for.

    What TUNE_WRONG, TUNE_BROKEN or TUNE_KILL names, by a part of a candidate's name, gives a wrong
    result, does not compile, or ends the process; the latter until TUNE_KILL's file `@` exists.
    """

    def __init__(self, tunable):
        self.tunable = tunable
        self.log = os.environ.get("TUNE_LOG")
        self.delay = float(os.environ.get("TUNE_DELAY", "0"))
        self.wait = os.environ.get("TUNE_WAIT")

    def facts(self):
        names = {"gpu": "NVIDIA Stand-in", "driver": "1", "torch": "2", "commit": "abc"}
        return names | {"tiercel": "0"}

    def compile(self, problem, candidate):
        if os.environ.get("TUNE_BROKEN", "?") in name_of(candidate):
            raise RuntimeError("ptxas said no\nat length")

    def check(self, problem, tokens, candidate):
        name = "today" if candidate is None else name_of(candidate)
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(f"{os.environ.get('RANK', 0)} {problem.name} T={tokens} {name}\n")
        time.sleep(self.delay)
        while self.wait and not Path(self.wait).exists():
            time.sleep(0.05)
        kill, _, once = os.environ.get("TUNE_KILL", "?").partition("@")
        if kill in name and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("TUNE_WRONG", "?") in name:
            raise WrongResult("a result is off by 7.0 times its tolerance")

    def sample(self, problem, tokens, candidate, count):
        return [milliseconds(problem, tokens, candidate)] * count

    def usable(self):
        return True
